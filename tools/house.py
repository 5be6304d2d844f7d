"""Measures the house: prints how large `roll/` and `tests/` are beside the bounds that we set for
them.

    python tools/house.py            # the table
    python tools/house.py --once     # the short functions that are referenced once, to look at
    python tools/house.py --frames   # also runs two tiny trainings and counts the frames to the optimizer's step

The exit code is 1 if a bound is missed.
"""

import argparse
import ast
import contextlib
import io
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHORT = 10  # lines of a function that is hardly more than its call
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class House:
    """The modules below one folder, parsed once."""

    def __init__(self, folder: Path):
        self.texts = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}

    def lines(self) -> int:
        return sum(text.count("\n") for text in self.texts.values())

    def functions(self) -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
        return [
            (path, node)
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, FUNCTION)
        ]

    def comment_lines(self) -> int:
        return sum(
            line.lstrip().startswith("#")
            for text in self.texts.values()
            for line in text.splitlines()
        )

    def long_lines(self, longest: int = 100) -> int:
        return sum(
            len(line) > longest for text in self.texts.values() for line in text.splitlines()
        )

    def referenced_once(self) -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Short functions whose name is read in one place of the package (imports are not counted
        as reading)."""
        reads: Counter[str] = Counter()
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.Name):
                    reads[node.id] += 1
                elif isinstance(node, ast.Attribute):
                    reads[node.attr] += 1
        return [
            (path, node)
            for path, node in self.functions()
            if reads[node.name] == 1 and node.end_lineno - node.lineno + 1 <= SHORT
        ]

    def reached(self, module: str) -> int:
        """Lines of the modules that importing `module` can lead to, imports inside functions
        included."""
        paths = {
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for path in self.trees
        }
        seen: set[str] = set()
        todo = [module]
        while todo:
            name = todo.pop()
            if name in seen or name not in paths:
                continue
            seen.add(name)
            todo += [name.rpartition(".")[0]]
            for node in ast.walk(self.trees[paths[name]]):
                if isinstance(node, ast.Import):
                    todo += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        return sum(self.texts[paths[name]].count("\n") for name in seen)


def table(package: House, tests: House) -> list[tuple[str, float, float, str]]:
    """Rows of name, measured, bound and which side of the bound is good."""
    lines, functions = package.lines(), len(package.functions())
    return [
        ("lines of roll/", lines, 25_000, "at most"),
        ("modules", len(package.texts), 150, "at most"),
        ("functions per 1,000 lines", round(1000 * functions / lines, 1), 48, "at most"),
        (
            "functions referenced once, of at most 10 lines",
            len(package.referenced_once()),
            150,
            "at most",
        ),
        (
            "lines reached from rlvr_pipeline.py by import",
            package.reached("roll.pipeline.rlvr.rlvr_pipeline"),
            13_000,
            "at most",
        ),
        ("comment lines, percent", round(100 * package.comment_lines() / lines, 2), 3, "at least"),
        ("lines over 100 characters", package.long_lines(), 0, "at most"),
        ("lines of tests/", tests.lines(), 24_000, "at most"),
    ]


def frames() -> list[tuple[str, float, float, str]]:
    """Rows of the table: how deep in roll/ the optimizer's step is, in one step of two examples."""
    import torch

    from roll.cli import main as roll

    deepest: list[int] = []
    step = torch.optim.AdamW.step

    def counting(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        deepest.append(sum(file.startswith(f"{ROOT / 'roll'}/") for file in files))
        return step(self, *args, **kwargs)

    torch.optim.AdamW.step = counting
    rows: list[tuple[str, float, float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        makers = (
            ["dpo/make_data.py", folder, "--model"],
            ["rlvr/make_data.py", "--output", folder],
        )
        for script, *arguments in makers:
            command = [sys.executable, str(ROOT / "examples" / script), *arguments]
            subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        for example, train, test in (
            ("dpo/dpo_tiny.yaml", "train", "validation"),
            ("rlvr/reverse_grpo.yaml", "reverse_train", "reverse_test"),
        ):
            settings = {
                "pretrain": f"{folder}/model",
                "actor_train.data_args.file_name": f"{folder}/{train}.jsonl",
                "validation.data_args.file_name": f"{folder}/{test}.jsonl",
                "output_dir": f"{folder}/output",
                "max_steps": "1",
                "track_with": "none",
            }
            overrides = [f"{key}={value}" for key, value in settings.items()]
            sys.argv = ["roll", "train", str(ROOT / "examples" / example), *overrides]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                roll()
            name = f"frames to the optimizer's step, {example.partition('/')[0]}"
            rows.append((name, max(deepest), 8, "at most"))
            deepest.clear()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--once", action="store_true", help="list the short functions that are referenced once"
    )
    parser.add_argument(
        "--frames", action="store_true", help="also run two tiny trainings and count frames"
    )
    arguments = parser.parse_args()
    package, tests = House(ROOT / "roll"), House(ROOT / "tests")
    if arguments.once:
        for path, node in package.referenced_once():
            print(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
        return 0
    missed = 0
    rows = table(package, tests) + (frames() if arguments.frames else [])
    for name, measured, bound, side in rows:
        holds = measured <= bound if side == "at most" else measured >= bound
        missed += not holds
        print(f"{name:<50} {measured:>9,} {side} {bound:>7,}  {'' if holds else 'missed'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
