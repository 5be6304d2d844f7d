"""Log-probs of given tokens: roll's operators against linear + log_softmax + gather, in time and in
peak memory.

    python benchmarks/log_probs.py
    python benchmarks/log_probs.py --device cuda --tokens 8192 --hidden 3584 --vocab 151936 --dtype bf16

All ways run in turns, so that a busy machine hurts them alike; a ratio is the median over turns of
the ratio within a turn, and the best times come closest to a machine that does nothing else. Extra
memory is the peak on top of inputs and weights, gradients included: resident memory of a fresh
process for each way on a CPU, the allocator's own count on CUDA. Needs torch and this repository,
nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.ops.linear_log_probs import linear_log_probs
from roll.ops.log_probs import entropy_from_logits, log_probs_from_logits

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Problem:
    """Hidden states, a head, labels, incoming gradients and a mask that keeps every second position
    on average."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    grad: Tensor
    half: Tensor
    logits: Tensor | None = None  # only where logits that exist are measured

    @classmethod
    def random(
        cls, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str
    ) -> Problem:
        torch.manual_seed(0)
        half = torch.zeros(tokens, dtype=torch.bool, device=device)
        half[torch.randperm(tokens, device=device)[: tokens // 2]] = True
        return cls(
            hidden=torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_(),
            weight=torch.randn(vocab, hidden, device=device, dtype=dtype)
            .mul_(hidden**-0.5)
            .requires_grad_(),
            labels=torch.randint(0, vocab, (tokens,), device=device),
            grad=torch.randn(tokens, device=device),
            half=half,
        )

    def backward(self, result: Tensor) -> None:
        result.backward(self.grad)
        for leaf in (self.hidden, self.weight, self.logits):
            if leaf is not None:
                leaf.grad = None


def plain(problem: Problem, backward: bool) -> Tensor:
    logits = F.linear(problem.hidden, problem.weight)
    result = (
        torch.log_softmax(logits.float(), -1).gather(-1, problem.labels.unsqueeze(-1)).squeeze(-1)
    )
    del logits
    if backward:
        problem.backward(result)
    return result


def fused(
    problem: Problem, backward: bool, half: bool = False, with_entropy: bool = False
) -> Tensor:
    result, entropy = linear_log_probs(
        problem.hidden,
        problem.weight,
        problem.labels,
        mask=problem.half if half else None,
        with_entropy=with_entropy,
    )
    if backward:
        problem.backward(result if entropy is None else result + 0.01 * entropy)
    return result


def products(problem: Problem, number: int) -> None:
    """One matrix product for the logits, two more for the gradients of hidden states and weight:
    the floor."""
    logits = problem.hidden @ problem.weight.t()
    if number == 3:
        torch.mm(logits, problem.weight)
        torch.mm(logits.t(), problem.hidden)


def plain_from_logits(problem: Problem, backward: bool) -> None:
    assert problem.logits is not None
    result = (
        torch.log_softmax(problem.logits.float(), -1)
        .gather(-1, problem.labels.unsqueeze(-1))
        .squeeze(-1)
    )
    if backward:
        problem.backward(result)


def fused_from_logits(problem: Problem, backward: bool) -> None:
    assert problem.logits is not None
    result = log_probs_from_logits(problem.logits, problem.labels)
    if backward:
        problem.backward(result)


Way = Callable[[Problem], object]

FORWARD: dict[str, Callable[[Problem], Tensor]] = {
    "plain": lambda p: plain(p, False),
    "fused": lambda p: fused(p, False),
    "fused, with entropy": lambda p: fused(p, False, with_entropy=True),
}
TRAINING: dict[str, Way] = {
    "plain": lambda p: plain(p, True),
    "fused": lambda p: fused(p, True),
    "fused, with entropy": lambda p: fused(p, True, with_entropy=True),
    "fused, half masked": lambda p: fused(p, True, half=True),
}
FLOORS: dict[str, Way] = {
    "one product": lambda p: products(p, 1),
    "three products": lambda p: products(p, 3),
}
FROM_LOGITS: dict[str, Way] = {
    "plain forward": lambda p: plain_from_logits(p, False),
    "fused forward": lambda p: fused_from_logits(p, False),
    "fused forward, entropy": lambda p: (
        entropy_from_logits(p.logits) if p.logits is not None else None
    ),
    "plain forward + backward": lambda p: plain_from_logits(p, True),
    "fused forward + backward": lambda p: fused_from_logits(p, True),
}


def run(way: Way, problem: Problem, training: bool) -> None:
    with torch.set_grad_enabled(training):
        way(problem)


def seconds(way: Way, problem: Problem, training: bool) -> float:
    if not problem.hidden.is_cuda:
        start = time.perf_counter()
        run(way, problem, training)
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run(way, problem, training)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def times(
    ways: dict[str, Way], problem: Problem, training: bool, rounds: int
) -> dict[str, list[float]]:
    for way in ways.values():
        run(way, problem, training)
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            measured[name].append(seconds(way, problem, training))
    return measured


def ratio(measured: dict[str, list[float]], name: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(measured[name], measured[other], strict=True))


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(
        f"no {field} in /proc/self/status: peak memory on a CPU is measured on Linux only"
    )


def cpu_extra_bytes(way: Way, problem: Problem) -> int:
    """Peak of this process's resident memory above what it holds now. Linux."""
    tiny = Problem.random(16, problem.hidden.shape[1], 512, problem.hidden.dtype, "cpu")
    way(tiny)  # libraries and thread pools come in with the first products
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident_bytes("VmRSS:")
    way(problem)
    return resident_bytes("VmHWM:") - before


def cuda_extra_bytes(way: Way, problem: Problem, training: bool) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(way, problem, training)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def extra_bytes_in_new_process(name: str, arguments: argparse.Namespace) -> int:
    shape = [f"--{key}={getattr(arguments, key)}" for key in ("tokens", "hidden", "vocab", "dtype")]
    command = [sys.executable, __file__, *shape, f"--memory-of={name}"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def worst_error(problem: Problem, rows: int = 64) -> dict[str, float]:
    """Largest difference of the log-probs of the first rows from a float64 computation on the same
    inputs."""
    with torch.no_grad():
        exact = torch.log_softmax(problem.hidden[:rows].double() @ problem.weight.double().t(), -1)
        exact = exact.gather(-1, problem.labels[:rows].unsqueeze(-1)).squeeze(-1)
        small = Problem(
            problem.hidden[:rows], problem.weight, problem.labels[:rows], problem.grad, problem.half
        )
        return {
            name: float((FORWARD[name](small).double() - exact).abs().max())
            for name in ("plain", "fused")
        }


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, tuple("-" * width for width in widths), *rows):
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
        )
    print()


def report_cpu(problem: Problem, arguments: argparse.Namespace) -> bool:
    forward = times(FORWARD, problem, False, arguments.rounds)
    training = times(TRAINING, problem, True, arguments.rounds)
    memory = {name: extra_bytes_in_new_process(name, arguments) for name in TRAINING}
    rows = []
    for title, measured in (("forward", forward), ("forward + backward", training)):
        for name, turns in measured.items():
            of_plain = f"{ratio(measured, name, 'plain'):.2f}"
            best = (f"{min(turns):.2f}", f"{min(turns) / min(measured['plain']):.2f}")
            extra = ("", "")
            if measured is training:
                extra = (f"{memory[name] / 2**20:.0f}", f"1/{memory['plain'] / memory[name]:.1f}")
            rows.append(
                (f"{name}, {title}", f"{statistics.median(turns):.2f}", of_plain, *best, *extra)
            )
    print_table(
        ("CPU", "median s", "of plain", "best s", "of plain", "extra MiB", "of plain"), rows
    )
    goals = [
        ("extra memory of plain", memory["fused"] / memory["plain"], "at most", 1 / 6),
        ("time of plain", ratio(training, "fused", "plain"), "at most", 1.6),
        (
            "speed-up by masking half",
            1 / ratio(training, "fused, half masked", "fused"),
            "at least",
            1.7,
        ),
    ]
    reached = [
        (value <= goal) if sense == "at most" else (value >= goal)
        for _, value, sense, goal in goals
    ]
    print_table(
        ("goal (forward + backward)", "found", "wanted", ""),
        [
            (name, f"{value:.3f}", f"{sense} {goal:.3f}", "reached" if good else "MISSED")
            for (name, value, sense, goal), good in zip(goals, reached, strict=True)
        ],
    )
    return all(reached)


def report_cuda(problem: Problem, arguments: argparse.Namespace) -> None:
    groups: list[tuple[str, dict[str, Way], bool, str]] = [
        ("forward", {"one product": FLOORS["one product"], **FORWARD}, False, "one product"),
        (
            "forward + backward",
            {"three products": FLOORS["three products"], **TRAINING},
            True,
            "three products",
        ),
    ]
    for title, ways, training, floor in groups:
        if floor == "three products":
            ways = {
                name: _without_graph(way) if name == floor else way for name, way in ways.items()
            }
        measured = times(ways, problem, training, arguments.rounds)
        rows = [
            (
                name,
                f"{statistics.median(measured[name]) * 1000:.1f}",
                f"{ratio(measured, name, floor):.2f}",
                f"{ratio(measured, name, 'plain'):.2f}",
                f"{cuda_extra_bytes(way, problem, training) / 2**30:.2f}",
            )
            for name, way in ways.items()
        ]
        print_table((title, "ms", f"of {floor}", "of plain", "extra GiB"), rows)
    errors = worst_error(problem)
    print_table(
        ("worst error of a log-prob", "against float64"),
        [(k, f"{v:.1e}") for k, v in errors.items()],
    )

    with torch.no_grad():
        logits = problem.hidden @ problem.weight.t()
    existing = Problem(
        problem.hidden, problem.weight, problem.labels, problem.grad, problem.half, logits
    )
    logits.requires_grad_()
    measured = {}
    for training in (False, True):
        ways = {
            name: way for name, way in FROM_LOGITS.items() if name.endswith("backward") == training
        }
        measured |= times(ways, existing, training, arguments.rounds)
    copied = logits.numel() * logits.element_size() / 2**30
    rows = [
        (
            name,
            f"{statistics.median(measured[name]) * 1000:.2f}",
            f"{cuda_extra_bytes(FROM_LOGITS[name], existing, name.endswith('backward')) / 2**30:.2f}",
        )
        for name in FROM_LOGITS
    ]
    print_table((f"from logits that exist ({copied:.2f} GiB)", "ms", "extra GiB"), rows)


def _without_graph(way: Way) -> Way:
    def quiet(problem: Problem) -> object:
        with torch.no_grad():
            return way(problem)

    return quiet


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a goal of the CPU table is missed"
    )
    parser.add_argument(
        "--memory-of", choices=TRAINING, help=argparse.SUPPRESS
    )  # the fresh process of one way
    arguments = parser.parse_args()
    problem = Problem.random(
        arguments.tokens,
        arguments.hidden,
        arguments.vocab,
        DTYPES[arguments.dtype],
        arguments.device,
    )
    if arguments.memory_of:
        print(cpu_extra_bytes(TRAINING[arguments.memory_of], problem))
        return 0
    where = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    print(
        f"{arguments.tokens} tokens, hidden {arguments.hidden}, vocabulary {arguments.vocab}, {arguments.dtype}, "
        f"torch {torch.__version__}, {where}, {arguments.rounds} rounds\n"
    )
    if arguments.device == "cuda":
        report_cuda(problem, arguments)
        return 0
    return 1 if not report_cpu(problem, arguments) and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
