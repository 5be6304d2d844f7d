"""The names of metrics: those that docs/metrics.md has, and those that the package's source has."""

import ast
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
AREAS = "actor actor_train critic env global_seqlen group mask rollout scheduler system time token tokens val val_correct"
METRIC = re.compile(rf"(?:{'|'.join(AREAS.split())})(?:/[\w@{{}}.*-]+)+")
ANYTHING = "{}"


def documented_metrics() -> list[str]:
    """The names of docs/metrics.md, `{a,b}` written out; `{x}`, which stands for anything, becomes
    `{}`."""
    names = re.findall(
        r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE
    )
    return [written_out for name in names for written_out in _write_out(name)]


def _write_out(name: str) -> list[str]:
    parts = [
        part[1:-1].split(",") if "," in part else [ANYTHING] if part.startswith("{") else [part]
        for part in re.split(r"(\{[^}]*\})", name)
    ]
    return ["".join(choice) for choice in itertools.product(*parts)]


def _pattern(name: str) -> str:
    return ".+".join(map(re.escape, name.split(ANYTHING)))


def emitted_metrics() -> dict[str, str]:
    """Texts of the package that look like the name of a metric, with `{}` for what is filled in,
    and where they are."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "roll").rglob("*.py")):
        if "viewer" in path.parts:  # it reads metrics
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    part.value if isinstance(part, ast.Constant) else ANYTHING
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            name = re.sub(r"@(sum|mean|max|min|list)$", "", text)
            if METRIC.fullmatch(name):
                found[name] = str(path.relative_to(ROOT))
    return found


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that no documented one covers, and that are not the beginning of one either."""
    known = documented_metrics()
    whole = re.compile("|".join(map(_pattern, known)))
    return sorted(
        name
        for name in names
        if not whole.fullmatch(name) and not any(re.match(_pattern(name), other) for other in known)
    )
