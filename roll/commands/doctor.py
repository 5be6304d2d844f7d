"""`roll doctor`: is this machine fit for training, and if not, what to type.

Nothing heavy is imported: versions come from package metadata, and torch is asked for its GPUs last, in a process of
its own, because a broken installation of it may end the process that imports it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll.exceptions import install_hint

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

PACKAGE = "roll-rl"
GIB = 1024**3
MIN_FREE_DISK_GIB = 5
MIN_MEMORY_GIB = 4
# Libraries that torch finds by itself when they are installed; builds for another torch break model loading.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

State = Literal["ok", "optional", "warning", "problem"]

TORCH_PROBE = """
import json, torch
gpus = [
    {"name": torch.cuda.get_device_name(i), "gib": torch.cuda.get_device_properties(i).total_memory / 2**30}
    for i in range(torch.cuda.device_count())
]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` is what to do about it, for everything that is not `ok`."""

    what: str
    state: State
    found: str
    fix: str = ""


def examine(folder: Path | None = None) -> list[Finding]:
    """Everything that a run depends on, most basic first. `folder` is where runs will be written."""
    folder = Path.cwd() if folder is None else folder
    return [
        *_python(),
        *_packages(),
        *_torch_companions(),
        *_torch(),
        *_memory(),
        *_disk(folder),
        *_shared_memory(),
    ]


def as_json(findings: list[Finding]) -> str:
    return json.dumps(
        {"healthy": is_healthy(findings), "findings": [asdict(item) for item in findings]}, indent=2
    )


def is_healthy(findings: list[Finding]) -> bool:
    return all(item.state != "problem" for item in findings)


def _python() -> list[Finding]:
    wanted = metadata.metadata(PACKAGE)["Requires-Python"]
    found = f"{platform.python_version()} at {sys.executable}"
    return [Finding("Python", "ok", f"{found} (needs {wanted})")]


def _packages() -> list[Finding]:
    """Every requirement of this package against what is installed; extras only where something of them is there."""
    # Packaging comes with transformers, which is itself a requirement: without it there is nothing to compare with.
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return [
            Finding(
                "packages", "problem", "the package 'packaging' is missing", "pip install packaging"
            )
        ]
    findings: dict[str, Finding] = {}
    for text in metadata.requires(PACKAGE) or []:
        requirement = Requirement(text)
        extra = _extra_of(text)
        if extra in ("dev", "docs", "bench") or (
            requirement.marker is not None
            and not requirement.marker.evaluate({"extra": extra or ""})
        ):
            continue
        findings.setdefault(
            requirement.name, _package(requirement.name, requirement.specifier, extra)
        )
    installed = [name for name, finding in findings.items() if finding.state == "ok"]
    return [*findings.values(), *_conflicts(installed)]


def _conflicts(names: list[str]) -> list[Finding]:
    """What the installed packages ask of one another and do not have; what is missing altogether does no harm.

    The one that bites: packages that bring a newer antlr4 runtime than omegaconf can read.
    """
    from packaging.requirements import Requirement

    findings = []
    for name in names:
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                found = f"{version}, but {name} needs {requirement.specifier}"
                fix = f"pip install '{requirement.name}{requirement.specifier}'"
                findings.append(Finding(requirement.name, "problem", found, fix))
    return findings


def _package(name: str, specifier: SpecifierSet, extra: str | None) -> Finding:
    install = install_hint(extra) if extra else f"pip install '{name}{specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if extra is None:
            return Finding(name, "problem", "not installed", install)
        return Finding(name, "optional", f"not installed; the extra `{extra}` has it", install)
    if specifier.contains(version, prereleases=True):
        return Finding(name, "ok", version)
    return Finding(
        name, "problem", f"{version}, but this version of roll needs {specifier}", install
    )


def _extra_of(requirement: str) -> str | None:
    """`ray>=2; extra == "ray"` -> `ray`."""
    _, _, condition = requirement.partition("extra ==")
    return condition.strip().strip("'\"()") or None


def _torch_companions() -> list[Finding]:
    findings = []
    for name in TORCH_COMPANIONS:
        try:
            needed = [text for text in metadata.requires(name) or [] if text.startswith("torch==")]
            version, torch_version = metadata.version(name), metadata.version("torch")
        except metadata.PackageNotFoundError:
            continue
        wanted = needed[0].split(";")[0].strip().removeprefix("torch==") if needed else None
        if wanted is not None and torch_version.split("+")[0] != wanted:
            found = f"{version} was built for torch {wanted}, and torch is {torch_version}"
            findings.append(Finding(name, "problem", found, f"pip uninstall {name}"))
    return findings


def _torch() -> list[Finding]:
    try:
        probe = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        fix = "run `nvidia-smi`; a driver that hangs needs a restart of the machine"
        return [Finding("GPU", "problem", "torch did not answer within two minutes", fix)]
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        return [
            Finding(
                "torch",
                "problem",
                f"cannot be imported: {reason}",
                "pip install --force-reinstall torch",
            )
        ]
    answer = json.loads(probe.stdout.strip().splitlines()[-1])
    if answer["gpus"]:
        names = ", ".join(f"{gpu['name']} ({gpu['gib']:.0f} GiB)" for gpu in answer["gpus"])
        return [Finding("GPU", "ok", f"{names}; CUDA {answer['cuda']}")]
    if shutil.which("nvidia-smi"):
        found = f"there is a driver, but torch {answer['version']} sees no GPU"
        fix = "install a torch build with CUDA: https://pytorch.org/get-started/locally"
        return [Finding("GPU", "problem", found, fix)]
    return [
        Finding(
            "GPU",
            "optional",
            "none; training runs on the CPU",
            "fine for the demo and for tiny models",
        )
    ]


def _memory() -> list[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    found = f"{total:.0f} GiB, {os.cpu_count()} cores"
    if total >= MIN_MEMORY_GIB:
        return [Finding("memory", "ok", found)]
    return [
        Finding(
            "memory",
            "warning",
            found,
            f"tiny models run; others want at least {MIN_MEMORY_GIB} GiB",
        )
    ]


def _disk(folder: Path) -> list[Finding]:
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.0f} GiB free at {folder}"
    if free >= MIN_FREE_DISK_GIB:
        return [Finding("disk", "ok", found)]
    fix = "make room, set `output_dir` to another disk, or keep fewer checkpoints (`max_ckpt_to_keep`)"
    return [Finding("disk", "warning", found, fix)]


def _shared_memory() -> list[Finding]:
    """Ray keeps batches in /dev/shm; containers often give it 64 MB."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    size = shutil.disk_usage(folder).total / GIB
    if size >= 1:
        return [Finding("/dev/shm", "ok", f"{size:.0f} GiB")]
    return [
        Finding(
            "/dev/shm",
            "warning",
            f"{size:.2f} GiB; Ray will be slow",
            "docker run --shm-size=8g ...",
        )
    ]
