"""Attention of one new token of every row to the tokens before it, whose number only the device
knows.

By hand because torch's attention wants the number of tokens on the host, which a recorded graph of
a GPU's work cannot give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.ops.gpu import triton_module


def has_decode_kernel() -> bool:
    return triton_module("triton_decode_attention") is not None


def decode_attention(
    query_RHD: Tensor,
    keys_RKTD: Tensor,
    values_RKTD: Tensor,
    first_R: Tensor,
    stop: Tensor,
    scale: float,
) -> Tensor:
    """softmax(scale q k) v over columns first_R[r] to stop[0] - 1 of row r, (R, H, D).

    The other columns may hold anything. K heads of keys and values serve H = K G heads of the
    query, G next to each other each. On a GPU one kernel reads every key and value once, by as many
    columns as there are.
    """
    num_heads, num_kv_heads = query_RHD.shape[1], keys_RKTD.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} heads of the query cannot share {num_kv_heads} heads of keys evenly"
        )
    if query_RHD.is_cuda and (kernels := triton_module("triton_decode_attention")) is not None:
        return kernels.decode_attention(query_RHD, keys_RKTD, values_RKTD, first_R, stop, scale)
    return reference(query_RHD, keys_RKTD, values_RKTD, first_R, stop, scale)


def reference(
    query_RHD: Tensor,
    keys_RKTD: Tensor,
    values_RKTD: Tensor,
    first_R: Tensor,
    stop: Tensor,
    scale: float,
) -> Tensor:
    """The same in torch."""
    num_groups = query_RHD.shape[1] // keys_RKTD.shape[1]
    column_T = torch.arange(keys_RKTD.shape[2], device=query_RHD.device)
    is_seen_RT = (column_T >= first_R[:, None]) & (column_T < stop)
    keys, values = (
        states.masked_fill(~is_seen_RT[:, None, :, None], 0.0).repeat_interleave(num_groups, dim=1)
        for states in (keys_RKTD, values_RKTD)
    )
    scores_RHT = torch.einsum("rhd,rhtd->rht", query_RHD, keys).float() * scale
    weights_RHT = scores_RHT.masked_fill(~is_seen_RT[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rht,rhtd->rhd", weights_RHT.to(values.dtype), values)
