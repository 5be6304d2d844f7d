"""The Triton kernels over rows of tokens, in Triton's interpreter (`test_in_interpreter` sets it
up)."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs inside test_in_interpreter", allow_module_level=True)

from scan_checks import LAYOUTS, check_recurrences, check_segment_means, random_rows

from roll.ops import scans, triton_scans
from roll.ops.scans import advantage_scan

SHAPES = [(1, 1), (3, 5), (2, 16), (1, 17), (3, 70)]  # tiles of 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_scans, "TILE", 16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_recurrences(shape: tuple[int, int]) -> None:
    check_recurrences(triton_scans, shape, seed=shape[1], device="cpu")


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_any_number_of_pieces_of_a_row(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_scans, "_MAX_PIECES", pieces)
    check_recurrences(triton_scans, (3, 16 * 5 - 1), seed=pieces, device="cpu")


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (0.0, 0.5), (0.9, 0.0), (1e-30, 1.0), (1.0, 0.3)]
)
def test_any_discount(gamma: float, lam: float) -> None:
    check_recurrences(triton_scans, (3, 20), seed=1, device="cpu", gamma=gamma, lam=lam)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    check_recurrences(triton_scans, (3, 20), seed=2, device="cpu", dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str) -> None:
    check_recurrences(triton_scans, (3, 19), seed=3, device="cpu", layout=layout)
    check_segment_means(triton_scans, (3, 19), seed=3, device="cpu", layout=layout)


@pytest.mark.parametrize("with_keep", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_segment_means(shape: tuple[int, int], with_keep: bool) -> None:
    check_segment_means(triton_scans, shape, seed=shape[1], device="cpu", with_keep=with_keep)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    x, y, mask = torch.empty(shape), torch.empty(shape), torch.empty(shape, dtype=torch.bool)
    assert [result.shape for result in triton_scans.discounted_sums(x, y, mask, 0.9, 0.9)] == [
        shape
    ] * 2
    assert triton_scans.segment_means(x, mask, None, backward=False).shape == shape


def test_the_kernels_give_the_bits_of_the_plain_version() -> None:
    rewards, values, mask = random_rows(3, 40, seed=5, device="cpu")
    found = triton_scans.discounted_sums(rewards, values, mask, 0.99, 0.95)
    for a, b in zip(found, advantage_scan(rewards, values, mask, 0.99, 0.95), strict=True):
        assert torch.equal(a, b)


def test_the_functions_use_the_kernels_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "scan_kernels", lambda tensor: triton_scans)
    rewards, values, mask = random_rows(3, 20, seed=6, device="cpu")
    calls = []
    for name in ("discounted_sums", "segment_means"):
        kernel = getattr(triton_scans, name)
        monkeypatch.setattr(
            triton_scans,
            name,
            lambda *a, _k=kernel, _n=name, **o: (calls.append(_n), _k(*a, **o))[1],
        )
    values.requires_grad_()
    assert not any(x.requires_grad for x in advantage_scan(rewards, values, mask, 0.9, 0.8))
    scans.reverse_scan(rewards, mask, 0.9)
    scans.segment_mean(values, mask).sum().backward()
    assert calls == ["discounted_sums", "discounted_sums", "segment_means", "segment_means"]
    torch.testing.assert_close(values.grad, mask.float())
