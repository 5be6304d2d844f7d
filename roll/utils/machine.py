"""What a machine has, and how much of it a run may use: GPUs, memory, processors.

The system itself is asked, because importing torch takes seconds; psutil knows no container limits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from roll.configs.base import did_you_mean
from roll.exceptions import ConfigError

GIB = 1024**3
# What drivers report as a card's memory, in GiB; a little less than the number in its name.
GPU_GIB = {
    "T4": 14.6,
    "V100-16GB": 15.8,
    "V100-32GB": 31.7,
    "RTX3090": 23.6,
    "RTX4090": 23.6,
    "RTX5090": 31.4,
    "A10": 22.1,
    "A10G": 22.1,
    "L4": 22.0,
    "L40S": 44.4,
    "A40": 44.4,
    "A6000": 47.4,
    "A100-40GB": 39.4,
    "A100-80GB": 79.2,
    "H100": 79.2,
    "H100-NVL": 93.1,
    "H800": 79.2,
    "H20": 95.1,
    "H200": 139.8,
    "GH200": 94.5,
    "B200": 178.4,
    "MI300X": 191.5,
}
HOW_TO_WRITE = "write 8xH200, 2x8xH200 (two machines), 1xA100-80GB or cpu-64GB"
_ROOT = Path("/")
# /proc/stat counts hundredths of a second, so this shows shares of about 3%.
_LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Machine:
    """One or more equal machines. What is not known is None and is not compared with."""

    name: str
    num_gpus: int  # of one machine
    gpu_bytes: int | None  # the smallest of them
    host_bytes: int | None
    num_nodes: int = 1
    is_this_one: bool = False


def parse_machine(text: str) -> Machine:
    """`8xH200`, `2x8xH200`, `1xA100-80GB`, `H200` or `cpu-64GB`; ConfigError for anything else."""
    if match := re.fullmatch(r"cpu-(\d+)\s*Gi?B", text, re.IGNORECASE):
        return Machine(text, 0, None, int(match[1]) * GIB)
    match = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z][\w-]*)", text, re.IGNORECASE)
    if match is None or "0" in (match[1], match[2]):
        raise ConfigError(
            f'--machine: found "{text}", expected a number of GPUs and their name; {HOW_TO_WRITE}'
        )
    known = {name.lower(): name for name in GPU_GIB}
    name = known.get(match[3].lower())
    if name is None:
        sizes = [known for known in GPU_GIB if known.startswith(f"{match[3].upper()}-")]
        near = f"write {' or '.join(sizes)};" if sizes else did_you_mean(match[3].upper(), GPU_GIB)
        raise ConfigError(
            f'--machine: no GPU called "{match[3]}" is known; {near + " " if near else ""}known: '
            f"{', '.join(GPU_GIB)}"
        )
    return Machine(text, int(match[2] or 1), int(GPU_GIB[name] * GIB), None, int(match[1] or 1))


def this_machine(*, with_gpus: bool) -> Machine:
    """The machine that this program runs on. Asking for GPUs takes a moment."""
    gpus = visible_gpus() if with_gpus else []
    return Machine(
        "this machine", len(gpus), min(gpus, default=None), host_memory(), is_this_one=True
    )


def _limits(root: Path, controller: str, *names: str) -> Iterator[str]:
    """What the files of this process's control groups say, one text for each group.

    `names` are the file of the second version of control groups and those of the first.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # the second version: one tree for everything
            mount, files = root / "sys/fs/cgroup", names[:1]
        elif controller in controllers.split(","):
            mount, files = root / "sys/fs/cgroup" / controllers, names[1:]
        else:
            continue
        # Every group above has a say. In a container the path may be one of the host, and not be
        # there; the top is.
        folder = mount / path.lstrip("/")
        for group in [folder, *folder.parents]:
            if not group.is_relative_to(mount):
                continue
            texts: list[str] = []
            with suppress(OSError):  # not there, or not for us to read
                texts = [(group / file).read_text().strip() for file in files]
            if texts:
                yield " ".join(texts)


def host_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may use: the machine's memory, or less where a container has less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for text in _limits(root, "memory", "memory.max", "memory.limit_in_bytes"):
        if text != "max":
            limits.append(int(text))
    return min(limits)


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def visible_gpus() -> list[int]:
    """Memory in bytes of each GPU that torch would show, in their order; [] where there is none."""
    spec = importlib.util.find_spec("torch")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    version = "" if folder is None else (folder / "version.py").read_text()
    if re.search(r"^hip\b[^=]*= '", version, re.MULTILINE):
        return _torch_gpus()
    if not re.search(r"^cuda\b[^=]*= '", version, re.MULTILINE):  # a build for CPUs sees none
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    sizes, names = [], []
    for index in range(count.value):
        handle, memory, uuid = ctypes.c_void_p(), _NvmlMemory(), ctypes.create_string_buffer(96)
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid)))
        sizes.append(int(memory.total))
        names.append(uuid.value.decode())
    nvml.nvmlShutdown()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return sizes
    shown: list[int] = []
    for entry in [part.strip() for part in wanted.split(",")]:
        if entry.startswith("MIG"):
            return _torch_gpus()
        found = [
            i
            for i, name in enumerate(names)
            if entry == str(i) or (entry and name.startswith(entry))
        ]
        if not found:  # CUDA stops at the first that does not exist
            break
        shown.append(sizes[found[0]])
    return shown


def _torch_gpus() -> list[int]:
    # The import takes seconds: only for what the driver's own library cannot tell.
    import torch

    count = torch.cuda.device_count()
    return [int(torch.cuda.get_device_properties(i).total_memory) for i in range(count)]


# --------------------------------------------------------------------------------------------------
# Processors. A thread that waits for its turn on a busy one holds up all others of its sum: two
# threads on a machine with one free processor are many times slower than one.


@dataclass(frozen=True)
class Threads:
    """A number of threads, out of the processors of the machine, and why it is not more."""

    count: int
    total: int
    reason: str

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.count} of {self.total} processors{reason}"


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def given_processors(root: Path = _ROOT) -> int:
    """Processors that this process may run on, by its affinity and its quotas; at least 1."""
    quotas = [float(len(_affinity()))]
    # Microseconds in a period: "200000 100000"; "max" or -1 is no quota.
    for text in _limits(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        quota, period = text.split()
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return max(1, int(min(quotas)))


def idle_processors(
    root: Path = _ROOT, pause: Callable[[], None] = lambda: time.sleep(_LOOK_SECONDS)
) -> float:
    """How many of the processors of this process were idle during a pause; all if not known."""

    def times() -> dict[int, tuple[int, int]]:
        """(idle, all) hundredths of a second of each processor since the machine was started."""
        found = {}
        for line in (root / "proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in _affinity():
                # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
                spent = [int(number) for number in numbers[:8]]
                found[int(name[3:])] = (spent[3] + spent[4], sum(spent))
        return found

    try:
        before = times()
        pause()
        after = times()
    except OSError:
        return float(len(_affinity()))
    shares = 0.0
    for cpu in before.keys() & after.keys():
        idle, total = (after[cpu][i] - before[cpu][i] for i in range(2))
        shares += idle / total if total else 1.0
    return shares


def free_threads(
    root: Path = _ROOT, pause: Callable[[], None] = lambda: time.sleep(_LOOK_SECONDS)
) -> Threads:
    """As many threads as processors are free now, unless OMP_NUM_THREADS says how many."""
    total = os.cpu_count() or 1
    if (chosen := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return Threads(int(chosen), total, f"OMP_NUM_THREADS={chosen}")
    given = given_processors(root)
    idle = round(idle_processors(root, pause))
    if idle < given:
        return Threads(max(1, idle), total, "the others are busy")
    return Threads(given, total, "this process is given no more" if given < total else "")


def limit_threads(count: int) -> None:
    """Have torch use at most so many threads, unless OMP_NUM_THREADS says how many."""
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(count, torch.get_num_threads()))
