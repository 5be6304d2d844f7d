"""What a machine has: its GPUs and its memory, asked of the system itself, because importing torch takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from roll.configs.problems import did_you_mean
from roll.exceptions import ConfigError

GIB = 1024**3
# What drivers report as a card's whole memory, in GiB; it is a little less than the number in its name.
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
    """`8xH200`, `2x8xH200`, `1xA100-80GB`, `H200` or `cpu-64GB` as a machine; ConfigError for anything else."""
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
        names = ", ".join(GPU_GIB)
        raise ConfigError(
            f'--machine: no GPU called "{match[3]}" is known; {near + " " if near else ""}known: {names}'
        )
    return Machine(text, int(match[2] or 1), int(GPU_GIB[name] * GIB), None, int(match[1] or 1))


def this_machine(*, with_gpus: bool) -> Machine:
    """The machine that this program runs on. Asking for GPUs takes a moment where there are some."""
    gpus = visible_gpus() if with_gpus else []
    return Machine(
        "this machine", len(gpus), min(gpus, default=None), host_memory(), is_this_one=True
    )


def host_memory(
    cgroups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that this process may use: the machine's memory, or less where a container or a job has a limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # the second version: one tree for everything
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        # Every group above has a say; inside a container the path may name one that is not shown here.
        for folder in [group, *group.parents]:
            if folder != base and base not in folder.parents:
                break
            try:
                limits.append(int((folder / file).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
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
            if (entry == str(i)) or (entry and name.startswith(entry))
        ]
        if not found:  # CUDA stops at the first that does not exist
            break
        shown.append(sizes[found[0]])
    return shown


def _torch_gpus() -> list[int]:
    # The import takes seconds: only for what the driver's own library cannot tell.
    import torch

    return [
        int(torch.cuda.get_device_properties(i).total_memory)
        for i in range(torch.cuda.device_count())
    ]
