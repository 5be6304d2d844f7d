"""Where the Triton kernels are, on machines that have Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType


@functools.cache
def triton_module(name: str) -> ModuleType | None:
    """`roll.ops.<name>`, or None without Triton, which comes with torch for NVIDIA GPUs and with no other."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"roll.ops.{name}")
