"""Install hints name a command that works for whoever reads them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import roll.exceptions
from roll.exceptions import install_hint

ROOT = Path(__file__).parents[1]


def test_a_clone_is_installed_by_its_path(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert install_hint("lora") == "pip install -e '.[lora]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint("lora") == f"pip install -e '{ROOT}[lora]'"


def test_an_installed_wheel_is_named(tmp_path):
    """The module as a wheel leaves it: no pyproject.toml beside the package."""
    site = tmp_path / "site-packages" / "roll"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    shutil.copy(roll.exceptions.__file__, site / "exceptions.py")
    script = tmp_path / "hint.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(site.parent)!r})\nimport roll.exceptions\n"
    )
    with script.open("a") as file:
        file.write("print(roll.exceptions.install_hint('ray'))\n")
    found = subprocess.run(
        [sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=60
    )
    assert found.stdout == "pip install 'roll-rl[ray]'\n", found.stderr


def test_nothing_else_names_the_package_of_an_index():
    files = [
        path
        for folder in ("roll", "examples", "docs", "benchmarks")
        for path in (ROOT / folder).rglob("*.*")
    ]
    texts = {
        path: path.read_text() for path in files if path.suffix in (".py", ".md", ".yaml", ".js")
    }
    named = {
        path.name for path, text in texts.items() if re.search(r"pip install\S* '?roll-rl", text)
    }
    assert len(texts) > 100 and named == {"exceptions.py"}


def test_extras_that_messages_name_exist():
    declared = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S
    )
    assert declared is not None
    extras = set(re.findall(r"^(\w+) =", declared[1], re.M))
    sources = "".join(path.read_text() for path in (ROOT / "roll").rglob("*.py"))
    named = set(re.findall(r"install_hint\(['\"](\w+)['\"]\)", sources))
    assert len(named) >= 8 and named <= extras
