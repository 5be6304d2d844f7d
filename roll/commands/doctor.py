"""`roll doctor`: is this machine fit for training, and if not, what to type.

Nothing heavy is imported: versions come from package metadata, and torch is asked for its GPUs in a
process of its own, because a broken installation of it may end the process that imports it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from roll.exceptions import install_hint

PACKAGE = "roll-rl"
GIB = 1024**3
MIN_FREE_DISK_GIB = 5
MIN_MEMORY_GIB = 4
# Libraries that torch finds by itself; builds for another torch break model loading.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

TORCH_PROBE = """
import json, torch
gpus = []
for i in range(torch.cuda.device_count()):
    gib = torch.cuda.get_device_properties(i).total_memory / 2**30
    gpus.append(f"{torch.cuda.get_device_name(i)} ({gib:.0f} GiB)")
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` is what to do about it, for all that is not `ok`."""

    what: str
    state: Literal["ok", "optional", "warning", "problem"]
    found: str
    fix: str = ""


def examine(folder: Path | None = None) -> list[Finding]:
    """What a run depends on, most basic first. `folder` is where runs will be written."""
    wanted = metadata.metadata(PACKAGE)["Requires-Python"]
    python = f"{platform.python_version()} at {sys.executable} (needs {wanted})"
    packages = list(packages_of(PACKAGE))
    installed = [finding.what for finding in packages if finding.state == "ok"]
    return [
        Finding("Python", "ok", python),
        *packages,
        *conflicts(installed),
        *torch_companions(),
        torch_and_gpus(),
        *resources(Path.cwd() if folder is None else folder),
    ]


def packages_of(package: str) -> Iterator[Finding]:
    """Every requirement of a package against what is installed, those of its extras too."""
    # Packaging comes with transformers, a requirement: without it there is nothing to compare with.
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        found = "the package 'packaging' is missing"
        yield Finding("packages", "problem", found, "pip install packaging")
        return
    seen = set()
    for text in metadata.requires(package) or []:
        requirement = Requirement(text)
        name, specifier = requirement.name, requirement.specifier
        # `ray>=2; extra == "ray"` -> `ray`
        extra = text.partition("extra ==")[2].strip().strip("'\"()")
        is_for_others = requirement.marker and not requirement.marker.evaluate({"extra": extra})
        if name in seen or extra in ("dev", "docs", "bench") or is_for_others:
            continue
        seen.add(name)
        install = install_hint(extra) if extra else f"pip install '{name}{specifier}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if extra:
                found = f"not installed; the extra `{extra}` has it"
                yield Finding(name, "optional", found, install)
            else:
                yield Finding(name, "problem", "not installed", install)
            continue
        if specifier.contains(version, prereleases=True):
            yield Finding(name, "ok", version)
        else:
            found = f"{version}, but this version of roll needs {specifier}"
            yield Finding(name, "problem", found, install)


def conflicts(names: list[str]) -> Iterator[Finding]:
    """What installed packages ask of one another and do not have in the right version.

    The one that bites: packages that bring a newer antlr4 runtime than omegaconf can read.
    """
    if not names:  # also where packaging itself is missing
        return
    from packaging.requirements import Requirement

    for name in names:
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:  # does no harm
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                found = f"{version}, but {name} needs {requirement.specifier}"
                fix = f"pip install '{requirement.name}{requirement.specifier}'"
                yield Finding(requirement.name, "problem", found, fix)


def torch_companions() -> Iterator[Finding]:
    for name in TORCH_COMPANIONS:
        try:
            needed = [text for text in metadata.requires(name) or [] if text.startswith("torch==")]
            version, torch_version = metadata.version(name), metadata.version("torch")
        except metadata.PackageNotFoundError:
            continue
        wanted = needed[0].split(";")[0].strip().removeprefix("torch==") if needed else None
        if wanted is not None and torch_version.split("+")[0] != wanted:
            found = f"{version} was built for torch {wanted}, and torch is {torch_version}"
            yield Finding(name, "problem", found, f"pip uninstall {name}")


def torch_and_gpus() -> Finding:
    command = [sys.executable, "-c", TORCH_PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        fix = "run `nvidia-smi`; a driver that hangs needs a restart of the machine"
        return Finding("GPU", "problem", "torch did not answer within two minutes", fix)
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        fix = "pip install --force-reinstall torch"
        return Finding("torch", "problem", f"cannot be imported: {reason}", fix)
    answer = json.loads(probe.stdout.strip().splitlines()[-1])
    if answer["gpus"]:
        return Finding("GPU", "ok", f"{', '.join(answer['gpus'])}; CUDA {answer['cuda']}")
    if shutil.which("nvidia-smi"):
        found = f"there is a driver, but torch {answer['version']} sees no GPU"
        fix = "install a torch build with CUDA: https://pytorch.org/get-started/locally"
        return Finding("GPU", "problem", found, fix)
    fix = "fine for the demo and for tiny models"
    return Finding("GPU", "optional", "none; training runs on the CPU", fix)


def resources(folder: Path) -> Iterator[Finding]:
    """Memory, disk, and /dev/shm, where Ray keeps batches; containers often give it 64 MB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    found = f"{total:.0f} GiB, {os.cpu_count()} cores"
    if total >= MIN_MEMORY_GIB:
        yield Finding("memory", "ok", found)
    else:
        fix = f"tiny models run; others want at least {MIN_MEMORY_GIB} GiB"
        yield Finding("memory", "warning", found, fix)
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.0f} GiB free at {folder}"
    if free >= MIN_FREE_DISK_GIB:
        yield Finding("disk", "ok", found)
    else:
        fix = (
            "make room, set `output_dir` to another disk, or keep fewer checkpoints "
            "(`max_ckpt_to_keep`)"
        )
        yield Finding("disk", "warning", found, fix)
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total / GIB
        if size >= 1:
            yield Finding("/dev/shm", "ok", f"{size:.0f} GiB")
        else:
            found = f"{size:.2f} GiB; Ray will be slow"
            yield Finding("/dev/shm", "warning", found, "docker run --shm-size=8g ...")
