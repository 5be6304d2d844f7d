"""Returns, advantages and segment means against plain loops. Prints tables; exits with 1 if a
promised limit is broken.

    python benchmarks/algorithms.py
    python benchmarks/algorithms.py --rows 64 --tokens 4096
    python benchmarks/algorithms.py --roll-checkout /path/to/ROLL     # also against ROLL itself

The loops are the code that one would write first: over T with operations on columns, or over rows
and runs. All take turns, so that a busy machine slows them alike; a ratio is the median over turns
of the ratio within a turn. Freed memory stays with the process, as in one that trains: with glibc's
defaults it goes back to the system now and then, so that the page faults of a result, a third of
its time, are measured or not by chance (`--system-malloc` leaves it so). The error is max
|difference| / max |value| against the loop in float64. Memory is what a fresh process needs on top
of the inputs at its peak, results included, as a multiple of the inputs. verl is measured if it is
installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

GAMMA, LAM = 0.99, 0.95
MIN_SPEEDUP = {"discounted returns": 15.0, "gae": 15.0, "segment mean": 10.0}
MAX_ERROR, MAX_MEMORY, MAX_GROWTH = 1e-5, 8.0, 2.3


@dataclass
class Problem:
    """Rewards, values and a boolean mask: a prompt, turns of random length with gaps between them,
    padding."""

    rewards: Tensor
    values: Tensor
    mask: Tensor

    @classmethod
    def random(cls, rows: int, tokens: int) -> Problem:
        generator = torch.Generator().manual_seed(0)
        turns = (torch.rand(rows, tokens, generator=generator) < 0.02).cumsum(1)
        lengths = torch.randint(tokens // 2, tokens, (rows, 1), generator=generator)
        position = torch.arange(tokens)
        mask = (turns % 3 != 2) & (position >= tokens // 40) & (position < lengths)
        rewards, values = (torch.randn(rows, tokens, generator=generator) for _ in range(2))
        return cls(rewards, values, mask)

    def double(self) -> Problem:
        return Problem(self.rewards.double(), self.values.double(), self.mask)

    def num_bytes(self, name: str) -> int:
        used = [self.rewards, self.mask, *([self.values] if name == "gae" else [])]
        return sum(tensor.numel() * tensor.element_size() for tensor in used)


# the loops


def loop_returns(p: Problem) -> Tensor:
    following = torch.zeros(len(p.rewards), dtype=p.rewards.dtype)
    columns = []
    for t in reversed(range(p.rewards.shape[1])):
        valid = p.mask[:, t]
        following = torch.where(valid, p.rewards[:, t] + GAMMA * following, following)
        columns.append(torch.where(valid, following, 0.0))
    return torch.stack(columns[::-1], dim=1)


def loop_gae(p: Problem) -> tuple[Tensor, Tensor]:
    advantage = next_value = torch.zeros(len(p.rewards), dtype=p.rewards.dtype)
    columns = []
    for t in reversed(range(p.rewards.shape[1])):
        valid, value = p.mask[:, t], p.values[:, t]
        delta = p.rewards[:, t] + GAMMA * next_value - value
        advantage = torch.where(valid, delta + GAMMA * LAM * advantage, advantage)
        next_value = torch.where(valid, value, next_value)
        columns.append(torch.where(valid, advantage, 0.0))
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, torch.where(p.mask, advantages + p.values, 0.0)


def runs_of(mask_row: Tensor) -> list[list[int]]:
    edges = torch.diff(mask_row.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int())
    return torch.stack(
        [(edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()], dim=1
    ).tolist()


def loop_segment_mean(p: Problem) -> Tensor:
    out = torch.zeros_like(p.rewards)
    for i in range(len(p.rewards)):
        for start, end in runs_of(p.mask[i]):
            out[i, start:end] = p.rewards[i, start:end].mean()
    return out


def loop_turn_returns(p: Problem) -> Tensor:
    out = torch.zeros_like(p.rewards)
    for i in range(len(p.rewards)):
        following = 0.0
        for start, end in reversed(runs_of(p.mask[i])):
            following = p.rewards[i, start:end].sum().item() + GAMMA * following
            out[i, start:end] = following
    return out


LOOPS: dict[str, Callable[[Problem], Tensor | tuple[Tensor, Tensor]]] = {
    "discounted returns": loop_returns,
    "gae": loop_gae,
    "turn returns": loop_turn_returns,
    "segment mean": loop_segment_mean,
}


def ours() -> dict[str, Callable[[Problem], Tensor | tuple[Tensor, Tensor]]]:
    from roll.algorithms.advantages import discounted_returns, gae, turn_discounted_returns
    from roll.algorithms.masking import segment_masked_mean

    return {
        "discounted returns": lambda p: discounted_returns(p.rewards, p.mask, GAMMA),
        "gae": lambda p: gae(p.rewards, p.values, p.mask, GAMMA, LAM),
        "turn returns": lambda p: turn_discounted_returns(p.rewards, p.mask, GAMMA),
        "segment mean": lambda p: segment_masked_mean(p.rewards, p.mask),
    }


def roll_functions() -> dict[str, Callable[[Problem], object]]:
    """ROLL's own functions. Its package has our name, so this runs in a process of its own, where
    ours is not found."""
    from roll.pipeline.agentic.utils import compute_segment_masked_mean
    from roll.utils.functionals import compute_gae_advantage_return, compute_reinforce_return

    return {
        "discounted returns": lambda p: compute_reinforce_return(p.rewards, GAMMA, LAM),
        "gae": lambda p: compute_gae_advantage_return(p.rewards, p.values, GAMMA, LAM),
        "segment mean": lambda p: compute_segment_masked_mean(p.rewards, p.mask.long()),
    }


def verl_functions() -> dict[str, Callable[[Problem], object]]:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    return {
        "gae": lambda p: compute_gae_advantage_return(
            p.rewards, p.values, p.mask.float(), GAMMA, LAM
        )
    }


PEERS = {"roll": roll_functions, "verl": verl_functions}


# measuring


def keep_freed_memory() -> None:
    """Start this program again with a malloc that gives nothing back to the system (glibc's; others
    ignore this)."""
    settings = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
    if not settings.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def seconds(function: Callable[[Problem], object], problem: Problem) -> float:
    start = time.perf_counter()
    result = function(problem)
    duration = time.perf_counter() - start
    del result  # freeing is not part of it
    return duration


def in_turns(turns: int, *calls: tuple[Callable[[Problem], object], Problem]) -> list[list[float]]:
    """Durations of each call; the first turn warms up and does not count."""
    durations: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        for (function, problem), times in zip(calls, durations, strict=True):
            duration = seconds(function, problem)
            if turn:
                times.append(duration)
    return durations


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def relative_error(
    actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]
) -> float:
    """The largest one, over all results of a function."""
    if isinstance(actual, tuple):
        return max(relative_error(a, e) for a, e in zip(actual, expected, strict=True))
    assert isinstance(expected, Tensor)
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def report_memory(name: str, rows: int, tokens: int) -> None:
    """Run by a fresh process: print the extra memory of one call, at its peak, over the size of its
    inputs."""
    function = ours()[name]
    function(Problem.random(2, 64))  # libraries and thread pools are not part of it
    problem = Problem.random(rows, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident_bytes("VmRSS")
    result = function(problem)
    print((resident_bytes("VmHWM") - before) / problem.num_bytes(name))
    del result


def ask(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True, text=True, check=False, env=os.environ | environment, cwd=environment.get("PYTHONPATH"),
    )  # fmt: skip


def measured_memory(name: str, rows: int, tokens: int) -> float | None:
    if not Path("/proc/self/clear_refs").exists():
        return None
    answer = ask(["--memory-of", name, "--rows", str(rows), "--tokens", str(tokens)])
    if answer.returncode:
        raise RuntimeError(answer.stderr)
    return float(answer.stdout)


def report_peer(name: str, problem: Problem, turns: int) -> None:
    """Run by a process of its own: print `function milliseconds` for every function of a peer."""
    for function_name, function in PEERS[name]().items():
        (times,) = in_turns(turns, (function, problem))
        print(f"{function_name}\t{statistics.median(times) * 1e3}")


# tables


def table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells))
    print()


def main_table(problem: Problem, turns: int, broken: list[str]) -> None:
    rows, tokens = problem.rewards.shape
    valid = problem.mask.float().mean().item()
    print(
        f"{rows} x {tokens} float32, {valid:.0%} of the tokens valid, {torch.get_num_threads()} threads\n"
    )
    lines, functions, exact = [], ours(), problem.double()
    for name, loop in LOOPS.items():
        own, looped = in_turns(turns, (functions[name], problem), (loop, problem))
        speedup = median_ratio(looped, own)
        error = relative_error(functions[name](problem), loop(exact))
        memory = measured_memory(name, rows, tokens)
        limit = MIN_SPEEDUP.get(name)
        if limit and speedup < limit:
            broken.append(f"{name}: {speedup:.1f} times faster than the loop, promised {limit:.0f}")
        if error > MAX_ERROR:
            broken.append(f"{name}: relative error {error:.1e}, promised {MAX_ERROR:.0e}")
        if memory is not None and memory > MAX_MEMORY:
            broken.append(
                f"{name}: {memory:.1f} times the inputs in memory, promised {MAX_MEMORY:.0f}"
            )
        lines.append(
            [
                name,
                f"{statistics.median(own) * 1e3:.1f} ms",
                f"{statistics.median(looped) * 1e3:.0f} ms",
                f"{speedup:.1f} x" + (f" (>= {limit:.0f})" if limit else ""),
                f"{error:.1e}",
                "-" if memory is None else f"{memory:.2f}",
            ]
        )
    table(["function", "roll", "loop", "faster by", "error", "memory / inputs"], lines)


def growth_table(rows: int, tokens: int, turns: int, broken: list[str]) -> None:
    """Time of the full problem over that of half of it: half the tokens, half the rows."""
    full = Problem.random(rows, tokens)
    shorter, fewer = Problem.random(rows, tokens // 2), Problem.random(rows // 2, tokens)
    lines = []
    for name, function in ours().items():
        times = in_turns(turns, (function, full), (function, shorter), (function, fewer))
        growths = [median_ratio(times[0], times[i]) for i in (1, 2)]
        for growth, what in zip(growths, ("T", "B"), strict=True):
            if growth > MAX_GROWTH:
                broken.append(
                    f"{name}: {growth:.2f} times the time for twice {what}, promised {MAX_GROWTH}"
                )
        lines.append([name, *(f"{growth:.2f} x" for growth in growths)])
    headers = [f"T: {tokens // 2} to {tokens}", f"B: {rows // 2} to {rows}"]
    table([f"time for twice as much (<= {MAX_GROWTH})", *headers], lines)


def long_table(turns: int) -> None:
    problem = Problem.random(16, 131_072)
    lines = []
    for name, function in ours().items():
        (times,) = in_turns(turns, (function, problem))
        lines.append([name, f"{statistics.median(times) * 1e3:.1f} ms"])
    table(["16 x 131072", "roll"], lines)


def peer_table(rows: int, tokens: int, checkout: str | None, turns: int) -> None:
    lines = []
    for peer in PEERS:
        if peer == "roll" and checkout is None:
            lines.append(["ROLL", "not measured: --roll-checkout", "-"])
            continue
        environment = {"PYTHONPATH": checkout} if peer == "roll" and checkout else {}
        arguments = [
            "--peer",
            peer,
            "--rows",
            str(rows),
            "--tokens",
            str(tokens),
            "--turns",
            str(turns),
        ]
        answer = ask(arguments, **environment)
        if answer.returncode:
            lines.append(
                [peer, "not importable: " + answer.stderr.strip().splitlines()[-1][:70], "-"]
            )
        for line in answer.stdout.splitlines():
            name, duration = line.split("\t")
            lines.append([f"{peer} {name}", "", f"{float(duration):.0f} ms"])
    table(["peers", "", "time"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--roll-checkout", help="folder of ROLL's repository, with its dependencies installed"
    )
    parser.add_argument(
        "--system-malloc", action="store_true", help="let malloc return freed memory to the system"
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not (args.system_malloc or args.memory_of or args.peer):
        keep_freed_memory()
    if args.memory_of:
        report_memory(args.memory_of, args.rows, args.tokens)
        return
    if args.peer:
        report_peer(args.peer, Problem.random(args.rows, args.tokens), args.turns)
        return
    broken: list[str] = []
    main_table(Problem.random(args.rows, args.tokens), args.turns, broken)
    growth_table(args.rows, args.tokens, args.turns, broken)
    long_table(args.turns)
    peer_table(args.rows, args.tokens, args.roll_checkout, args.turns)
    if broken:
        print("broken limits:", *broken, sep="\n  ")
        sys.exit(1)


if __name__ == "__main__":
    main()
