"""Who may import whom (read from the source, function-level imports included), and what an import
brings in."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "roll"

# Imports go down only: a module never imports one whose layer has a higher number.
LAYERS = {
    "roll.exceptions": 0,
    "roll.roll_paths": 0,
    "roll.configs": 1,
    "roll.algorithms": 1,
    "roll.ops": 1,
    "roll.utils": 2,
    "roll.distributed": 2,
    "roll.datasets": 2,
    "roll.models": 2,
    "roll.engines": 2,
    "roll.viewer": 2,
    "roll.rewards.workers": 4,
    "roll.rewards": 2,
    "roll.rollout": 3,
    "roll.pipeline": 4,
    "roll.commands": 5,
    "roll.cli": 6,
}

# Packages that import no other part of roll than these.
ALLOWED = {
    "roll.exceptions": (),
    # The registries say what an estimator and a loss need; they bring no torch (see below).
    "roll.configs": (
        "roll.configs",
        "roll.exceptions",
        "roll.algorithms.estimators",
        "roll.algorithms.surrogates",
    ),
    "roll.ops": ("roll.ops",),
    "roll.algorithms": ("roll.algorithms", "roll.ops"),
}

# The only third-party packages that these import.
THIRD_PARTY = {
    "roll.exceptions": (),
    "roll.configs": ("pydantic", "pydantic_core", "omegaconf", "yaml"),
    "roll.ops": ("torch", "triton", "numpy"),
    "roll.algorithms": ("torch", "numpy"),
}

# Optional heavy packages, and the one module that imports each.
ONLY_IN = {
    "ray": "roll.distributed.executor.ray_backend",
    "vllm": "roll.distributed.strategy.vllm_strategy",
    "deepspeed": "roll.distributed.strategy.deepspeed_strategy",
    "wandb": "roll.utils.tracking",
    "trackio": "roll.utils.tracking",
    "math_verify": "roll.rewards.math_answers",
    "plotly": "roll.viewer.charts",
}

PIPELINES = tuple(f"roll.pipeline.{name}" for name in ("dpo", "rlvr", "agentic", "sft"))


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@cache
def module_files() -> dict[str, Path]:
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["roll", *path.relative_to(PACKAGE).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


class _Imports(ast.NodeVisitor):
    """Collects what a module imports when it runs; blocks under `if TYPE_CHECKING` are left out."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.found: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.extend(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        # `from package import name` may name a module or a thing inside the package.
        names = [f"{base}.{alias.name}" for alias in node.names]
        self.found.extend(name if name in module_files() else base for name in names)


def imports_of(source: str, module: str, is_package: bool) -> list[str]:
    visitor = _Imports(module if is_package else module.rpartition(".")[0])
    visitor.visit(ast.parse(source))
    return visitor.found


@cache
def all_imports() -> tuple[tuple[str, str], ...]:
    """(module, what it imports) over the whole package."""

    def pairs() -> Iterator[tuple[str, str]]:
        for module, path in module_files().items():
            for imported in imports_of(path.read_text(), module, path.name == "__init__.py"):
                yield module, imported

    return tuple(pairs())


def layer_of(module: str) -> int | None:
    return next((layer for package, layer in LAYERS.items() if inside(module, package)), None)


def test_the_reader_of_imports_sees_what_it_should() -> None:
    source = """
import ray.util
from roll.exceptions import RollError
from roll.configs import worker_config, WorkerConfig
from . import protocol
from ..executor.worker import Worker
if TYPE_CHECKING:
    import vllm
def inside():
    import wandb
"""
    found = imports_of(source, "roll.distributed.scheduler.decorator", is_package=False)
    assert found == [
        "ray.util",
        "roll.exceptions",
        "roll.configs.worker_config",
        "roll.configs",
        "roll.distributed.scheduler.protocol",
        "roll.distributed.executor.worker",
        "wandb",
    ]
    assert len(all_imports()) > 50


def test_every_module_has_a_layer() -> None:
    assert [
        module for module in module_files() if module != "roll" and layer_of(module) is None
    ] == []


def test_imports_go_down_only() -> None:
    wrong = []
    for module, imported in all_imports():
        above, below = layer_of(module), layer_of(imported)
        if above is not None and below is not None and below > above:
            wrong.append(f"{module} (layer {above}) imports {imported} (layer {below})")
    assert wrong == []


def test_the_lowest_layers_import_little_of_ours() -> None:
    wrong = []
    for module, imported in all_imports():
        for package, allowed in ALLOWED.items():
            is_ours = inside(module, package) and inside(imported, "roll")
            if is_ours and not any(inside(imported, other) for other in allowed):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_the_lowest_layers_import_few_other_packages() -> None:
    wrong = []
    for module, imported in all_imports():
        top = imported.split(".")[0]
        for package, allowed in THIRD_PARTY.items():
            is_foreign = top not in sys.stdlib_module_names and top != "roll"
            if inside(module, package) and is_foreign and top not in allowed:
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_pipelines_do_not_import_each_other() -> None:
    wrong = []
    for module, imported in all_imports():
        mine = next((pipeline for pipeline in PIPELINES if inside(module, pipeline)), None)
        other = next((pipeline for pipeline in PIPELINES if inside(imported, pipeline)), None)
        if mine and other and mine != other:
            wrong.append(f"{module} imports {imported}")
    assert wrong == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_optional_packages_are_imported_in_one_module(package: str) -> None:
    importers = {module for module, imported in all_imports() if inside(imported, package)}
    assert importers <= {ONLY_IN[package]}


HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "tensordict",
    "ray",
    "vllm",
    "deepspeed",
    "wandb",
    "pydantic",
    "omegaconf",
}


@pytest.mark.parametrize(
    ("modules", "brings"),
    [
        (["roll"], set()),
        (["roll.exceptions"], set()),
        (["roll.configs"], {"pydantic", "omegaconf"}),
        (["roll.rewards.pool", "roll.rewards.functions", "roll.rewards.ifeval"], set()),
        (["roll.rewards.check"], {"pydantic", "omegaconf"}),
        (["roll.cli"], {"pydantic", "omegaconf"}),
        (
            [f"roll.pipeline.{name}.{name}_config" for name in ("dpo", "rlvr", "agentic")],
            {"pydantic", "omegaconf"},
        ),
        (["roll.algorithms.*", "roll.ops.*"], {"torch", "numpy"}),
        (
            ["roll.distributed.scheduler.decorator", "roll.distributed.executor.cluster"],
            {"torch", "numpy", "tensordict"},
        ),
    ],
)
def test_imports_are_cheap(modules: list[str], brings: set[str]) -> None:
    """In a fresh interpreter, of the heavy packages at most `brings` are loaded."""
    names = []
    for pattern in modules:
        package = pattern.removesuffix(".*")
        names += (
            [name for name in module_files() if inside(name, package)]
            if pattern != package
            else [pattern]
        )
    program = f"import sys, {', '.join(names)}\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= brings
