"""Checks of the kernels over rows of tokens that both Triton's interpreter and a GPU must pass:
fresh random inputs against float64, garbage under the mask, results in memory that held NaN,
strides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from loss_cases import GARBAGE
from torch import Tensor

from roll.ops.scans import segment_mean

LAYOUTS = ("contiguous", "a window", "every second", "transposed")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors without content hold NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers at other places in memory."""
    if layout == "a window":
        return torch.nn.functional.pad(tensor, (1, 2))[:, 1:-2]
    if layout == "every second":
        return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1).flatten(1)[:, ::2]
    return tensor.t().contiguous().t() if layout == "transposed" else tensor


def random_rows(
    rows: int, width: int, seed: int, device: str, share: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """(x, y, mask): two tensors of normal numbers and a mask of random tokens, whole runs of them
    or none in a row."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, width, generator=generator)
    turns = (torch.rand(rows, width, generator=generator) < 0.2).cumsum(1) % 2 == 0
    mask = turns & (torch.rand(rows, width, generator=generator) < share)
    if rows > 2:
        mask[0], mask[1] = True, False
    return x.to(device), y.to(device), mask.to(device)


def with_garbage(tensor: Tensor, mask: Tensor, seed: int) -> Tensor:
    return torch.where(
        mask,
        tensor,
        torch.tensor(GARBAGE[seed % len(GARBAGE)], dtype=tensor.dtype).to(tensor.device),
    )


def loop_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """One token after the other, in float64, on the CPU."""
    rewards, values, mask = (x.cpu() for x in (rewards.double(), values.double(), mask))
    advantages = torch.zeros_like(rewards)
    advantage = next_value = torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        valid, value = mask[:, t], values[:, t]
        found = rewards[:, t] + gamma * next_value - value + gamma * lam * advantage
        advantage, next_value = (
            torch.where(valid, found, advantage),
            torch.where(valid, value, next_value),
        )
        advantages[:, t] = torch.where(valid, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def assert_close(found: Tensor, exact: Tensor, tolerance: float = 1e-6) -> None:
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    torch.testing.assert_close(
        found.cpu().double(), exact.cpu().double(), rtol=tolerance, atol=tolerance * scale
    )


def check_recurrences(
    kernels: Any, shape: tuple[int, int], seed: int, device: str, **options: Any
) -> None:
    """`discounted_sums`, with values and without."""
    gamma, lam = options.get("gamma", 0.97), options.get("lam", 0.9)
    dtype, layout = options.get("dtype", torch.float32), options.get("layout", "contiguous")
    rewards, values, mask = random_rows(*shape, seed, device)
    rewards, values = rewards.to(dtype), values.to(dtype)
    dirty = [laid_out(with_garbage(x, mask, seed), layout) for x in (rewards, values)]
    with poisoned_memory():
        advantages, returns = kernels.discounted_sums(*dirty, laid_out(mask, layout), gamma, lam)
        none, plain = kernels.discounted_sums(dirty[0], None, laid_out(mask, layout), gamma, 1.0)
    exact_advantages, exact_returns = loop_gae(rewards, values, mask, gamma, lam)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert none is None and returns.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(advantages, exact_advantages, tolerance)
    assert_close(returns, exact_returns, tolerance)
    assert_close(plain, loop_gae(rewards, torch.zeros_like(values), mask, gamma, 1.0)[0], tolerance)


def check_segment_means(
    kernels: Any,
    shape: tuple[int, int],
    seed: int,
    device: str,
    layout: str = "contiguous",
    with_keep: bool = True,
) -> None:
    """Both directions against the plain version in float64; all tokens of a run get the same
    bits."""
    x, gradient, mask = random_rows(*shape, seed, device, share=0.95)
    keep = mask & (random_rows(*shape, seed + 1, device)[0] > -0.5) if with_keep else None
    exact = x.cpu().double().requires_grad_()
    exact_mean = segment_mean(exact, mask.cpu(), None if keep is None else keep.cpu())
    exact_mean.backward(gradient.cpu().double())
    masks = laid_out(mask, layout), None if keep is None else laid_out(keep, layout)
    with poisoned_memory():
        mean = kernels.segment_means(
            laid_out(with_garbage(x, mask, seed), layout), *masks, backward=False
        )
        slope = kernels.segment_means(
            laid_out(with_garbage(gradient, mask, seed), layout), *masks, backward=True
        )
    assert_close(mean, exact_mean.detach())
    assert exact.grad is not None
    assert_close(slope, exact.grad)
    goes_on = mask[:, 1:] & mask[:, :-1]
    assert torch.equal(mean[:, 1:][goes_on], mean[:, :-1][goes_on])
