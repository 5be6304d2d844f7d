"""From a loss per token to one number: a masked sum divided by the counts of the whole optimizer
step.

Because the counts are global, the results of micro-batches and of ranks simply add up to the result
of the full batch, whatever the split and the padding. Only tokens under the mask count, in every
mode.
"""

import torch
from torch import Tensor

from roll.algorithms.masking import check_mask, select

AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

# A number of tokens or rows of the optimizer step; a tensor is 0-d and stays on its device.
Count = Tensor | int | float


def count_tokens(mask_BT: Tensor) -> Tensor:
    """Number of valid tokens, at least 1, as a 0-d tensor."""
    return mask_BT.bool().sum().clamp(min=1)


def count_sequences(mask_BT: Tensor) -> Tensor:
    """Number of rows with a valid token, at least 1, as a 0-d tensor."""
    return mask_BT.bool().any(-1).sum().clamp(min=1)


def at_least_one(count: Count) -> Count:
    """`count`, or 1 if it is smaller: the denominator of an empty batch, whose numerator is 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def aggregate_loss(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    *,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    weights_B: Tensor | None = None,
    norm_factor: Count | None = None,
) -> Tensor:
    """Reduce a loss per token to a scalar. With w_i the row weights, n_i the valid tokens of row i:

    token-mean                sum_i w_i sum_t loss / num_tokens
    seq-mean-token-sum        sum_i w_i sum_t loss / num_sequences
    seq-mean-token-mean       sum_i w_i (sum_t loss / n_i) / num_sequences
    seq-mean-token-sum-norm   sum_i w_i sum_t loss / norm_factor

    `num_tokens` and `num_sequences` are those of the whole optimizer step; by default those of this
    mask (rows without a valid token do not count). `norm_factor` defaults to T, the width of this
    batch, which is only constant as long as nobody trims the padding: a trainer passes a constant.
    Counts below 1 are taken as 1. The result of an empty mask is a zero that is connected to the
    graph.

    Example: loss [[1, 2, 9], [3, 9, 9]], mask [[1, 1, 0], [1, 0, 0]] -> token-mean 6/3 = 2,
    seq-mean-token-sum (3 + 3)/2 = 3, seq-mean-token-mean (1.5 + 3)/2 = 2.25,
    seq-mean-token-sum-norm 6/3 = 2.
    """
    if mode not in AGGREGATION_MODES:
        raise ValueError(
            f"unknown aggregation mode {mode!r}; known: {', '.join(AGGREGATION_MODES)}"
        )
    if isinstance(norm_factor, int | float) and not norm_factor > 0:
        raise ValueError(f"norm_factor must be positive, got {norm_factor}")
    check_mask(loss_BT, mask_BT, "loss")
    rows_B = select(loss_BT, mask_BT).sum(-1)
    if mode == "seq-mean-token-mean":
        rows_B = rows_B / mask_BT.bool().sum(-1).clamp(min=1)
    if weights_B is not None:
        if weights_B.shape != rows_B.shape:
            raise ValueError(
                f"weights must have one entry per row, ({len(rows_B)},), got "
                f"{tuple(weights_B.shape)}"
            )
        rows_B = rows_B * select(weights_B, mask_BT.bool().any(-1))
    total = rows_B.sum()
    if mode == "token-mean":
        return total / at_least_one(count_tokens(mask_BT) if num_tokens is None else num_tokens)
    if mode == "seq-mean-token-sum-norm":
        return total / (mask_BT.shape[-1] if norm_factor is None else norm_factor)
    return total / at_least_one(
        count_sequences(mask_BT) if num_sequences is None else num_sequences
    )


def mean_one_sample_weights(
    *, valid_B: Tensor, difficulty_B: Tensor | None = None, lengths_B: Tensor | None = None
) -> Tensor:
    """Row weights that favour difficult prompts and short answers, with mean 1 over the valid rows.

    A row weighs (0.5 + 1.5 clamp(difficulty, 0, 1)) * (1.5 - length scaled to [0, 1] over the valid
    rows); a factor whose input is None is left out. The mean and the scale are those of the rows
    given, so call this on the whole batch and keep the result as a column: weights computed inside
    a micro-batch would depend on the split. Rows that are not valid get 0.
    """
    weights_B = select(torch.ones_like(valid_B, dtype=torch.float32), valid_B)
    if difficulty_B is not None:
        weights_B = weights_B * (0.5 + 1.5 * select(difficulty_B, valid_B).clamp(0.0, 1.0))
    if lengths_B is not None:
        lengths_B = select(lengths_B, valid_B)
        longest, shortest = lengths_B.max(), torch.where(valid_B.bool(), lengths_B, torch.inf).min()
        scaled_B = (lengths_B - shortest) / (longest - shortest).clamp(min=1)
        weights_B = weights_B * select(1.5 - scaled_B, valid_B)
    return weights_B * (
        valid_B.bool().sum() / weights_B.sum().clamp(min=torch.finfo(torch.float32).tiny)
    )
