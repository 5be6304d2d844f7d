"""The loss of a critic: squared error of the predicted values, optionally clipped around the old
predictions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregation import Count, aggregate_loss, count_sequences, count_tokens
from roll.algorithms.masking import check_mask, select


@dataclass(frozen=True)
class ValueLoss:
    """The loss and four statistics, all aggregated in the same way over the counts of the whole
    step."""

    loss: Tensor
    error: Tensor  # squared error, unclipped
    clip_fraction: Tensor  # tokens where the clipped error is the larger one; 0 without clipping
    prediction: Tensor  # mean of the predicted values
    old_prediction: Tensor | None  # mean of the values at collection time, if given


def value_loss(
    *,
    values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    old_values_BT: Tensor | None = None,
    clip: float | None = None,
    agg_mode: str = "seq-mean-token-mean",
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    norm_factor: Count | None = None,
) -> ValueLoss:
    """0.5 (V - R)^2, aggregated over tokens. All tensors (B, T).

    With `clip` = c the loss of a token is the larger of that and 0.5 (clip(V, V_old - c, V_old + c)
    - R)^2, so that a step further than c from the old prediction earns nothing.
    """
    if clip is not None and not clip >= 0:
        raise ValueError(f"the value clip must not be negative, got {clip}; None turns it off")
    if clip is not None and old_values_BT is None:
        raise ValueError("clipping the value loss needs the old values")
    for name, tensor in (
        ("values", values_BT),
        ("returns", returns_BT),
        ("old values", old_values_BT),
    ):
        if tensor is not None:
            check_mask(tensor, mask_BT, name)
    counts = {
        "num_tokens": count_tokens(mask_BT) if num_tokens is None else num_tokens,
        "num_sequences": count_sequences(mask_BT) if num_sequences is None else num_sequences,
        "norm_factor": norm_factor,
    }

    def aggregate(tensor_BT: Tensor) -> Tensor:
        return aggregate_loss(tensor_BT, mask_BT, agg_mode, **counts)

    values_BT, returns_BT = select(values_BT, mask_BT), select(returns_BT, mask_BT)
    error_BT = (values_BT - returns_BT).square()
    worst_BT, clipped_BT = error_BT, torch.zeros_like(mask_BT, dtype=torch.bool)
    if old_values_BT is not None:
        old_values_BT = select(old_values_BT, mask_BT)
        if clip is not None:
            near_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip)
            clipped_error_BT = (near_BT - returns_BT).square()
            clipped_BT = clipped_error_BT > error_BT
            worst_BT = torch.where(clipped_BT, clipped_error_BT, error_BT)
    return ValueLoss(
        loss=0.5 * aggregate(worst_BT),
        error=aggregate(error_BT.detach()),
        clip_fraction=aggregate(clipped_BT.float()),
        prediction=aggregate(values_BT.detach()),
        old_prediction=None if old_values_BT is None else aggregate(old_values_BT.detach()),
    )
