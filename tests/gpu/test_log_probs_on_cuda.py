"""Log-probs and entropy on a real GPU: kernels and operators against float64, with fresh inputs and
poisoned memory."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernel_checks import TRANSFORMS, check_rows, random_logits

from roll.ops import softmax_rows
from roll.ops.linear_log_probs import linear_log_probs, loss_in_parts
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import log_probs_and_entropy, next_token_log_probs
from roll.ops.softmax_rows import LogitTransform, PieceLimits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OPTIONS = [{}, {"scale": 1.5, "soft_cap": 4.0, "temperature": 1.3, "vocab_size": 5000}]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def seed() -> int:
    """Another one in every run; a failure shows it."""
    value = secrets.randbelow(2**31)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """`torch.empty` gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert (
        torch.utils.deterministic.fill_uninitialized_memory
        and torch.empty(8, device="cuda").isnan().all()
    )
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 2049), (2, 151_936), (4, 50_257)], ids=str)
def test_kernels(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for number, transform in enumerate(TRANSFORMS):
        raw = random_logits(*shape, dtype=dtype, device="cuda", seed=seed + number)
        cuts = () if shape[1] < 1000 else (shape[1] // 3 // 64 * 64, shape[1] // 2)
        check_rows(raw.clone(), transform, seed=seed, cuts=cuts, in_place=True)
        check_rows(raw, transform, seed=seed)


@pytest.mark.parametrize("kind", ["transposed", "every second column", "rows of a wider tensor"])
def test_kernels_on_strided_rows(seed: int, kind: str) -> None:
    if kind == "transposed":
        raw = random_logits(3001, 9, dtype=torch.bfloat16, device="cuda", seed=seed).t()
    elif kind == "every second column":
        raw = random_logits(9, 6002, dtype=torch.bfloat16, device="cuda", seed=seed)[:, ::2]
    else:
        raw = random_logits(9, 3007, dtype=torch.bfloat16, device="cuda", seed=seed)[:, 3:3004]
    check_rows(raw, LogitTransform(), seed=seed)


def linear_inputs(rows: int, hidden: int, vocab: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "hidden": torch.randn(rows, hidden, device="cuda").to(dtype),
        "weight": (torch.randn(vocab, hidden, device="cuda") * hidden**-0.5 * 2).to(dtype),
        "bias": torch.randn(vocab, device="cuda").to(dtype),
        "labels": torch.randint(0, 5000, (rows,), device="cuda"),
        "mask": torch.rand(rows, device="cuda") > 0.4,
        "grads": torch.randn(2, rows, device="cuda"),
    }


def results_of(given: dict[str, Tensor], way: str, **options: Any) -> list[Tensor]:
    """log-probs, entropy and the gradients of hidden, weight, bias; `way`: ours, plain (a logits
    tensor) or exact."""
    dtype = torch.float64 if way == "exact" else given["hidden"].dtype
    parts = [
        given[name].detach().clone().to(dtype).requires_grad_()
        for name in ("hidden", "weight", "bias")
    ]
    if way == "ours":
        log_probs, entropy = linear_log_probs(
            parts[0],
            parts[1],
            given["labels"],
            bias=parts[2],
            mask=given["mask"],
            with_entropy=True,
            **options,
        )
        assert entropy is not None
    else:
        options = {
            key: value for key, value in options.items() if key not in ("keep_bytes", "chunk_rows")
        }
        temperature = options.pop("temperature", 1.0)
        logits = LinearLogits(*parts, **options).materialize()
        table = torch.log_softmax((logits if way == "exact" else logits.float()) / temperature, -1)
        log_probs = table.gather(1, given["labels"][:, None])[:, 0] * given["mask"]
        entropy = -(table.exp() * table).sum(1) * given["mask"]
    torch.autograd.backward(
        [log_probs, entropy], [grad.to(log_probs.dtype) for grad in given["grads"]]
    )
    grads = [part.grad for part in parts]
    return [result.detach() for result in (log_probs, entropy, *grads) if result is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "limits", [None, PieceLimits(200_000, 1 << 20, 256, 64)], ids=["one tile", "many tiles"]
)
def test_linear_log_probs_is_no_less_exact_than_logits_of_the_same_precision(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    options: dict[str, Any],
    limits: PieceLimits | None,
) -> None:
    if limits is not None:
        monkeypatch.setattr(softmax_rows, "ACCELERATOR_LIMITS", limits)
    given = linear_inputs(700, 128, 5003, dtype)
    ours, plain, exact = (results_of(given, way, **options) for way in ("ours", "plain", "exact"))
    names = ("log_probs", "entropy", "hidden", "weight", "bias")
    for name, found, usual, expected in zip(names, ours, plain, exact, strict=True):
        assert not found.isnan().any(), name
        error, usual_error = (
            (value.double() - expected).norm() / expected.norm() for value in (found, usual)
        )
        assert error < 1.05 * usual_error + 2e-6, f"{name}: {error:.2e}, plain {usual_error:.2e}"
    assert (ours[0][~given["mask"]] == 0).all() and (ours[2][~given["mask"]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_in_parts_is_as_exact_as_the_whole(seed: int, dtype: torch.dtype) -> None:
    given = linear_inputs(8 * 90, 128, 5003, dtype)
    ids, slopes = given["labels"].view(8, 90), given["grads"][0].view(8, 90)[:, 1:]
    mask = given["mask"].view(8, 90)

    def loss(part: LinearLogits, rows: slice) -> Tensor:
        log_probs, _ = next_token_log_probs(part, ids[rows], mask[rows], keep_bytes=1 << 30)
        return (log_probs * slopes[rows]).sum()

    def gradients(way: str) -> list[Tensor]:
        kind = torch.float64 if way == "exact" else dtype
        leaves = [
            given[name].detach().to(kind).requires_grad_() for name in ("hidden", "weight", "bias")
        ]
        output = LinearLogits(leaves[0].view(8, 90, 128), *leaves[1:])
        parts = [slice(0, 3), slice(3, 4), slice(4, 8)]
        (
            loss_in_parts(output, parts, loss) if way == "in parts" else loss(output, slice(0, 8))
        ).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for exact, whole, found in zip(
        *(gradients(way) for way in ("exact", "whole", "in parts")), strict=True
    ):
        error, usual_error = (
            (value.double() - exact).norm() / exact.norm() for value in (found, whole)
        )
        assert error < 1.05 * usual_error + 2e-6


@pytest.mark.parametrize("keep_bytes", [0, 3 << 20, 40 << 20])
def test_streams_and_kept_tiles_change_no_bit(
    seed: int, monkeypatch: pytest.MonkeyPatch, keep_bytes: int
) -> None:
    """Many small tiles on two streams, from another stream than the default one, over and over:
    always the same."""
    given = linear_inputs(2048, 256, 20_011, torch.bfloat16)
    monkeypatch.setattr(softmax_rows, "ACCELERATOR_LIMITS", PieceLimits(2 << 20, 1 << 20, 256, 64))
    expected = results_of(given, "ours")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            found = results_of(given, "ours", keep_bytes=keep_bytes)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch.cuda.synchronize()


def test_an_empty_mask_and_a_masked_nan(seed: int) -> None:
    given = linear_inputs(64, 32, 5003, torch.bfloat16)
    clean = results_of(given, "ours")
    given["hidden"] = given["hidden"].masked_fill(~given["mask"][:, None], float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(results_of(given, "ours"), clean, strict=True))
    given["mask"] = torch.zeros_like(given["mask"])
    assert all((result == 0).all() for result in results_of(given, "ours"))


def test_autocast(seed: int) -> None:
    given = linear_inputs(300, 64, 5003, torch.float32)
    low = {name: given[name].bfloat16() for name in ("hidden", "weight", "bias")}
    expected = results_of({**given, **low}, "ours")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = results_of(given, "ours")
    assert torch.equal(found[0], expected[0]) and all(
        result.dtype == torch.float32 for result in found
    )
    for grad, low_grad in zip(found[2:], expected[2:], strict=True):
        assert (grad - low_grad.float()).norm() < 5e-3 * grad.norm()


def test_memory_is_a_few_tiles(seed: int) -> None:
    rows, hidden, vocab = 8192, 256, 151_936
    given = linear_inputs(rows, hidden, vocab, torch.bfloat16)
    parts = [given["hidden"].requires_grad_(), given["weight"].requires_grad_()]
    del given["bias"]
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs, _ = linear_log_probs(*parts, given["labels"])
    forward = torch.cuda.max_memory_allocated() - before
    log_probs.backward(given["grads"][0])
    gradients = sum(part.grad.nbytes for part in parts if part.grad is not None)
    assert forward < 0.35 * 2**30
    assert torch.cuda.max_memory_allocated() - before - gradients < 0.4 * 2**30


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", ["whole", "all but the last position", "part of the vocabulary"])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_logits_that_exist(
    seed: int, dtype: torch.dtype, view: str, with_mask: bool, overwrite: bool
) -> None:
    whole = (torch.randn(3, 40, 3003, device="cuda") * 3).to(dtype)
    cut = {
        "whole": lambda x: x,
        "all but the last position": lambda x: x[:, :-1],
        "part of the vocabulary": lambda x: x[..., 1:3000],
    }[view]
    shape = cut(whole).shape[:2]
    labels, grads = (
        torch.randint(0, 2999, shape, device="cuda"),
        torch.randn(2, *shape, device="cuda"),
    )
    mask = torch.rand(shape, device="cuda") > 0.5 if with_mask else None
    results = []
    for precise in (False, True):
        leaf = (whole.double() if precise else whole.clone()).requires_grad_()
        logits = cut(leaf * 1.0)
        if precise:
            table = torch.log_softmax(logits, -1)
            chosen = torch.ones(shape, device="cuda") if mask is None else mask
            pair = (
                table.gather(-1, labels[..., None])[..., 0] * chosen,
                -(table.exp() * table).sum(-1) * chosen,
            )
        else:
            pair = log_probs_and_entropy(logits, labels, mask=mask, overwrite_logits=overwrite)
        torch.autograd.backward(list(pair), [grad.to(pair[0].dtype) for grad in grads])
        results.append([pair[0].detach(), pair[1].detach(), leaf.grad])
    for found, expected, tolerance in zip(
        *results, (2e-6, 2e-6, 3e-6 if dtype == torch.float32 else 4e-3), strict=True
    ):
        assert (found.double() - expected).norm() < tolerance * expected.norm()


def test_a_label_outside_the_vocabulary_is_found(seed: int) -> None:
    with pytest.raises(IndexError, match=r"labels\[1\] = 9 is not in the vocabulary of 5 tokens"):
        log_probs_and_entropy(torch.zeros(2, 5, device="cuda"), torch.tensor([0, 9], device="cuda"))
