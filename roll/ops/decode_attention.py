"""Attention of one new token of every row to the tokens before it, whose number only the device needs to know."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def decode_kernels() -> ModuleType | None:
    try:
        from roll.ops import triton_decode_attention
    except ImportError:  # Triton comes with torch for NVIDIA GPUs, and with no other
        return None
    return triton_decode_attention


def decode_attention(
    query_RHD: Tensor, keys_RKTD: Tensor, values_RKTD: Tensor, first_R: Tensor, stop: Tensor, scale: float
) -> Tensor:
    """softmax(scale q k) v over columns first_R[r] to stop[0] - 1 of row r; the others may hold anything. (R, H, D).

    K heads of keys and values serve H = K G heads of the query, G next to each other each. On a GPU one kernel reads
    every key and value once, by as many columns as there are, and nothing is read by the host, so that it can be part
    of a recorded graph.
    """
    if query_RHD.is_cuda and (kernels := decode_kernels()) is not None:
        return kernels.decode_attention(query_RHD, keys_RKTD, values_RKTD, first_R, stop, scale)
    return reference(query_RHD, keys_RKTD, values_RKTD, first_R, stop, scale)


def reference(
    query_RHD: Tensor, keys_RKTD: Tensor, values_RKTD: Tensor, first_R: Tensor, stop: Tensor, scale: float
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
