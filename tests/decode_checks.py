"""What `decode_attention` must compute, for its tests on a CPU, in Triton's interpreter and on a
GPU."""

import torch
from torch import Tensor

from roll.ops.decode_attention import decode_attention, reference


def decode_inputs(
    rows: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    size: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values, first columns and the end, with NaN in all columns that nobody may look
    at."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    stop = int(torch.randint(1, tokens + 1, (), generator=generator))
    first = torch.randint(0, stop, (rows,), generator=generator)
    column = torch.arange(tokens)
    is_seen = (column >= first[:, None]) & (column < stop)
    # As the cache has them: (rows, tokens, heads, size), the heads of keys side by side.
    keys, values = (
        normal(rows, tokens, kv_heads, size)
        .masked_fill(~is_seen[:, :, None, None], torch.nan)
        .transpose(1, 2)
        for _ in range(2)
    )
    query = 2 * normal(rows, heads, size)
    return (
        query.to(device, dtype),
        keys.to(device, dtype),
        values.to(device, dtype),
        first.to(device),
        torch.tensor([stop], device=device),
    )


def check_decode_attention(*shape: int, dtype: torch.dtype, device: str, seed: int) -> None:
    rows, heads, kv_heads, tokens, size = shape
    query, keys, values, first, stop = decode_inputs(
        rows, heads, kv_heads, tokens, size, dtype, device, seed
    )
    scale = size**-0.5
    expected = torch.stack(
        [_one_row(query[r], keys[r], values[r], first[r], stop, scale) for r in range(rows)]
    )
    for found in (
        decode_attention(query, keys, values, first, stop, scale),
        reference(query, keys, values, first, stop, scale),
    ):
        assert found.dtype == dtype and found.shape == query.shape
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def _one_row(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor, stop: Tensor, scale: float
) -> Tensor:
    """In float64, head by head."""
    columns = slice(int(first), int(stop))
    groups = query.shape[0] // keys.shape[0]
    seen = []
    for head, q in enumerate(query.double()):
        k, v = keys[head // groups, columns].double(), values[head // groups, columns].double()
        seen.append((k @ q * scale).softmax(0) @ v)
    return torch.stack(seen)
