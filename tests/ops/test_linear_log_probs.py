import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from log_probs_reference import TensorWatch, reference, relative_error
from torch import Tensor

from roll.ops import softmax_rows
from roll.ops.linear_log_probs import linear_log_probs
from roll.ops.linear_logits import LinearLogits

OPTIONS = [
    {},
    {"temperature": 0.7},
    {"scale": 0.25, "temperature": 1.3},
    {"soft_cap": 3.0},
    {"scale": 2.0, "soft_cap": 1.5, "temperature": 0.5, "vocab_size": 29},
]


def inputs(
    rows: tuple[int, ...] = (3, 5),
    hidden_size: int = 8,
    vocab: int = 37,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    return {
        "hidden": draw(*rows, hidden_size).to(dtype).requires_grad_(),
        "weight": draw(vocab, hidden_size).to(dtype).requires_grad_(),
        "bias": draw(vocab).to(dtype).requires_grad_(),
        "labels": torch.randint(0, min(vocab, 29), rows, generator=random),
        "mask": torch.rand(rows, generator=random) > 0.4,
        "grad_log_probs": draw(*rows),
        "grad_entropy": draw(*rows),
    }


def run(given: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """log_probs, entropy and the gradients of hidden, weight and bias."""
    parts = [given[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")]
    log_probs, entropy = linear_log_probs(
        parts[0],
        parts[1],
        given["labels"],
        mask=given["mask"],
        bias=parts[2],
        with_entropy=True,
        **options,
    )
    assert entropy is not None
    grads = [given["grad_log_probs"].to(log_probs.dtype), given["grad_entropy"].to(log_probs.dtype)]
    torch.autograd.backward([log_probs, entropy], grads)
    return [
        log_probs.detach(),
        entropy.detach(),
        *(part.grad for part in parts if part.grad is not None),
    ]


def run_plain(
    given: dict[str, Tensor], dtype: torch.dtype, upcast: bool = False, **options: Any
) -> list[Tensor]:
    """The same from a logits tensor: matrix product in `dtype`, then float32 if `upcast`."""
    temperature = options.pop("temperature", 1.0)
    parts = [
        given[name].detach().to(dtype).requires_grad_() for name in ("hidden", "weight", "bias")
    ]
    logits = LinearLogits(*parts, **options).materialize()
    results = reference(
        logits.float() if upcast else logits, given["labels"], given["mask"], temperature
    )
    grads = [
        given["grad_log_probs"].to(results[1].dtype),
        given["grad_entropy"].to(results[1].dtype),
    ]
    torch.autograd.backward(list(results), grads)
    return [*(result.detach() for result in results), *(part.grad for part in parts)]


def test_numbers_by_hand() -> None:
    hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    log_probs, entropy = linear_log_probs(
        hidden, weight, torch.tensor([1, 0]), mask=torch.tensor([1, 0]), with_entropy=True
    )
    total = 2 + math.e
    torch.testing.assert_close(log_probs, torch.tensor([1 - math.log(total), 0.0]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(total) - math.e / total, 0.0]))


def test_uniform_logits() -> None:
    log_probs, entropy = linear_log_probs(
        torch.zeros(4, 3),
        torch.randn(11, 3),
        torch.tensor([0, 3, 10, 5]),
        with_entropy=True,
        temperature=0.3,
    )
    torch.testing.assert_close(log_probs, torch.full((4,), -math.log(11)))
    torch.testing.assert_close(entropy, torch.full((4,), math.log(11)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_results_and_gradients_equal_the_plain_way(
    dtype: torch.dtype, tolerance: float, options: dict[str, Any]
) -> None:
    given = inputs(dtype=dtype)
    for found, expected in zip(
        run(given, **options), run_plain(given, torch.float64, **options), strict=True
    ):
        assert relative_error(found, expected) < tolerance
        assert found.shape == expected.shape


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_less_exact_than_logits_of_that_precision(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    given = inputs(rows=(64, 4), hidden_size=32, vocab=301, dtype=dtype)
    ours, plain, exact = (
        run(given, **options),
        run_plain(given, dtype, True, **options),
        run_plain(given, torch.float64, **options),
    )
    for found, usual, expected in zip(ours, plain, exact, strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 1.1 * (usual.double() - expected).norm() / expected.norm() + 1e-6
    assert [result.dtype for result in ours] == [torch.float32] * 2 + [dtype] * 3


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    hidden_size=st.integers(1, 5),
    vocab=st.integers(1, 40),
    chunk_rows=st.one_of(st.none(), st.integers(1, 6)),
    options=st.sampled_from(OPTIONS[:4]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_any_chunk(
    rows: int,
    hidden_size: int,
    vocab: int,
    chunk_rows: int | None,
    options: dict[str, Any],
    seed: int,
) -> None:
    given = inputs((rows,), hidden_size, vocab, seed=seed)
    ours, plain = (
        run(given, chunk_rows=chunk_rows, **options),
        run_plain(given, torch.float64, **options),
    )
    for found, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_rows": 2},
        {"scale": 2.0, "soft_cap": 1.5, "temperature": 0.5, "vocab_size": 4, "chunk_rows": 1},
    ],
    ids=str,
)
def test_gradcheck(options: dict[str, Any]) -> None:
    given = inputs((2, 2), hidden_size=2, vocab=5)
    labels, mask = given["labels"].clamp(max=3), torch.tensor([[1, 1], [0, 1]])

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_log_probs(
            hidden, weight, labels, mask=mask, bias=bias, with_entropy=True, **options
        )

    assert torch.autograd.gradcheck(both, (given["hidden"], given["weight"], given["bias"]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("min_columns", [7, 64, 1000])
def test_the_size_of_a_piece_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, min_columns: int
) -> None:
    """Slices of the vocabulary, bands of rows, blocks of rows: all of them more than one."""
    given = inputs(rows=(40,), hidden_size=16, vocab=777, dtype=dtype)
    whole = run(given, chunk_rows=1000, vocab_size=770)
    limits = softmax_rows.PieceLimits(1, 5000, min_columns=min_columns, column_multiple=2)
    monkeypatch.setattr(softmax_rows, "CPU_LIMITS", limits)
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 5e-3}[dtype]
    for found, expected in zip(run(given, vocab_size=770), whole, strict=True):
        assert relative_error(found, expected) < tolerance


def test_several_bands_of_rows_do_not_round_the_weight_gradient_one_by_one() -> None:
    given = inputs(rows=(256,), hidden_size=16, vocab=50, dtype=torch.bfloat16)
    exact = run_plain(given, torch.float64)
    few, many = (
        (run(given, chunk_rows=rows)[3].double() - exact[3]).norm() / exact[3].norm()
        for rows in (256, 2)
    )
    assert many < 1.3 * few


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_masked_out_may_hold_anything(poison: float) -> None:
    given = inputs(dtype=torch.float32)
    clean = run(given)
    out = ~given["mask"]
    poisoned = dict(given)
    poisoned["hidden"] = given["hidden"].detach().masked_fill(out.unsqueeze(-1), poison)
    poisoned["labels"] = (
        given["labels"].masked_fill(out, -100).index_put((out,), torch.tensor(2**40))
    )
    poisoned["grad_log_probs"] = given["grad_log_probs"].masked_fill(out, poison)
    poisoned["grad_entropy"] = given["grad_entropy"].masked_fill(out, poison)
    for found, expected in zip(run(poisoned), clean, strict=True):
        assert torch.equal(found, expected)
    log_probs, _, grad_hidden, *_ = clean
    assert (
        (log_probs[out] == 0).all()
        and (grad_hidden[out] == 0).all()
        and (grad_hidden[~out] != 0).any()
    )


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_masks_of_any_dtype(kind: torch.dtype) -> None:
    given = inputs()
    as_kind = {**given, "mask": given["mask"].to(kind)}
    assert all(torch.equal(a, b) for a, b in zip(run(as_kind), run(given), strict=True))


def test_an_empty_mask_gives_connected_zeros() -> None:
    given = inputs()
    given["mask"] = torch.zeros_like(given["mask"])
    given["hidden"] = torch.full_like(given["hidden"], math.nan)
    results = run(given)
    assert [tuple(result.shape) for result in results] == [
        (3, 5),
        (3, 5),
        (3, 5, 8),
        (37, 8),
        (37,),
    ]
    assert all((result == 0).all() for result in results)


def test_one_token_and_a_vocabulary_of_one() -> None:
    hidden = torch.randn(4, requires_grad=True)
    weight = torch.randn(1, 4, requires_grad=True)
    log_prob, entropy = linear_log_probs(hidden, weight, torch.tensor(0), with_entropy=True)
    assert entropy is not None and log_prob.shape == entropy.shape == ()
    (log_prob + entropy).backward()
    assert log_prob == entropy == 0
    assert hidden.grad is not None and weight.grad is not None
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


@pytest.mark.parametrize(
    ("needed", "num_products"),
    [
        (("hidden", "weight"), 3),
        (("hidden",), 2),
        (("weight",), 2),
        (("bias",), 1),
        (("hidden", "bias"), 2),
        ((), 0),
    ],
)
def test_only_required_gradients(needed: tuple[str, ...], num_products: int) -> None:
    given = inputs()
    full = dict(zip(("hidden", "weight", "bias"), run(given)[2:], strict=True))
    parts = {name: given[name].detach().requires_grad_(name in needed) for name in full}
    log_probs, entropy = linear_log_probs(
        parts["hidden"],
        parts["weight"],
        given["labels"],
        mask=given["mask"],
        bias=parts["bias"],
        with_entropy=True,
    )
    assert entropy is not None and log_probs.requires_grad == bool(needed)
    with TensorWatch() as backward:
        if needed:
            (log_probs * given["grad_log_probs"] + entropy * given["grad_entropy"]).sum().backward()
    assert backward.num_products == num_products
    for name, part in parts.items():
        if name in needed:
            torch.testing.assert_close(part.grad, full[name])
        else:
            assert part.grad is None


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_from_one_of_the_two_results(which: int) -> None:
    given = inputs()
    hidden = given["hidden"]
    results = linear_log_probs(hidden, given["weight"], given["labels"], with_entropy=True)
    expected = reference(hidden @ given["weight"].T, given["labels"])
    with TensorWatch() as backward:
        [found_grad] = torch.autograd.grad(results[which].sum(), hidden)
    assert ("addcmul" in backward.operations) == (
        which == 1
    )  # the pass that only the entropy needs
    [expected_grad] = torch.autograd.grad(expected[which].sum(), hidden)
    torch.testing.assert_close(found_grad, expected_grad)


def test_training_and_inference_agree_to_the_last_bit() -> None:
    given = inputs(rows=(70,), vocab=1000, dtype=torch.float32)
    arguments = (given["hidden"], given["weight"], given["labels"])
    trained, _ = linear_log_probs(*arguments, mask=given["mask"])
    with torch.no_grad():
        inferred, entropy = linear_log_probs(*arguments, mask=given["mask"])
    assert trained.requires_grad and not inferred.requires_grad and entropy is None
    assert torch.equal(trained, inferred)


def test_results_may_be_changed_in_place() -> None:
    given = inputs()
    log_probs, entropy = linear_log_probs(
        given["hidden"], given["weight"], given["labels"], with_entropy=True
    )
    assert entropy is not None
    log_probs.mul_(2.0)
    entropy.masked_fill_(~given["mask"], 0.0)
    [found] = torch.autograd.grad((log_probs + entropy).sum(), given["hidden"])
    expected = reference(given["hidden"] @ given["weight"].T, given["labels"])
    assert expected[0] is not None
    [grad] = torch.autograd.grad(
        (2.0 * expected[0] + expected[1] * given["mask"]).sum(), given["hidden"]
    )
    torch.testing.assert_close(found, grad)


def test_a_tied_weight_gets_both_contributions() -> None:
    ids, labels = torch.tensor([0, 3, 2]), torch.tensor([3, 2, 1])
    found, expected = (
        torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for _ in "ab"
    )
    found.requires_grad_()
    expected.requires_grad_()
    linear_log_probs(found[ids], found, labels)[0].sum().backward()
    reference(expected[ids] @ expected.T, labels)[0].sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)


def test_strides_do_not_matter() -> None:
    given = inputs()
    strided = dict(given)
    strided["hidden"] = given["hidden"].detach().transpose(0, 1).contiguous().transpose(0, 1)
    strided["weight"] = given["weight"].detach().t().contiguous().t()
    strided["bias"] = given["bias"].detach().repeat_interleave(2)[::2]
    strided["labels"] = given["labels"].t().contiguous().t()
    strided["mask"] = given["mask"].t().contiguous().t()
    assert not any(
        strided[name].is_contiguous() for name in ("hidden", "weight", "bias", "labels", "mask")
    )
    for found, expected in zip(run(strided), run(given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_that_a_bias_forbids(dtype: torch.dtype) -> None:
    given = inputs(dtype=dtype)
    given["grad_entropy"] *= 100.0
    forbidden = torch.zeros(37, dtype=torch.bool)
    forbidden[torch.tensor([1, 30, 36])] = True
    given["labels"] = torch.where(given["labels"] == 1, 2, given["labels"])
    given["bias"] = given["bias"].detach().masked_fill(forbidden, -math.inf)
    ours = run(given)
    small = dict(given)
    small["weight"], small["bias"] = given["weight"].detach()[~forbidden], given["bias"][~forbidden]
    small["labels"] = given["labels"] - forbidden.cumsum(0)[given["labels"]]
    for found, expected in zip(ours[:3], run(small)[:3], strict=True):
        torch.testing.assert_close(found, expected)
    assert all(result.isfinite().all() for result in ours)
    assert (ours[3][forbidden] == 0).all() and (ours[4][forbidden] == 0).all()


def test_a_broken_model_does_not_look_healthy() -> None:
    given = inputs()
    hidden = given["hidden"].detach().clone()
    hidden[0, 0] = math.nan
    log_probs, entropy = linear_log_probs(
        hidden, given["weight"], given["labels"], with_entropy=True
    )
    assert entropy is not None
    assert log_probs[0, 0].isnan() and entropy[0, 0].isnan()
    assert log_probs.isnan().sum() == entropy.isnan().sum() == 1


def test_the_gradient_of_a_sure_token_keeps_its_digits() -> None:
    """1 - p is 0.0035 here: p rounded to bfloat16 before the subtraction would make it 0.0039 or
    0."""
    weight = torch.tensor([[6.5], [0.0], [0.3]])
    found, expected = (
        weight.bfloat16().requires_grad_(),
        weight.bfloat16().double().requires_grad_(),
    )
    linear_log_probs(torch.ones(1, 1, dtype=torch.bfloat16), found, torch.tensor([0]))[
        0
    ].sum().backward()
    reference(torch.ones(1, 1, dtype=torch.float64) @ expected.T, torch.tensor([0]))[
        0
    ].sum().backward()
    torch.testing.assert_close(found.grad.double(), expected.grad, rtol=4e-3, atol=0)


def test_no_tensor_of_the_size_of_the_logits_is_made_or_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_rows, hidden_size, vocab, chunk_rows = 96, 4, 5000, 8
    monkeypatch.setattr(
        softmax_rows, "CPU_LIMITS", softmax_rows.PieceLimits(1 << 20, 1 << 16, 16, 64)
    )
    given = inputs((num_rows,), hidden_size, vocab, dtype=torch.float32)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with (
        TensorWatch() as ours,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        run({**given, "mask": torch.ones(num_rows)}, chunk_rows=chunk_rows)
    with TensorWatch() as plain:
        run_plain({**given, "mask": torch.ones(num_rows)}, torch.float32)
    assert plain.largest == num_rows * vocab
    assert ours.largest <= chunk_rows * (vocab + 64)
    assert max(saved) == vocab * hidden_size


@pytest.mark.parametrize("keep_bytes", [0, 1000, 5000, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_save_products_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, keep_bytes: int
) -> None:
    """Bands and slices of at most 1,000 bytes: none, some or all of them are kept."""
    monkeypatch.setattr(softmax_rows, "CPU_LIMITS", softmax_rows.PieceLimits(1000, 5000, 16, 16))
    given = inputs(rows=(40,), hidden_size=16, vocab=200, dtype=dtype)
    with TensorWatch() as plain:
        expected = run(given)
    with TensorWatch() as watch:
        found = run(given, keep_bytes=keep_bytes)
    num_tiles = plain.num_products // 4
    assert num_tiles >= 10
    if keep_bytes == 1 << 30:  # all of them: a single tile
        assert watch.num_products == 3
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) < {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
        return
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    saved = plain.num_products - watch.num_products
    assert (saved == 0) == (keep_bytes == 0) and saved < num_tiles


def test_kept_logits_serve_one_backward_and_the_next_one_makes_them_again() -> None:
    given = inputs()
    log_probs, _ = linear_log_probs(
        given["hidden"], given["weight"], given["labels"], keep_bytes=1 << 20
    )
    first, second = (
        torch.autograd.grad(log_probs.sum(), given["hidden"], retain_graph=True)[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_nothing_is_kept_without_a_gradient() -> None:
    given = inputs(rows=(64,), vocab=1000)
    for context, hidden in (
        (torch.no_grad(), given["hidden"]),
        (torch.enable_grad(), given["hidden"].detach()),
    ):
        with context, TensorWatch() as watch:
            linear_log_probs(
                hidden, given["weight"].detach(), given["labels"], chunk_rows=8, keep_bytes=1 << 30
            )
        assert watch.largest < 64 * 1000


def test_an_unused_result_costs_no_backward() -> None:
    given = inputs()
    log_probs, entropy = linear_log_probs(
        given["hidden"], given["weight"], given["labels"], with_entropy=True
    )
    assert entropy is not None
    with TensorWatch() as watch:
        (log_probs.detach().sum() + given["hidden"].sum()).backward()
    assert watch.largest <= given["hidden"].numel()


def test_autocast_runs_the_products_in_its_dtype() -> None:
    given = inputs(rows=(6,), dtype=torch.float32)
    low = {name: given[name].detach().bfloat16() for name in ("hidden", "weight", "bias")}
    expected = run({**given, **low})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(given)
        mixed, _ = linear_log_probs(
            low["hidden"], given["weight"], given["labels"], bias=given["bias"]
        )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert all(result.dtype == torch.float32 for result in found)
    for grad, low_grad in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(grad, low_grad.float(), rtol=2e-2, atol=1e-3)
    assert torch.equal(mixed[given["mask"]], expected[0][given["mask"]])


def test_autocast_leaves_float64_alone() -> None:
    given = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(given)
    assert all(torch.equal(a, b) for a, b in zip(found, run(given), strict=True))


def test_a_second_derivative_is_refused() -> None:
    given = inputs()
    log_probs, _ = linear_log_probs(given["hidden"], given["weight"], given["labels"])
    with pytest.raises(
        RuntimeError, match=r"linear_log_probs has no second derivative.*materialize"
    ):
        torch.autograd.grad(log_probs.sum(), given["hidden"], create_graph=True)


@pytest.mark.parametrize(("label", "position"), [(37, [0, 0]), (-1, [2, 4]), (-100, [1, 2])])
def test_a_selected_label_outside_the_vocabulary(label: int, position: list[int]) -> None:
    given = inputs()
    given["labels"][tuple(position)] = label
    mask = torch.ones(3, 5)
    with pytest.raises(IndexError) as error:
        linear_log_probs(given["hidden"], given["weight"], given["labels"], mask=mask)
    assert f"labels{position} = {label} is not in the vocabulary of 37 tokens" in str(error.value)
    mask[tuple(position)] = 0
    assert (
        linear_log_probs(given["hidden"], given["weight"], given["labels"], mask=mask)[0]
        .isfinite()
        .all()
    )


def test_a_label_in_the_padding_of_the_vocabulary() -> None:
    given = inputs()
    given["labels"][1, 1] = given["labels"][2, 0] = 35
    with pytest.raises(
        IndexError, match=r"labels\[1, 1\] = 35 is not in the vocabulary of 35 tokens \(1 more"
    ):
        linear_log_probs(given["hidden"], given["weight"], given["labels"], vocab_size=35)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5, 7)}, r"hidden \(3, 5, 7\) and weight \(37, 8\) do not fit"),
        ({"weight": torch.zeros(8)}, r"weight \(8,\) do not fit"),
        ({"labels": torch.zeros(3, 4, dtype=torch.long)}, r"labels has shape \(3, 4\), expected \(3, 5\)"),
        ({"labels": torch.zeros(3, 5)}, r"labels has dtype torch.float32, expected integers"),
        ({"labels": torch.zeros(3, 5, dtype=torch.bool)}, r"labels has dtype torch.bool"),
        ({"mask": torch.zeros(3, 4)}, r"mask has shape \(3, 4\), expected \(3, 5\)"),
        ({"bias": torch.zeros(36)}, r"bias has shape \(36,\), expected \(37,\)"),
        ({"weight": torch.zeros(37, 8, dtype=torch.bfloat16)}, r"weight is torch.bfloat16, hidden is torch.float32"),
        ({"bias": torch.zeros(37, dtype=torch.float64)}, r"bias is torch.float64, hidden is torch.float32"),
        ({"hidden": torch.zeros(3, 5, 8, dtype=torch.long)}, r"torch.int64"),
        ({"labels": torch.zeros(3, 5, dtype=torch.long, device="meta")}, r"labels is on meta"),
        ({"weight": torch.zeros(37, 8, device="meta")}, r"weight is on meta, hidden is on cpu"),
        ({"vocab_size": 38}, r"vocab_size=38 must lie between 1 and the 37 rows"),
        ({"vocab_size": 0}, r"vocab_size=0 must lie between"),
        ({"temperature": 0.0}, r"temperature=0.0 must be positive and finite \(greedy"),
        ({"temperature": math.inf}, r"temperature=inf must be"),
        ({"scale": -1.0}, r"scale=-1.0 must be positive"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be positive"),
        ({"chunk_rows": 0}, r"chunk_rows=0 must be at least 1"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(3, 5, 8), "weight": torch.zeros(37, 8), "labels": torch.zeros(3, 5, dtype=torch.int32),
    }  # fmt: skip
    assert linear_log_probs(**arguments)[0].shape == (3, 5)
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**{**arguments, **change})
