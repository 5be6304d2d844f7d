"""How the GPU benchmarks measure, and the rows of their table.

A group of ways to do the same thing runs in turns, so that a card that heats up hurts them alike; a
ratio is the median over turns of the ratio within a turn. Times are between CUDA events on the
current stream, after warm-up, with the host ahead of the device as it is in training: launching is
not measured unless the operator itself waits for the device. With `flush_l2` each one starts with a
cache that holds none of its inputs. Extra memory is the allocator's peak on top of what was there
before the call, results and gradients included unless they are subtracted.

    turns = measure({"ours": ours, "one GEMM": gemm}, rounds=10)
    Row("linear_log_probs, forward", "8,192 x 3,584 x 151,936 bf16", turns["ours"].ms, ...)
"""

from __future__ import annotations

import json
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Way = Callable[[], object]
RESULTS = Path(__file__).parent / "results" / "h200.json"
_HEAD_START = 1_500_000  # cycles, somewhat less than a millisecond, in which the host gets ahead
PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "verl")


@dataclass(frozen=True)
class Turns:
    """The milliseconds of one way in every turn, and its peak of memory on top of what was there
    before."""

    milliseconds: list[float]
    extra_bytes: int

    @property
    def ms(self) -> float:
        return statistics.median(self.milliseconds)

    def of(self, other: Turns) -> float:
        """How many times as long as `other`, which ran in the same turns."""
        pairs = zip(self.milliseconds, other.milliseconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class Bound:
    """What must hold: `found` at most `at_most`, or at least `at_least`."""

    what: str  # "of one GEMM", "extra GiB", "ms"
    found: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool:
        return (self.at_most is None or self.found <= self.at_most) and (
            self.at_least is None or self.found >= self.at_least
        )

    def __str__(self) -> str:
        goal = f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"
        return f"{self.found:.3g} {self.what} ({goal}{'' if self.holds else ', MISSED'})"


@dataclass(frozen=True)
class Row:
    """One operator at one shape."""

    operator: str
    shape: str  # "8,192 x 3,584 x 151,936 bf16"
    ms: float
    extra_bytes: int = 0
    error: float | None = None  # relative, against float64: norm(found - exact) / norm(exact)
    reference_error: float | None = None  # of the torch version in the same precision
    floor: str | None = None  # "one GEMM", "one read at copy bandwidth"
    of_floor: float | None = None  # time over the floor's
    peers: Mapping[str, float] = field(
        default_factory=dict
    )  # name -> its time over ours, in the same turns
    peer_bytes: Mapping[str, int] = field(default_factory=dict)
    bounds: Sequence[Bound] = ()
    note: str = ""

    @property
    def is_exact_enough(self) -> bool:
        """No worse than torch; a thousandth is the luck of the numbers."""
        return (
            self.error is None
            or self.reference_error is None
            or self.error <= 1.001 * self.reference_error
        )

    @property
    def holds(self) -> bool:
        return self.is_exact_enough and all(bound.holds for bound in self.bounds)


def measure(
    ways: Mapping[str, Way],
    *,
    rounds: int = 10,
    warm_up: int = 3,
    flush_l2: bool = False,
    repeat: int = 1,
) -> dict[str, Turns]:
    """Times and extra memory of every way, in turns. `repeat` calls between two events, for what
    takes microseconds; their time is divided by it."""
    extra: dict[str, int] = {}
    for name, way in ways.items():
        for _ in range(warm_up):
            way()
        extra[name] = extra_memory(way)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda") if flush_l2 else None
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds):
        # Another order in every turn: a way that follows an easy one finds a cooler card and a
        # higher clock.
        for name in order.sample(list(ways), len(ways)):
            way = ways[name]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if flush is not None:
                flush.zero_()
            torch.cuda._sleep(_HEAD_START)
            begin.record()
            for _ in range(repeat):
                way()
            end.record()
            end.synchronize()
            milliseconds[name].append(begin.elapsed_time(end) / repeat)
    return {name: Turns(milliseconds[name], extra[name]) for name in ways}


def extra_memory(way: Way) -> int:
    """Bytes that the allocator hands out at the peak of one call, beyond those in use before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def relative_error(found: Tensor, exact: Tensor) -> float:
    """norm(found - exact) / norm(exact) in float64; NaN if either holds one."""
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm())


def copy_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes a second of a large copy on the device, read and written ones together."""
    source = torch.randint(0, 127, (num_bytes,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    turns = measure({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * num_bytes / (turns.ms / 1000)


def environment() -> dict[str, Any]:
    """When, where and with what the numbers were made."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": packages,
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    header = (
        "operator",
        "shape",
        "ms",
        "extra GiB",
        "error (torch)",
        "of floor",
        "peers: time of ours (GiB)",
        "bounds",
    )
    cells = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.reference_error is not None:
        error += f" ({row.reference_error:.1e}{'' if row.is_exact_enough else ', WORSE'})"
    return (
        row.operator,
        row.shape,
        f"{row.ms:.3g}",
        f"{row.extra_bytes / 2**30:.2f}",
        error,
        "" if row.of_floor is None else f"{row.of_floor:.2f} x {row.floor}",
        ", ".join(
            _peer(name, ratio, row.peer_bytes.get(name)) for name, ratio in row.peers.items()
        ),
        "; ".join(str(bound) for bound in row.bounds) + (f" {row.note}" if row.note else ""),
    )


def _peer(name: str, ratio: float, extra_bytes: int | None) -> str:
    memory = "" if extra_bytes is None else f" ({extra_bytes / 2**30:.1f})"
    return f"{name} {ratio:.2g} x{memory}"


def save(rows: Sequence[Row], facts: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Writes rows and environment as JSON. The only way that a results file comes to be."""
    path.parent.mkdir(exist_ok=True)
    document = {**environment(), **facts, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def load(path: Path = RESULTS) -> tuple[dict[str, Any], list[Row]]:
    """What `save` wrote: the facts, and the rows."""
    document = json.loads(path.read_text())
    rows = [
        Row(**{**row, "bounds": [Bound(**bound) for bound in row["bounds"]]})
        for row in document.pop("rows")
    ]
    return document, rows
