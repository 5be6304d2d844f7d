"""A Triton kernel for the attention of one new token of every row: see `roll.ops.decode_attention`.

One program works on one row and one head of its keys, with all heads of the query that look at it:
keys and values are read once, in tiles, and the softmax is kept relative to the largest score so
far.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # columns
_LEAST = 16  # rows that a product of Triton needs
_LOG2_E = 1.4426950408889634


def decode_attention(
    query_RHD: Tensor,
    keys_RKTD: Tensor,
    values_RKTD: Tensor,
    first_R: Tensor,
    stop: Tensor,
    scale: float,
) -> Tensor:
    num_rows, num_heads, head_dim = query_RHD.shape
    num_kv_heads = keys_RKTD.shape[1]
    out_RHD = torch.empty(query_RHD.shape, dtype=query_RHD.dtype, device=query_RHD.device)
    num_groups = num_heads // num_kv_heads
    launch: Any = _decode_kernel[(num_rows, num_kv_heads)]
    with torch.cuda.device_of(query_RHD):  # Triton launches on the current device
        launch(
            *(query_RHD, *query_RHD.stride(), keys_RKTD, *keys_RKTD.stride()),
            *(values_RKTD, *values_RKTD.stride(), out_RHD, *out_RHD.stride()[:2]),
            *(first_R, stop, scale * _LOG2_E, num_groups, head_dim),
            GROUPS=max(_LEAST, triton.next_power_of_2(num_groups)),
            SIZE=max(_LEAST, triton.next_power_of_2(head_dim)),
            TILE=_TILE,
            num_warps=4,
        )
    return out_RHD


@triton.jit
def _decode_kernel(
    query, query_r, query_h, query_d, keys, keys_r, keys_k, keys_t, keys_d,
    values, values_r, values_k, values_t, values_d, out, out_r, out_h,
    first, stop, slope, num_groups, head_dim,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group, d, t = tl.arange(0, GROUPS), tl.arange(0, SIZE), tl.arange(0, TILE)
    heads = head * num_groups + group
    is_query = (group < num_groups)[:, None] & (d < head_dim)[None, :]
    q = tl.load(
        query + row * query_r + heads[:, None] * query_h + d[None, :] * query_d,
        mask=is_query,
        other=0.0,
    )
    keys += row * keys_r + head * keys_k
    values += row * values_r + head * values_k
    begin, end = tl.load(first + row), tl.load(stop)
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    seen = tl.zeros([GROUPS, SIZE], tl.float32)
    for start in range(begin, end, TILE):
        column = (start + t).to(tl.int64)
        is_there = column < end
        inside = is_there[:, None] & (d < head_dim)[None, :]
        k = tl.load(keys + column[:, None] * keys_t + d[None, :] * keys_d, mask=inside, other=0.0)
        v = tl.load(
            values + column[:, None] * values_t + d[None, :] * values_d, mask=inside, other=0.0
        )
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * slope
        score = tl.where(is_there[None, :], score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp2(top - peak)
        weight = tl.exp2(score - peak[:, None])
        total = total * fade + tl.sum(weight, axis=1)
        seen = seen * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = peak
    found = (seen / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * out_r + heads[:, None] * out_h + d[None, :], found, mask=is_query)
