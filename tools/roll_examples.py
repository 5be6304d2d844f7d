"""What becomes of ROLL's example files and import paths here: the tables of
docs/migrating-from-roll.md.

    python tools/roll_examples.py ROLL                    every file of ROLL/examples: verdict and the one reason
    python tools/roll_examples.py ROLL --markdown         the same as a table for the documentation
    python tools/roll_examples.py ROLL --imports          every `from roll... import` of ROLL's examples and tests

ROLL is the folder of a checkout of alibaba/ROLL. Nothing is trained, downloaded or written. A file
`trains` if nothing but models, data, GPUs and installed packages stands between it and a run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll.configs.load import compose
from roll.configs.roll_keys import UNSUPPORTED_STRATEGIES
from roll.exceptions import ConfigError, MissingDependencyError, RollError
from roll.pipeline import registry
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.env import entry_point_of, load_entry_point
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.utils.import_utils import import_class

TRAINS, LOADS, REFUSED = "trains", "loads", "refused"
SHARED_PARTS = "config"  # the folder of examples/ whose files others include
# What decides, if a file has several problems: what cannot be exchanged for something else comes
# first.
_LASTING = ("sft_train", ": not supported: ", "not built yet")
_DECISIVE = ("no such file", "the file is empty", *_LASTING, "strategy")


@dataclass(frozen=True)
class Verdict:
    """`reason` says why not, or for a file that trains which of its keys have no effect."""

    verdict: str
    reason: str
    is_lasting: bool = False  # no other strategy helps


def example_files(root: Path) -> list[Path]:
    """Every YAML file of ROLL's examples that is a config of its own."""
    folder = root / "examples"
    if not folder.is_dir():
        raise ConfigError(f"{root}: has no folder examples; name the folder of a checkout of ROLL")
    return sorted(
        path for path in folder.rglob("*.yaml") if path.relative_to(folder).parts[0] != SHARED_PARTS
    )


def judge(path: Path, *, without_megatron: bool = False) -> Verdict:
    """The verdict on one file, as it is or with its Megatron strategies replaced by those of FSDP2
    without options."""
    try:
        composition = compose(path)
        if without_megatron:
            values = _without_megatron(composition.values)
            composition = replace(composition, values=values)
        loaded, found, _ = registry.read_config(composition)
        if found or loaded is None:
            raise ConfigError("\n".join(composition.located(found)))
    except RollError as error:
        line = decisive(str(error))
        return Verdict(REFUSED, shortened(line), any(sign in line for sign in _LASTING))
    config = loaded.config
    problems = [str(problem) for problem in config.missing_for_training()]
    problems += [
        problem for problem in _class_problems(config) if "which cannot be imported" not in problem
    ]
    if problems:
        return Verdict(LOADS, shortened(problems[0]))
    count = len(loaded.ignored)
    return Verdict(TRAINS, f"{count} keys without effect" if count else "")


def _without_megatron(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if str(value.get("strategy_name")).startswith("megatron_"):
        return {
            "strategy_name": UNSUPPORTED_STRATEGIES[value["strategy_name"]]
        }  # its options go with it
    return {key: _without_megatron(item) for key, item in value.items()}


def _class_problems(config: Any) -> Iterator[str]:
    """What is wrong with the classes that a config names and with what they are given. No
    environment is made."""

    def ask(key: str, question: Any, *args: Any) -> Any:
        try:
            return question(*args)
        except (ConfigError, MissingDependencyError) as error:
            asked.append(f"{key}: {error}")
        return None

    asked: list[str] = []
    for name, role in config.active_roles().items():
        worker_cls = role.worker_cls and ask(
            f"{config.key_of(name)}.worker_cls", import_class, role.worker_cls
        )
        if (
            isinstance(config, RLVRConfig)
            and name.startswith("reward-")
            and hasattr(worker_cls, "check")
        ):
            ask(config.key_of(name), worker_cls.check, role)
        sizes = [
            role.strategy_config.get(f"{kind}_parallel_size") or 1
            for kind in ("tensor", "pipeline")
        ]
        if role.strategy_name == "vllm" and max(sizes) > 1:
            asked.append(
                f"{config.key_of(name)}.strategy_args: vLLM over several GPUs is not built yet"
            )
    for tag in config.tags_in_use() if isinstance(config, AgenticConfig) else ():
        template, key = config.env_template(tag), f"custom_envs.{tag}"
        ask(f"{key}.env_manager_cls", import_class, template.env_manager_cls)
        found = ask(f"{key}.env_type", entry_point_of, str(template.env_type))
        make = found and ask(f"{key}.env_type", load_entry_point, found[0])
        try:
            if make:
                inspect.signature(make).bind(*found[1], **template.env_config)
        except TypeError as error:
            asked.append(f"{key}.env_config: {error}")
    yield from asked


def decisive(message: str) -> str:
    """The one problem of a file's error that decides."""
    lines = message.splitlines()
    ranked = [line for sign in _DECISIVE for line in lines if sign in line]
    return (ranked or lines)[0]


def shortened(line: str) -> str:
    """The first clause of a problem, without file and line and the types of values."""
    line = re.sub(r"^\S+\.ya?ml(:\d+)?: (?!no such file)", "", line)
    line = re.sub(r"found [^;]*; (?=not built yet)", "", line)
    line = re.split(r"; | \(named in|, so that|, because", line)[0]
    line = re.sub(r" \((int|str|float|bool|list|mapping)\)", "", line)
    line = re.sub(r"found \{.*\.\.\., ", "", line)
    line = re.sub(r"^[\w.]+: the strategy (\S+) is not supported", r"the strategy \1", line)
    line = line.replace("not supported: ", "")
    return line if len(line) <= 150 else line[:147] + "..."


# -- import paths
# ------------------------------------------------------------------------------------------------------


def imports_of(root: Path) -> dict[tuple[str, str], list[str]]:
    """(module, name) of every import from `roll` in ROLL's examples and tests, with the files that
    have it."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for folder in ("examples", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.ImportFrom)
                    and f"{node.module}.".startswith("roll.")
                    and not node.level
                ):
                    names = [(str(node.module), alias.name) for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [
                        (alias.name, "")
                        for alias in node.names
                        if f"{alias.name}.".startswith("roll.")
                    ]
                else:
                    continue
                for name in names:
                    wanted.setdefault(name, []).append(str(path.relative_to(root)))
    return wanted


def exists_in(root: Path, module: str, name: str) -> bool:
    """Whether ROLL's own source defines, or imports, `name` in `module`."""
    base = root / Path(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return False
    if name in ("", "*") or (base / f"{name}.py").is_file() or (base / name).is_dir():
        return True
    return re.search(rf"\b{re.escape(name)}\b", file.read_text(encoding="utf-8")) is not None


def resolves(module: str, name: str) -> bool:
    """Whether the import works here."""
    try:
        found = importlib.import_module(module)
        if name not in ("", "*") and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except (ModuleNotFoundError, MissingDependencyError):
        return False
    return True


# -- tables
# ------------------------------------------------------------------------------------------------------------


def print_files(root: Path, *, markdown: bool) -> None:
    files = example_files(root)
    os.environ.setdefault("WANDB_API_KEY", "unset")  # one of the files refers to it
    os.chdir(root / "examples")  # so that messages name files as the table does
    rows = []
    for path in files:
        name = path.relative_to(root / "examples")
        with contextlib.redirect_stdout(io.StringIO()):
            verdict, changed = judge(name), judge(name, without_megatron=True)
        has_megatron = "megatron_" in path.read_text(encoding="utf-8")
        if verdict.verdict == REFUSED and changed.is_lasting:
            verdict = changed  # that comes up only when the strategies are known
        rows.append((str(name), verdict, changed if has_megatron else None))
    counts = Counter(verdict.verdict for _, verdict, _ in rows)
    more = sum(
        changed is not None and changed.verdict == TRAINS != verdict.verdict
        for _, verdict, changed in rows
    )
    print(
        f"{len(rows)} files: {counts[TRAINS]} train as they are, {more} more once Megatron's strategies are replaced "
        f"by fsdp2_train and fsdp2_infer, {counts[LOADS]} load and do not train, "
        f"{counts[REFUSED] - more} are refused either way.\n"
    )
    if markdown:
        print(
            "| file | verdict | the one reason | with FSDP2 in place of Megatron |\n|---|---|---|---|"
        )
    for name, verdict, changed in rows:
        other = "" if changed is None else changed.verdict
        if changed is not None and changed.verdict != TRAINS and changed.reason != verdict.reason:
            other += f": {changed.reason}"
        cells = [name, verdict.verdict, verdict.reason, other]
        if markdown:
            print(
                "| "
                + " | ".join([f"`{name}`", *(cell.replace("|", r"\|") for cell in cells[1:])])
                + " |"
            )
        else:
            print(
                "  ".join(
                    [
                        f"{name:75}",
                        f"{verdict.verdict:7}",
                        verdict.reason,
                        f"[{other}]" if other else "",
                    ]
                )
            )


def print_imports(root: Path, *, markdown: bool) -> None:
    wanted = imports_of(root)
    known = {name: files for name, files in wanted.items() if exists_in(root, *name)}
    absent = {name: files for name, files in known.items() if not resolves(*name)}
    print(
        f"{len(wanted)} imports; {len(wanted) - len(known)} do not exist in this ROLL either; of the other "
        f"{len(known)}, {len(known) - len(absent)} work here and {len(absent)} do not:\n"
    )
    groups: dict[str, list[str]] = {}
    for module, name in absent:
        groups.setdefault(module, []).append(name)
    for module, names in sorted(groups.items()):
        listed = ", ".join(
            f"`{name}`" if markdown else name for name in sorted(filter(None, names))
        )
        print(f"- `{module}`: {listed}" if markdown else f"{module:60} {listed}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("roll", type=Path, help="folder of a checkout of ROLL")
    parser.add_argument("--markdown", action="store_true", help="print for the documentation")
    parser.add_argument("--imports", action="store_true", help="import paths instead of files")
    given = parser.parse_args()
    try:
        (print_imports if given.imports else print_files)(
            given.roll.resolve(), markdown=given.markdown
        )
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
