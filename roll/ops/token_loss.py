"""A policy loss, its gradient and everything that is reported about it, from one read of the tokens, on a GPU."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from roll.ops.kernels import triton_module

Count = Tensor | int | float

# Results of the kernels, in their order.
RESULTS = (
    "total",
    "pg",
    "weighted_pg",
    "kl",
    "entropy",
    "ppo_ratio_high_clipfrac",
    "ppo_ratio_low_clipfrac",
    "clipfrac",
    "ratio_mean",
    "approxkl",
    "policykl",
    "num_valid",
    "ratio_max",
    "ratio_min",
    "ppo_ratio_clipfrac",
)
TILE = 2048
WARPS = 16


class TokenLossKind(NamedTuple):
    """Which loss. Names and numbers are those of `roll.algorithms.policy_loss`, `aggregation` and `kl`."""

    surrogate: tuple[str, float, float, float]  # see `Surrogate.kernel`
    low: float | None
    high: float | None
    ratio_type: str
    agg_mode: str
    kl_kind: str
    pg_coef: float
    kl_coef: float
    entropy_coef: float


class TokenLossInputs(NamedTuple):
    """What it is computed from, besides the log-probabilities and their entropy: (B, T), masks boolean."""

    old_log_probs_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor
    keep_BT: Tensor | None
    is_weight_BT: Tensor | None
    ref_log_probs_BT: Tensor | None
    sample_weights_B: Tensor | None
    num_tokens: Count
    num_sequences: Count
    norm_factor: Count


def can_fuse(log_probs_BT: Tensor, entropy_BT: Tensor | None, inputs: TokenLossInputs) -> bool:
    """Whether `token_loss` can do it: everything on one GPU, no float64, and nothing else wants a gradient."""
    if (
        not log_probs_BT.is_cuda
        or log_probs_BT.numel() == 0
        or triton_module("triton_token_loss") is None
    ):
        return False
    fixed = [value for value in inputs if isinstance(value, Tensor)]
    for tensor in (log_probs_BT, *([] if entropy_BT is None else [entropy_BT]), *fixed):
        if tensor.ndim and (tensor.dtype == torch.float64 or tensor.device != log_probs_BT.device):
            return False
    return not any(tensor.requires_grad for tensor in fixed)


def token_loss(
    log_probs_BT: Tensor, entropy_BT: Tensor | None, inputs: TokenLossInputs, kind: TokenLossKind
) -> tuple[Tensor, Tensor]:
    """(the loss, float32, with its gradient; the values of `RESULTS`, float64).

    `roll.algorithms.policy_loss.policy_loss` and `policy_statistics` in plain torch are the reference.
    """
    shape, device, has_graph = log_probs_BT.shape, log_probs_BT.device, torch.is_grad_enabled()
    gradient = entropy_gradient = None
    if has_graph and log_probs_BT.requires_grad:
        gradient = torch.empty(shape.numel(), device=device)
    if has_graph and entropy_BT is not None and entropy_BT.requires_grad and kind.entropy_coef != 0:
        entropy_gradient = torch.empty(shape.numel(), device=device)
    results = torch.empty(len(RESULTS), dtype=torch.float64, device=device)
    with torch.cuda.device_of(
        log_probs_BT
    ):  # Triton launches on the current device, which may be another
        loss = _function_with_gradient((log_probs_BT, gradient), (entropy_BT, entropy_gradient))
        if loss is None:
            loss = torch.empty((), device=device)
        _launch(
            log_probs_BT,
            entropy_BT,
            inputs,
            kind,
            gradient,
            entropy_gradient,
            results,
            loss.detach(),
        )
    return loss, results


def _function_with_gradient(*pairs: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """A scalar whose gradient by the first of each pair is the second, which nobody has written yet: their dot product,
    of any value so far. Its backward is torch's own, which takes a fraction of the time of a Python function's."""
    terms = [
        torch.dot(x.reshape(-1).float(), slope)
        for x, slope in pairs
        if x is not None and slope is not None
    ]
    return sum(terms[1:], terms[0]) if terms else None


def _launch(
    log_probs_BT: Tensor,
    entropy_BT: Tensor | None,
    inputs: TokenLossInputs,
    kind: TokenLossKind,
    gradient: Tensor | None,
    entropy_gradient: Tensor | None,
    results: Tensor,
    loss: Tensor,
) -> None:
    """Writes the gradients, the results and the loss."""
    kernels = triton_module("triton_token_loss")
    assert kernels is not None
    num_rows, width = log_probs_BT.shape
    rows = [
        _rows(tensor)
        for tensor in (
            *(
                log_probs_BT,
                inputs.old_log_probs_BT,
                inputs.advantages_BT,
                inputs.mask_BT,
                inputs.keep_BT,
            ),
            *(inputs.is_weight_BT, inputs.ref_log_probs_BT, entropy_BT),
        )
    ]
    table = torch.zeros(
        1 + num_rows * kernels.NUM_COLUMNS.value, dtype=torch.float64, device=results.device
    )
    # Means of runs, and gradients through them, on their way.
    scope = kind.ratio_type.removesuffix("_token")
    spread = torch.empty(num_rows, width, device=results.device) if scope == "segment" else None
    weights = None if inputs.sample_weights_B is None else inputs.sample_weights_B.contiguous()
    bounds = (
        -math.inf if kind.low is None else kind.low,
        math.inf if kind.high is None else kind.high,
    )
    tile = max(16, min(TILE, 1 << (width - 1).bit_length()))
    kernels.token_loss_kernel[(num_rows,)](
        *rows,
        *(weights, gradient, spread, entropy_gradient, table, results, loss),
        *[0 if tensor is None else tensor.stride(0) for tensor in rows],
        *(*_count(inputs.num_tokens), *_count(inputs.num_sequences), *_count(inputs.norm_factor)),
        *(*kind.surrogate[1:], *bounds, kind.pg_coef, kind.kl_coef, kind.entropy_coef, width),
        RATIO=scope,
        THROUGH_MEANS=kind.ratio_type in ("segment", "sequence"),
        SURROGATE=kind.surrogate[0],
        KL=kind.kl_kind,
        AGGREGATION=kind.agg_mode,
        TILE=tile,
        num_warps=max(1, WARPS * tile // TILE),
    )


def _rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor with neighbouring tokens next to each other, masks as bytes."""
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _count(count: Count) -> tuple[Tensor | None, float]:
    """(where it lies on the device, 0.0), or (None, the number)."""
    if isinstance(count, Tensor) and count.is_cuda:
        return count, 0.0
    return None, float(count)
