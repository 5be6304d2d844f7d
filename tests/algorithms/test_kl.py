"""KL estimators and the coefficient of the penalty: hand-computed values, saturation, masks,
gradients."""

import json
import math

import float64_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import GARBAGE, poisoned, random_mask
from torch import Tensor

from roll.algorithms.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    approx_kl,
    get_kl_controller,
)

LP = torch.tensor([[-1.0, -2.0, -0.5]])
BASE = torch.tensor([[-1.5, -1.0, -0.5]])
TOKEN_KINDS = [kind for kind in KL_KINDS if kind != "full"]


def test_estimators_by_hand():
    assert approx_kl(LP, BASE).tolist() == [[0.5, -1.0, 0.0]]
    assert approx_kl(LP, BASE, kind="abs").tolist() == [[0.5, 1.0, 0.0]]
    assert approx_kl(LP, BASE, kind="mse").tolist() == [[0.125, 0.5, 0.0]]
    expected = torch.tensor([[math.exp(-0.5) + 0.5 - 1, math.exp(1) - 1 - 1, 0.0]])
    torch.testing.assert_close(approx_kl(LP, BASE, kind="k3"), expected)


@pytest.mark.parametrize(("alias", "kind"), [("k1", "kl"), ("k2", "mse"), ("low_var_kl", "k3")])
def test_kl6_aliases(alias, kind):
    assert torch.equal(approx_kl(LP, BASE, kind=alias), approx_kl(LP, BASE, kind=kind))


def test_kl1_k3_saturates_with_zero_gradient():
    lp = torch.tensor([[-100.0, -1.5, -1.0]], requires_grad=True)
    kl = approx_kl(lp, torch.tensor([[-1.0, -1.0, -100.0]]), kind="k3")
    kl.sum().backward()
    assert kl[0, 0] == 10 and kl[0, 2] == 10
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, torch.tensor([[0.0, 1 - math.exp(0.5), 0.0]]))


def test_kl4_k3_has_a_gradient_up_to_its_cap():
    # e^x - x - 1 reaches 10 near x = 2.6: just below, the pull to the reference is there.
    lp = torch.tensor([[-2.6]], requires_grad=True)
    approx_kl(lp, torch.zeros(1, 1), kind="k3").sum().backward()
    assert lp.grad is not None and lp.grad.item() == pytest.approx(1 - math.exp(2.6))


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    d = 1e-4
    kl = approx_kl(torch.full((1, 1), d), torch.zeros(1, 1), kind="k3").item()
    assert kl == pytest.approx(d * d / 2, rel=1e-2)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_gradients_as_a_loss(kind):
    """The mean over the policy's own samples, exactly: all tokens of a vocabulary, each as often as
    it is sampled."""
    logits = torch.randn(
        7, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).requires_grad_()
    base = distributions(4, (7,))
    lp = logits.log_softmax(-1)
    estimate = (lp.exp().detach() * approx_kl(lp[None], base[None], kind=kind)[0]).sum()
    (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    divergence = {
        "kl": torch.zeros(()) * logits.sum(),  # no pull at all
        "mse": (lp.exp() * (lp - base)).sum(),
        "k3+": (lp.exp() * (lp - base)).sum(),
        "k3": (base.exp() * (base - lp)).sum(),
        "abs": ((lp - base).detach().sign() * lp * lp.exp().detach()).sum(),
    }[KL_KINDS[kind]]
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_k3_plus_is_k3_and_saturates_with_zero_gradient():
    lp = torch.tensor([[-100.0, -1.5, -1.0, -6.0]], requires_grad=True)
    base = torch.tensor([[-1.0, -1.0, -math.inf, -1.0]])
    kl = approx_kl(lp, base, kind="k3+")
    kl.sum().backward()
    assert torch.equal(kl, approx_kl(lp, base, kind="k3"))
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, torch.tensor([[0.0, -0.5, 0.0, -5.0]]))


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_kl2_kl3_garbage_under_the_mask_changes_no_bit(kind, garbage):
    mask = random_mask(7, empty_row=True)
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(mask.shape, generator=generator) for _ in range(2)]

    def run(fills: tuple[float, float]) -> list[Tensor]:
        inputs = [
            poisoned(x, mask, fill).requires_grad_() for x, fill in zip(columns, fills, strict=True)
        ]
        out = approx_kl(*inputs, kind=kind, mask=mask)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    clean = run((0.0, 0.0))
    assert torch.equal(clean[0], clean[0] * mask)
    for fills in ((garbage, 0.0), (0.0, garbage), (garbage, garbage)):
        assert all(torch.equal(a, b) for a, b in zip(clean, run(fills), strict=True))


def distributions(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).log_softmax(-1)


def test_full_is_the_divergence_of_the_distributions():
    lp, base = distributions(0, (2, 3, 5)), distributions(1, (2, 3, 5))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=lp), torch.distributions.Categorical(logits=base)
    )
    torch.testing.assert_close(approx_kl(lp, base, kind="full"), expected)


def test_full_ignores_masked_positions_and_impossible_tokens():
    lp, base = distributions(0, (1, 2, 4)), distributions(1, (1, 2, 4))
    lp[0, 0, 0] = base[0, 0, 0] = -math.inf
    mask = torch.tensor([[1, 0]])
    results = []
    for garbage in (0.0, math.nan, math.inf):
        lp_dirty, base_dirty = lp.clone(), base.clone()
        lp_dirty[0, 1], base_dirty[0, 1] = garbage, -garbage
        lp_dirty.requires_grad_()
        out = approx_kl(lp_dirty, base_dirty, kind="full", mask=mask)
        out.sum().backward()
        results.append((out.detach(), lp_dirty.grad))
    out, grad = results[0]
    assert out[0, 1] == 0 and out[0, 0] > -1 and torch.isfinite(out).all()
    assert (
        grad is not None
        and torch.isfinite(grad).all()
        and not grad[0, 1].any()
        and grad[0, 0, 0] == 0
    )
    for other in results[1:]:
        assert torch.equal(out, other[0]) and other[1] is not None and torch.equal(grad, other[1])


def test_full_does_not_hide_nan_at_a_valid_position():
    lp = torch.full((1, 1, 2), math.nan)
    assert approx_kl(lp, torch.zeros(1, 1, 2), kind="full").isnan().all()


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_kl5_full_needs_three_axes(shape):
    with pytest.raises(ValueError, match=r"\(B, T, V\).*got shape"):
        approx_kl(torch.zeros(shape), torch.zeros(shape), kind="full")


def test_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown KL estimator 'k4'.*low_var_kl"):
        approx_kl(LP, BASE, kind="k4")


def test_shape_mismatch():
    with pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 2\)"):
        approx_kl(LP, BASE[:, :2])
    with pytest.raises(ValueError, match=r"response_mask\[:, 1:\]"):
        approx_kl(LP, BASE, mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="shape"):
        approx_kl(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), kind="full", mask=torch.ones(1, 3))


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([1e-3, 0.5, 5.0, 50.0]))
@settings(max_examples=40, deadline=None)
def test_estimators_match_the_reference(seed, spread):
    mask = random_mask(seed, empty_row=True)
    generator = torch.Generator().manual_seed(seed)
    lp, base = (torch.randn(mask.shape, generator=generator) * spread for _ in range(2))
    for kind in ("kl", "abs", "mse", "k3"):
        expected = torch.tensor(
            reference.approx_kl(lp.tolist(), base.tolist(), mask.tolist(), kind)
        )
        torch.testing.assert_close(
            approx_kl(lp, base, kind=kind, mask=mask), expected, rtol=1e-4, atol=1e-6
        )


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([1e-6, 1e-3, 1.0, 100.0]))
@settings(max_examples=40, deadline=None)
def test_k3_is_never_negative_and_mse_is_half_abs_squared(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    lp, base = (torch.randn(3, 17, generator=generator) * spread for _ in range(2))
    assert (approx_kl(lp, base, kind="k3") >= 0).all()
    assert torch.equal(
        approx_kl(lp, base, kind="mse"), 0.5 * approx_kl(lp, base, kind="abs").square()
    )


def test_results_are_at_least_float32():
    assert approx_kl(LP.bfloat16(), BASE.bfloat16(), kind="k3").dtype == torch.float32
    assert approx_kl(LP.double(), BASE.double()).dtype == torch.float64


# the coefficient


def test_adaptive_by_hand():
    controller = AdaptiveKLController(0.2, target=0.1, horizon=10_000)
    controller.update(current=0.12, n_steps=32)  # error 0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 32 / 10_000), rel=1e-12)
    controller.update(current=0.05, n_steps=32)  # error -0.5, clipped to -0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.00064) * (1 - 0.00064), rel=1e-12)


def test_kl7_the_coefficient_never_becomes_negative():
    controller = AdaptiveKLController(0.2, target=0.1, horizon=100)
    controller.update(current=0.0, n_steps=1024)
    assert controller.value == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_kl7_a_divergence_that_is_not_finite_is_an_error_and_changes_nothing(bad):
    controller = AdaptiveKLController(0.2, target=0.1, horizon=100)
    with pytest.raises(ValueError, match=r"stays at 0\.2"):
        controller.update(current=bad, n_steps=4)
    assert controller.value == 0.2


@pytest.mark.parametrize(
    ("target", "horizon"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)]
)
def test_kl7_target_and_horizon_must_be_positive(target, horizon):
    with pytest.raises(ValueError, match=r"(target_kl|kl_horizon)=.* must be positive"):
        AdaptiveKLController(0.2, target, horizon)


def test_fixed_does_not_move():
    controller = FixedKLController(0.3)
    controller.update(current=5.0, n_steps=1000)
    assert controller.value == 0.3


def test_negative_coefficients_are_errors():
    with pytest.raises(ValueError, match="kl_coef=-1"):
        FixedKLController(-1)
    with pytest.raises(ValueError, match="init_kl_coef=-1"):
        AdaptiveKLController(-1, 0.1, 10)


def test_get_kl_controller():
    assert isinstance(get_kl_controller(0.1), FixedKLController)
    adaptive = get_kl_controller(0.1, target_kl=0.5, kl_horizon=10)
    assert isinstance(adaptive, AdaptiveKLController) and (adaptive.target, adaptive.horizon) == (
        0.5,
        10,
    )
    with pytest.raises(ValueError, match="kl_horizon"):
        get_kl_controller(0.1, target_kl=0.5)


@pytest.mark.parametrize("target", [None, 0.1])
def test_state_survives_a_checkpoint(target):
    controller = get_kl_controller(0.2, target, 100)
    controller.update(current=0.3, n_steps=10)
    restored = get_kl_controller(0.9, target, 100)
    restored.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert restored.value == controller.value
