import pytest
import torch
from decode_checks import check_decode_attention, decode_inputs

from roll.ops.decode_attention import decode_attention

SHAPES = [(1, 1, 1, 1, 4), (3, 4, 2, 9, 8), (2, 7, 1, 70, 5), (4, 6, 6, 130, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_one_token(shape: tuple[int, ...]) -> None:
    for seed in range(5):
        check_decode_attention(*shape, dtype=torch.float32, device="cpu", seed=seed)


def test_one_column_is_its_value() -> None:
    query, keys, values, _, stop = decode_inputs(2, 4, 2, 6, 8, torch.float32, "cpu", 0)
    values = torch.randn(values.shape)
    last = (stop - 1).expand(2)
    found = decode_attention(query, keys.nan_to_num(), values, last, stop, 1.0)
    expected = values[:, :, int(stop) - 1].repeat_interleave(2, dim=1)
    torch.testing.assert_close(found, expected)


def test_heads_that_cannot_be_shared_evenly() -> None:
    query, keys, values, first, stop = decode_inputs(2, 5, 2, 6, 8, torch.float32, "cpu", 0)
    with pytest.raises(
        ValueError, match="5 heads of the query cannot share 2 heads of keys evenly"
    ):
        decode_attention(query, keys, values, first, stop, 1.0)
