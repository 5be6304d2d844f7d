"""Rows of the GPU table for what follows the model: advantages and means over turns.

`benchmarks/gpu.py` prints them with its own. The loops are the ones that one finds in training
code: over tokens with operations on columns, over rows and turns. "torch version" is roll's own
without the kernels, on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from gpu_harness import Bound, Row, Turns, Way, copy_bandwidth, measure, relative_error
from torch import Tensor

from roll.algorithms.advantages import discounted_returns, gae
from roll.algorithms.masking import segment_masked_mean
from roll.ops import scans

GAMMA, LAM = 0.99, 0.95


@contextmanager
def torch_version() -> Iterator[None]:
    """Inside, the operators run without their kernels."""
    original = scans.scan_kernels
    scans.scan_kernels = lambda tensor: None
    try:
        yield
    finally:
        scans.scan_kernels = original


def in_torch(way: Way) -> Way:
    def run() -> object:
        with torch_version():
            return way()

    return run


def turns_mask(rows: int, tokens: int, turns: int, device: torch.device) -> Tensor:
    """A prompt, then turns of random length with gaps between them; padding after a random
    length."""
    generator = torch.Generator().manual_seed(rows)
    cuts = torch.rand(rows, 2 * turns, generator=generator).cumsum(1)
    lengths = tokens * (0.5 + 0.5 * torch.rand(rows, 1, generator=generator))
    cuts = (cuts / cuts[:, -1:] * lengths).long().to(device).contiguous()
    position = torch.arange(tokens, device=device).expand(rows, -1).contiguous()
    return torch.searchsorted(cuts, position, right=True) % 2 == 1


def normal(rows: int, tokens: int, device: torch.device, count: int) -> list[Tensor]:
    return [torch.randn(rows, tokens, device=device) for _ in range(count)]


def shape_of(mask: Tensor) -> str:
    return f"{mask.shape[0]:,} x {mask.shape[1]:,} float32"


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    advantage = next_value = torch.zeros(len(rewards), dtype=rewards.dtype, device=rewards.device)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        valid, value = mask[:, t], values[:, t]
        delta = rewards[:, t] + GAMMA * next_value - value
        advantage = torch.where(valid, delta + GAMMA * LAM * advantage, advantage)
        next_value = torch.where(valid, value, next_value)
        columns.append(torch.where(valid, advantage, 0.0))
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, torch.where(mask, advantages + values, 0.0)


def loop_segment_mean(x: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(len(x)):
        edges = torch.diff(
            mask[i].int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int()
        )
        pairs = zip(
            (edges == 1).nonzero().flatten().tolist(),
            (edges == -1).nonzero().flatten().tolist(),
            strict=True,
        )
        for start, end in pairs:
            out[i, start:end] = x[i, start:end].mean()
    return out


def ratios(found: Mapping[str, Turns]) -> dict[str, float]:
    return {name: turns.of(found["roll"]) for name, turns in found.items() if name != "roll"}


def errors(of: Callable[[list[Tensor]], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Of the kernel and of the torch version, against the torch version in float64."""
    with torch_version():
        exact, plain = of([x.double() for x in inputs]), of(inputs)
    return relative_error(of(inputs), exact), relative_error(plain, exact)


def scan_row(
    rows: int, tokens: int, most: float, bandwidth: float, device: torch.device, *, loop: bool
) -> Row:
    mask = turns_mask(rows, tokens, 16, device)
    rewards, values = normal(rows, tokens, device, 2)

    def ours() -> object:
        return gae(rewards, values, mask, GAMMA, LAM)

    found = measure({"roll": ours, "torch version": in_torch(ours)})
    peers = ratios(found)
    if loop:
        looped = measure({"loop": lambda: loop_gae(rewards, values, mask)}, rounds=2, warm_up=1)[
            "loop"
        ]
        peers["loop over tokens"] = looped.ms / found["roll"].ms
    error, plain = errors(lambda x: torch.stack(gae(*x, mask, GAMMA, LAM)), [rewards, values])
    floor = mask.numel() * 17 / bandwidth * 1e3  # rewards, values, mask; advantages, returns
    return Row(
        "GAE over masks with gaps", shape_of(mask), found["roll"].ms, found["roll"].extra_bytes, error, plain,
        "one read, one write", found["roll"].ms / floor, peers, bounds=[Bound("ms", found["roll"].ms, at_most=most)],
    )  # fmt: skip


def returns_row(bandwidth: float, device: torch.device) -> Row:
    mask = turns_mask(512, 8192, 16, device)
    (rewards,) = normal(512, 8192, device, 1)

    def ours() -> object:
        return discounted_returns(rewards, mask, GAMMA)

    found = measure({"roll": ours, "torch version": in_torch(ours)})
    error, plain = errors(lambda x: discounted_returns(x[0], mask, GAMMA), [rewards])
    floor = mask.numel() * 9 / bandwidth * 1e3
    return Row(
        "discounted returns over masks with gaps", shape_of(mask), found["roll"].ms, found["roll"].extra_bytes, error,
        plain, "one read, one write", found["roll"].ms / floor, ratios(found),
    )  # fmt: skip


def segment_row(bandwidth: float, device: torch.device) -> Row:
    mask = turns_mask(512, 8192, 16, device)
    x, gradient = normal(512, 8192, device, 2)

    def both(x: Tensor, gradient: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        mean = segment_masked_mean(leaf, mask)
        (slope,) = torch.autograd.grad(mean, leaf, gradient)
        return torch.stack([mean.detach(), slope])

    def ours() -> object:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(segment_masked_mean(leaf, mask), leaf, gradient)

    found = measure({"roll": ours, "torch version": in_torch(ours)})
    loop = measure({"loop": lambda: loop_segment_mean(x, mask)}, rounds=1, warm_up=1)["loop"]
    peers = ratios(found) | {"loop over turns, forward only": loop.ms / found["roll"].ms}
    error, plain = errors(lambda tensors: both(*tensors), [x, gradient])
    floor = mask.numel() * 2 * 9 / bandwidth * 1e3
    return Row(
        "segment mean, 16 turns a row, forward + backward", shape_of(mask), found["roll"].ms,
        found["roll"].extra_bytes, error, plain, "one read, one write, twice", found["roll"].ms / floor, peers,
        bounds=[Bound("ms", found["roll"].ms, at_most=0.3)],
    )  # fmt: skip


def rows(device: torch.device) -> list[Row]:
    """All of them; about half a minute, most of it in the loops."""
    bandwidth = copy_bandwidth()
    return [
        scan_row(512, 8192, 0.15, bandwidth, device, loop=True),
        scan_row(64, 262_144, 0.8, bandwidth, device, loop=False),
        returns_row(bandwidth, device),
        segment_row(bandwidth, device),
    ]


if __name__ == "__main__":
    from gpu_harness import table

    print(table(rows(torch.device("cuda"))))
