"""Scans, segment means and the policy loss on a real GPU, against float64, with fresh inputs in
every run."""

import secrets

import pytest
import torch

pytest.importorskip("triton")

from loss_cases import policy_columns
from scan_checks import LAYOUTS, check_recurrences, check_segment_means, random_rows

from roll.algorithms.advantages import discounted_returns, gae, turn_discounted_returns
from roll.algorithms.policy_loss import RATIO_TYPES, policy_loss
from roll.algorithms.surrogates import POLICY_LOSSES, PPOClip
from roll.ops import triton_scans
from roll.ops.scans import segment_mean
from roll.pipeline.loss_io import policy_metrics, report
from roll.utils.metrics.reduction import bring_to_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
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
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_on_a_gpu_are_those_on_the_cpu(name: str, ratio_type: str, seed: int) -> None:
    mask = random_rows(6, 5000, seed, "cpu")[2]
    columns = policy_columns(seed, mask)
    found = []
    for device in ("cuda", "cpu"):
        given = {key: value.to(device) for key, value in columns.items()}
        leaf = given["log_probs_BT"].requires_grad_()
        loss = policy_loss(
            **given, mask_BT=mask.to(device), surrogate=POLICY_LOSSES[name](), ratio_type=ratio_type, **FULL
        )  # fmt: skip
        loss.total.backward()
        found.append({**loss.statistics, "total": loss.total.detach(), "gradient": leaf.grad})
    for key, expected in found[1].items():
        torch.testing.assert_close(found[0][key].cpu(), expected, rtol=1e-4, atol=1e-5, msg=key)


def test_one_transfer_brings_all_metrics_of_a_step(seed: int) -> None:
    """Every copy to the host is seen by the profiler: there is one for three micro-batches."""
    log_probs, advantages, mask = random_rows(4, 300, seed, "cuda")
    columns = {
        "ref_log_probs_BT": log_probs,
        "old_log_probs_BT": log_probs,
        "advantages_BT": advantages,
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        reports = []
        for _ in range(3):
            loss = policy_loss(
                log_probs_BT=log_probs, surrogate=PPOClip(), mask_BT=mask, **columns, num_tokens=9
            )
            reports.append(report(policy_metrics(loss), loss.mask_BT))
        found = bring_to_host(reports)
        assert found[0] == found[2] and all(type(value) is float for value in found[0].values())
    copies = [event.name for event in profile.events() if "DtoH" in event.name]
    assert len(copies) == 1
