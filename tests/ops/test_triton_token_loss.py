"""The fused policy loss in Triton's interpreter (`test_in_interpreter` sets it up)."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs inside test_in_interpreter", allow_module_level=True)

from scan_checks import LAYOUTS, check_token_loss, loss_and_gradients, loss_columns

from roll.algorithms import policy_loss as algorithm
from roll.algorithms.aggregation import AGGREGATION_MODES
from roll.algorithms.kl import KL_KINDS
from roll.algorithms.policy_loss import (
    CISPO,
    RATIO_TYPES,
    TOPR,
    KimiK15,
    PPOClip,
    Reinforce,
    TruncatedIS,
)
from roll.ops import token_loss
from roll.pipeline.loss_io import LossCounts, policy_metrics, report

SURROGATES = [
    PPOClip(),
    PPOClip(clip_low=0.1, clip_high=0.28, dual_clip=1.4),
    Reinforce(),
    TruncatedIS(low=0.5, high=1.1),
    CISPO(clip_low=0.1, clip_high=0.2),
    CISPO(clip_low=0.1, clip_high=0.2, drop_clipped=True),
    TOPR(positive_weight=0.7, negative_weight=1.3),
    KimiK15(tau=0.3),
]
FULL = {
    "surrogate": PPOClip(clip_low=0.1, clip_high=0.28, dual_clip=1.4),
    "agg_mode": "seq-mean-token-mean",
    "kl_coef": 0.2,
    "pg_coef": 0.7,
    "entropy_coef": 0.05,
}


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for everything but float64, as on a GPU, with tiles of 16 tokens."""
    monkeypatch.setattr(token_loss, "TILE", 16)
    monkeypatch.setattr(
        algorithm, "can_fuse", lambda log_probs, *_: log_probs.dtype != torch.float64
    )


@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
def test_surrogates(surrogate: algorithm.Surrogate) -> None:
    check_token_loss((3, 20), 1, "cpu", **{**FULL, "surrogate": surrogate})


@pytest.mark.parametrize("ratio_type", RATIO_TYPES[1:])
@pytest.mark.parametrize("surrogate", [SURROGATES[1], SURROGATES[-1]], ids=str)
def test_gradients_of_shared_ratios(surrogate: algorithm.Surrogate, ratio_type: str) -> None:
    check_token_loss(
        (3, 20), 1, "cpu", **{**FULL, "surrogate": surrogate, "ratio_type": ratio_type}
    )


@pytest.mark.parametrize("agg_mode", AGGREGATION_MODES)
def test_aggregation(agg_mode: str) -> None:
    check_token_loss((3, 20), 2, "cpu", **{**FULL, "agg_mode": agg_mode})


@pytest.mark.parametrize("kl_kind", sorted(set(KL_KINDS) - {"full"}))
def test_kl(kl_kind: str) -> None:
    check_token_loss((3, 20), 2, "cpu", **FULL, kl_kind=kl_kind)


@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (4, 5), (3, 50), (70, 2)], ids=str)
def test_shapes(shape: tuple[int, int], ratio_type: str) -> None:
    check_token_loss(shape, shape[1], "cpu", **FULL, ratio_type=ratio_type)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str) -> None:
    check_token_loss((3, 19), 3, "cpu", layout=layout, **FULL, ratio_type="segment")


@pytest.mark.parametrize(
    "without",
    [
        ("keep_BT",),
        ("is_weight_BT", "sample_weights_B"),
        ("ref_log_probs_BT",),
        ("entropy_BT",),
        ("keep_BT", "is_weight_BT", "sample_weights_B", "ref_log_probs_BT", "entropy_BT"),
    ],
    ids=" ".join,
)
def test_what_is_not_given(without: tuple[str, ...]) -> None:
    check_token_loss((3, 20), 4, "cpu", without=without, **FULL, ratio_type="segment")


@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
@pytest.mark.parametrize("kl_kind", ["k3", "k3+"])
def test_ratios_and_kl_saturate(ratio_type: str, kl_kind: str) -> None:
    check_token_loss(
        (3, 20),
        5,
        "cpu",
        spread=30.0,
        tolerance=1e-5,
        **FULL,
        ratio_type=ratio_type,
        kl_kind=kl_kind,
    )
    check_token_loss(
        (3, 20), 5, "cpu", spread=30.0, tolerance=1e-5, **{**FULL, "surrogate": SURROGATES[-1]}
    )


def test_counts_on_the_device_and_none_at_all() -> None:
    counts = {"num_tokens": torch.tensor(7), "num_sequences": torch.tensor(3.0)}
    check_token_loss((3, 20), 6, "cpu", **FULL, **counts)
    check_token_loss(
        (3, 20), 6, "cpu", **{**FULL, "agg_mode": "seq-mean-token-sum-norm"}, norm_factor=None
    )
    check_token_loss((3, 20), 6, "cpu", **FULL, num_tokens=0, num_sequences=0)


def test_nan_in_a_valid_token_is_not_hidden() -> None:
    columns, mask = loss_columns((3, 20), 7, "cpu")
    columns["keep_BT"] = None
    columns["log_probs_BT"][0, 3] = float("nan")
    loss, _, statistics = loss_and_gradients(
        columns, mask_BT=mask, num_tokens=9, num_sequences=3, **FULL
    )
    assert loss.total.isnan() and loss.pg.isnan()
    assert {name for name, value in statistics.items() if value.isnan()} == {
        *("ratio_mean", "ratio_max", "ratio_min", "approxkl", "policykl")
    }


def test_an_empty_mask_is_a_connected_zero() -> None:
    columns, mask = loss_columns((3, 20), 8, "cpu")
    columns["sample_weights_B"][:] = float("nan")
    loss, gradients, statistics = loss_and_gradients(
        columns, mask_BT=torch.zeros_like(mask), num_tokens=9, num_sequences=3, **FULL
    )
    assert loss.total.item() == 0 and not any(gradient.any() for gradient in gradients)
    assert (
        statistics["ratio_max"].item() == -torch.inf and statistics["ratio_min"].item() == torch.inf
    )


def test_bad_arguments_are_the_plain_version_s_errors() -> None:
    columns, mask = loss_columns((3, 20), 9, "cpu")
    for change, message in (
        ({"agg_mode": "mean"}, "unknown aggregation mode"),
        ({"ratio_type": "word"}, "unknown ratio type"),
        ({"kl_kind": "k9"}, "unknown KL"),
        ({"norm_factor": -1.0, "agg_mode": "seq-mean-token-sum-norm"}, "norm_factor"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_and_gradients(columns, mask_BT=mask, **{**FULL, **change})


def test_a_surrogate_of_one_s_own_takes_the_plain_way() -> None:
    class Own:
        low = high = None

        def __call__(self, terms: algorithm.TokenTerms) -> tuple[torch.Tensor, torch.Tensor]:
            return -terms.advantages_BT * terms.log_probs_BT, terms.ratio_BT > 9

    columns, mask = loss_columns((3, 20), 10, "cpu")
    options = {**FULL, "mask_BT": mask, "num_tokens": 9, "num_sequences": 3}
    own, gradients, _ = loss_and_gradients(columns, **{**options, "surrogate": Own()})
    fused, expected, _ = loss_and_gradients(columns, **{**options, "surrogate": Reinforce()})
    assert isinstance(own.details, algorithm.TokenDetails) and fused.details is None
    torch.testing.assert_close(own.total, fused.total)
    torch.testing.assert_close(gradients[0], expected[0])


@pytest.mark.parametrize("without", [(), ("ref_log_probs_BT",), ("entropy_BT",)], ids=str)
def test_metrics_have_the_names_and_values_of_the_plain_version(
    without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, mask = loss_columns((3, 20), 11, "cpu")
    columns = {name: None if name in without else value for name, value in columns.items()}
    counts: LossCounts = {"num_tokens": 9, "num_sequences": 3, "norm_factor": None}

    def metrics() -> dict[str, float]:
        loss = algorithm.policy_loss(**columns, mask_BT=mask, **FULL, **counts)
        assert (loss.details is None) == is_fused
        return report(
            policy_metrics(loss, agg_mode=FULL["agg_mode"], counts=counts), loss.num_valid
        )

    is_fused = True
    found = metrics()
    monkeypatch.setattr(algorithm, "can_fuse", lambda *_: False)
    is_fused = False
    assert found == pytest.approx(metrics(), rel=1e-5, abs=1e-6)
    assert found["actor/kl_loss@sum"] == 0 or "ref_log_probs_BT" not in without
    assert ("actor/entropy@sum" in found) == ("entropy_BT" not in without)
