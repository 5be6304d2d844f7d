"""What the operators need of a GPU: Triton kernels where there is Triton, and a second stream."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch


@functools.cache
def triton_module(name: str) -> ModuleType | None:
    """`roll.ops.<name>`, or None without Triton, which comes with torch for NVIDIA GPUs only."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"roll.ops.{name}")


@functools.cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device. Its work goes first where both streams have some: it is waited for."""
    return torch.cuda.Stream(device, priority=-1)


class Beside:
    """Lets a pass over one tile run beside the product that makes the next one, on a second stream.

    The product keeps the arithmetic units busy and the pass the memory, so that together they take
    little longer than the product alone. Tiles take turns in `num_buffers`; on a CPU, or with one
    buffer, everything runs in order.

        for tile in tiles:
            beside.wait_for_a_buffer()
            make(tile)
            with beside.run():
                read(tile)
        beside.join()
    """

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self.num_buffers = num_buffers
        self.main = self.side = None
        if device.type == "cuda" and num_buffers > 1:
            self.main, self.side = torch.cuda.current_stream(device), second_stream(device)
        self.readers: deque[torch.cuda.Event] = deque()

    def wait_for_a_buffer(self) -> None:
        """Before a product: the pass that read what it overwrites must be over."""
        if self.main is not None and len(self.readers) == self.num_buffers:
            self.main.wait_event(self.readers.popleft())

    @contextmanager
    def run(self, reads_buffer: bool = True) -> Iterator[None]:
        """Inside, work waits for the products so far; the products to come do not wait for it."""
        if self.main is None or self.side is None:
            yield
            return
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            yield
        if reads_buffer:
            done = torch.cuda.Event()
            done.record(self.side)
            self.readers.append(done)

    def join(self) -> None:
        """What follows sees all passes, and the memory that they used may be given to others."""
        if self.main is not None and self.side is not None:
            self.main.wait_stream(self.side)
