"""The coefficient of the KL penalty."""

import json
import math

import pytest

from roll.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller


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
