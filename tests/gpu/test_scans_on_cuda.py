"""Scans, segment means and the fused policy loss on a real GPU, against float64, with fresh inputs in every run."""

import secrets

import pytest
import torch

pytest.importorskip("triton")

from scan_checks import (
    LAYOUTS,
    check_recurrences,
    check_segment_means,
    check_token_loss,
    loss_columns,
    random_rows,
)

from roll.algorithms.advantages import discounted_returns, gae, turn_discounted_returns
from roll.algorithms.aggregation import AGGREGATION_MODES
from roll.algorithms.policy_loss import (
    CISPO,
    RATIO_TYPES,
    TOPR,
    KimiK15,
    PPOClip,
    Reinforce,
    TruncatedIS,
    policy_loss,
)
from roll.ops import triton_scans
from roll.ops.segment_mean import segment_mean
from roll.pipeline.loss_io import LossCounts, policy_metrics
from roll.utils.metrics.deferred import DeferredMetrics, read_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SURROGATES = [
    PPOClip(clip_low=0.1, clip_high=0.28, dual_clip=1.4),
    Reinforce(),
    TruncatedIS(low=0.5, high=1.1),
    CISPO(clip_low=0.1, clip_high=0.2, drop_clipped=True),
    TOPR(),
    KimiK15(tau=0.3),
]
FULL = {"agg_mode": "seq-mean-token-mean", "kl_coef": 0.2, "pg_coef": 0.7, "entropy_coef": 0.05}


@pytest.fixture
def seed() -> int:
    """A new one in every run; pytest shows it where a test fails."""
    return secrets.randbelow(1 << 30)


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 7), (2, 2048), (5, 2049), (300, 5000), (2, 70_001)], ids=str
)
def test_recurrences(shape: tuple[int, int], seed: int) -> None:
    check_recurrences(triton_scans, shape, seed, "cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recurrences_in_other_dtypes(dtype: torch.dtype, seed: int) -> None:
    check_recurrences(triton_scans, (3, 5000), seed, "cuda", dtype=dtype)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.0, 0.5), (0.9, 0.0), (1e-30, 1.0)])
def test_recurrences_with_any_discount(gamma: float, lam: float, seed: int) -> None:
    check_recurrences(triton_scans, (3, 3000), seed, "cuda", gamma=gamma, lam=lam)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, seed: int) -> None:
    check_recurrences(triton_scans, (4, 3001), seed, "cuda", layout=layout)
    check_segment_means(triton_scans, (4, 3001), seed, "cuda", layout=layout)
    check_token_loss(
        (4, 3001),
        seed,
        "cuda",
        surrogate=SURROGATES[0],
        layout=layout,
        ratio_type="segment",
        **FULL,
    )


@pytest.mark.parametrize("with_keep", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2049), (300, 5000), (2, 70_001)], ids=str)
def test_segment_means(shape: tuple[int, int], with_keep: bool, seed: int) -> None:
    check_segment_means(triton_scans, shape, seed, "cuda", with_keep=with_keep)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    x, mask = torch.empty(shape, device="cuda"), torch.empty(shape, dtype=torch.bool, device="cuda")
    assert [result.shape for result in gae(x, x, mask, 0.9, 0.9)] == [shape] * 2
    assert discounted_returns(x, mask, 0.9).shape == segment_mean(x, mask).shape == shape


def test_functions_on_a_gpu_are_those_on_the_cpu(seed: int) -> None:
    rewards, values, mask = random_rows(20, 4000, seed, "cuda")
    on_cpu = [x.cpu() for x in (rewards, values, mask)]
    close = {"rtol": 1e-6, "atol": 1e-6}
    for found, expected in zip(
        gae(rewards, values, mask, 0.99, 0.95), gae(*on_cpu, 0.99, 0.95), strict=True
    ):
        torch.testing.assert_close(found.cpu(), expected, **close)
    for function in (discounted_returns, turn_discounted_returns):
        expected = function(on_cpu[0], on_cpu[2], 0.9)
        torch.testing.assert_close(function(rewards, mask, 0.9).cpu(), expected, **close)


@pytest.mark.parametrize("ratio_type", RATIO_TYPES)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda surrogate: type(surrogate).__name__)
def test_policy_losses(surrogate: PPOClip, ratio_type: str, seed: int) -> None:
    check_token_loss((6, 5000), seed, "cuda", surrogate=surrogate, ratio_type=ratio_type, **FULL)


@pytest.mark.parametrize("agg_mode", AGGREGATION_MODES)
def test_aggregation(agg_mode: str, seed: int) -> None:
    options = {**FULL, "agg_mode": agg_mode, "surrogate": SURROGATES[0]}
    check_token_loss((100, 300), seed, "cuda", **options)
    counts = {
        "num_tokens": torch.tensor(77, device="cuda"),
        "num_sequences": torch.tensor(9.0, device="cuda"),
    }
    check_token_loss((3, 300), seed, "cuda", **options, **counts)


@pytest.mark.parametrize("kl_kind", ["k1", "abs", "k2", "k3", "k3+"])
def test_kl(kl_kind: str, seed: int) -> None:
    check_token_loss((3, 300), seed, "cuda", surrogate=SURROGATES[0], kl_kind=kl_kind, **FULL)


def test_the_last_program_sees_what_all_others_wrote(seed: int) -> None:
    """Thousands of short rows are done at about the same time; their sum is the same, bit by bit, every time."""
    columns, mask = loss_columns((5000, 40), seed, "cuda")
    options = {
        **FULL,
        "surrogate": SURROGATES[0],
        "mask_BT": mask,
        "num_tokens": 9,
        "num_sequences": 5000,
    }
    first = policy_loss(**columns, **options).parts.vector
    assert first is not None
    for _ in range(200):
        found = policy_loss(**columns, **options).parts.vector
        assert found is not None and torch.equal(found, first)
    check_token_loss((5000, 40), seed, "cuda", surrogate=SURROGATES[0], **FULL)


def test_one_transfer_brings_all_metrics_of_a_step(seed: int) -> None:
    """Every copy to the host is seen by the profiler: there is one for three micro-batches."""
    log_probs, advantages, mask = random_rows(4, 300, seed, "cuda")
    counts: LossCounts = {"num_tokens": 9, "num_sequences": 4, "norm_factor": None}
    columns = {
        "ref_log_probs_BT": log_probs,
        "old_log_probs_BT": log_probs,
        "advantages_BT": advantages,
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        reports = []
        for _ in range(3):
            loss = policy_loss(
                log_probs_BT=log_probs, surrogate=PPOClip(), mask_BT=mask, **columns, **counts
            )
            found = policy_metrics(loss, agg_mode="seq-mean-token-mean", counts=counts)
            reports.append(DeferredMetrics(found, loss.num_valid))
        read_together(reports)
        assert dict(reports[0]) == dict(reports[2])
    copies = [event.name for event in profile.events() if "DtoH" in event.name]
    assert len(copies) == 1
