"""The documentation is true: generated pages are current, links lead somewhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from metric_names import emitted_metrics, undocumented

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *ROOT.glob("docs/**/*.md"),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page can be linked to."""
    headings = re.findall(r"^#+\s+(.*)$", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_config_reference_is_current():
    check = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate_config_reference.py", "--check"],
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_or_heading_of_the_repository(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in LINK.findall(text):
        # A page outside of the repository may move, or never have been ours.
        assert "://" not in target, (
            f"{page.name} links to {target}; link to files of the repository, relatively"
        )
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), (
                f"{page.name} links to {target}, but {file.name} has no such heading"
            )


def python_blocks(page: Path) -> list[str]:
    """The fenced blocks marked exactly `python`; `python no-run` marks those that need what a test
    has not."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


WITH_CODE = [page for page in PAGES if python_blocks(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n\n".join(python_blocks(page)))
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_every_metric_that_the_code_names_is_documented():
    emitted = emitted_metrics()
    assert len(emitted) > 100
    assert {name: emitted[name] for name in undocumented(emitted)} == {}


def test_the_map_leads_to_what_exists():
    places = re.findall(
        r"`(roll/[\w/.]+\.py): ([\w.]+)`", (ROOT / "docs" / "where-is-what.md").read_text()
    )
    assert len(places) >= 12
    for file, symbol in places:
        found: ast.AST = ast.parse((ROOT / file).read_text())
        for name in symbol.split("."):
            defined = {}
            for node in ast.iter_child_nodes(found):
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    defined |= {ast.unparse(target): node for target in targets}
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    defined[node.name] = node
            assert name in defined, f"{file} has no {symbol}"
            found = defined[name]
