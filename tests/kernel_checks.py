"""Checks of the row kernels against float64, for Triton's interpreter and for a real GPU alike."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from roll.ops import triton_rows
from roll.ops.softmax_rows import LogitTransform, RowGradients, RowStatistics

TRANSFORMS = [
    LogitTransform(),
    LogitTransform(scale=0.5, temperature=0.7),
    LogitTransform(scale=1.5, soft_cap=4.0, temperature=1.3),
]


def poisoned(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a kernel must overwrite: NaN everywhere."""
    return torch.full(shape, math.nan, dtype=dtype, device=like.device)


def kernel_statistics(
    raw: Tensor,
    labels: Tensor | None,
    transform: LogitTransform,
    *,
    with_entropy: bool = True,
    cuts: tuple[int, ...] = (),
    row_numbers: Tensor | None = None,
) -> RowStatistics:
    """The statistics of rows whose columns arrive in the slices between `cuts`."""
    num_rows = raw.shape[0] if row_numbers is None else len(row_numbers)
    state = poisoned(4, num_rows, like=raw)
    results = RowStatistics(
        poisoned(num_rows, like=raw),
        None if labels is None else poisoned(num_rows, like=raw),
        poisoned(num_rows, like=raw) if with_entropy else None,
    )
    edges = [0, *cuts, raw.shape[1]]
    for left, right in itertools.pairwise(edges):
        part, is_last = raw[:, left:right], right == raw.shape[1]
        triton_rows.statistics_(state, results, part, labels, row_numbers, left, is_last, transform)
    return results


def exact(
    raw: Tensor,
    labels: Tensor | None,
    transform: LogitTransform,
    grads: tuple[Tensor | None, Tensor | None],
) -> tuple[list[Tensor | None], Tensor]:
    """([log-normaliser, log-probs, entropy], gradient of raw) in float64, by autograd."""
    x = raw.detach().double().requires_grad_()
    y = x * transform.scale
    if transform.soft_cap is not None:
        y = transform.soft_cap * torch.tanh(y / transform.soft_cap)
    y = y / transform.temperature
    table = torch.log_softmax(y, 1)
    log_probs = None if labels is None else table.gather(1, labels[:, None])[:, 0]
    entropy = -(table.exp() * table).sum(1)
    total = x.new_zeros(())
    for result, grad in zip((log_probs, entropy), grads, strict=True):
        if result is not None and grad is not None:
            total = total + (result * grad.double()).sum()
    total = total + 0.0 * x.sum()
    total.backward()
    assert x.grad is not None
    return [
        torch.logsumexp(y, 1).detach(),
        None if log_probs is None else log_probs.detach(),
        entropy.detach(),
    ], x.grad


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """By the norm: sums are float32, and only what is stored in a low precision is rounded to
    it."""
    assert not found.isnan().any(), (
        f"{what}: {int(found.isnan().sum())} entries were not written, or are NaN"
    )
    scale = expected.norm().clamp(min=1e-12)
    error = float((found.double() - expected).norm() / scale)
    tolerance = {torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    if not found.is_cuda:
        tolerance *= 2.0  # the interpreter cuts digits off where a GPU rounds
    assert error < tolerance, f"{what}: relative error {error:.1e}"


def random_logits(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    draw = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * 3.0
    )
    return draw.to(dtype).to(device)


def random_gradients(num_rows: int, device: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return tuple(torch.randn(num_rows, generator=generator).to(device) for _ in range(2))


def check_rows(
    raw: Tensor,
    transform: LogitTransform,
    *,
    seed: int,
    cuts: tuple[int, ...] = (),
    in_place: bool = False,
) -> None:
    """Both passes over rows `raw` (R, C) of any strides, with log-probs and entropy."""
    num_rows, num_columns = raw.shape
    device = raw.device.type
    labels = torch.randint(
        0, num_columns, (num_rows,), generator=torch.Generator().manual_seed(seed)
    ).to(device)
    grads = random_gradients(num_rows, device, seed)
    expected, expected_grad = exact(raw, labels, transform, grads)
    found = kernel_statistics(raw, labels, transform, cuts=cuts)
    for name, value, wanted in zip(RowStatistics._fields, found, expected, strict=True):
        assert value is not None and wanted is not None
        assert_near(value, wanted, torch.float32, name)
    rows = RowGradients(found, labels, *grads)
    out = raw if in_place else poisoned(num_rows, num_columns, like=raw, dtype=raw.dtype)
    edges = [0, *cuts, num_columns]
    for left, right in itertools.pairwise(edges):
        triton_rows.gradient(raw[:, left:right], out[:, left:right], rows, left, transform)
    assert_near(out, expected_grad, raw.dtype, "gradient")
