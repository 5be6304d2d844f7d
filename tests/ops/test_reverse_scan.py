"""The packed scan: layout of the packed values, blocks of the scaled sum, any decay."""

import pytest
import torch

from roll.ops.scans import DiscountedCumsum, Runs, map_valid_tokens

MASK = torch.tensor(
    [[False, True, True, False, True], [True, False, False, False, False], [False] * 5]
)
X = torch.tensor([[9.0, 1.0, 2.0, 9.0, 4.0], [7.0, 9.0, 9.0, 9.0, 9.0], [9.0] * 5])


def test_tokens_are_packed_from_last_to_first():
    seen = []

    def fn(packed):
        seen.append(packed.clone())
        return packed + 10, packed

    shifted, same = map_valid_tokens(fn, [X], MASK, num_results=2)
    assert seen[0].dtype == torch.float64
    assert seen[0].tolist() == [[0, 4, 2, 1], [0, 7, 0, 0], [0, 0, 0, 0]]
    assert same.tolist() == [[0, 1, 2, 0, 4], [7, 0, 0, 0, 0], [0] * 5]
    assert torch.equal(shifted, torch.where(MASK, same + 10, 0.0))


def test_runs_by_hand():
    runs = Runs.of(torch.tensor([[True, True, False, True], [False, True, True, True]]))
    assert runs.lengths.tolist() == [2, 1, 1, 1, 3] and runs.valid.tolist() == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert runs.rows.tolist() == [0, 0, 0, 1, 1] and runs.columns.tolist() == [0, 1, 2, 0, 1]
    sums = runs.sums(torch.tensor([[1.0, 2.0, float("nan"), 4.0], [float("inf"), 5.0, 6.0, 7.0]]))
    assert sums.tolist() == [3, 0, 4, 0, 18]
    assert runs.table(sums).tolist() == [[3, 0, 4], [0, 18, 0]]
    out = torch.empty(2, 4)
    runs.spread(sums, out)
    assert out.tolist() == [[3, 3, 0, 4], [0, 18, 18, 18]]


@pytest.mark.parametrize("decay", [0.0, 1e-200, 1e-60, 1e-10, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("width", [1, 2, 7, 500])
def test_discounted_cumsum_matches_a_loop(decay, width):
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    expected, previous = torch.empty_like(x), torch.zeros(2, dtype=torch.float64)
    for t in range(width):
        previous = expected[:, t] = x[:, t] + decay * previous
    out = DiscountedCumsum(decay, width + 3, x.device)(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_sparse_terms_survive_many_blocks():
    """A single 1 far back: a power of the decay, not zero, as long as that is a number at all."""
    x = torch.zeros(1, 900, dtype=torch.float64)
    x[0, 0] = 1.0
    out = DiscountedCumsum(0.5, 900, x.device)(x)
    distance = torch.arange(900)
    expected = torch.where(distance < 400, 0.5 ** distance.double(), 0.0)
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-60)
