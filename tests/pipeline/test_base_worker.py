from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import GARBAGE, loss_and_gradient, narrowed, policy_batch, random_mask, with_counts

from roll.algorithms.policy_loss import policy_loss
from roll.algorithms.surrogates import PPOClip
from roll.configs.ppo_config import PPOConfig
from roll.configs.worker_config import WorkerConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.base_worker import ActorWorker, CriticWorker


def make_actor(recompute: bool = False, **options: Any) -> ActorWorker:
    worker = ActorWorker(WorkerConfig(name="actor_train"))
    worker.pipeline_config = PPOConfig(
        prompt_length=8,
        sequence_length=16,
        force_disable_old_logprobs_recompute=not recompute,
        enable_old_logprobs_recompute=recompute,
        **options,
    )
    return worker


def test_the_base_loss_is_ppo_per_token() -> None:
    data, logits = policy_batch()
    worker = make_actor(pg_clip=0.1, use_kl_loss=True, kl_loss_coef=0.2, loss_agg_mode="token-mean")
    loss, metrics, _ = loss_and_gradient(worker, data, logits)
    expected = policy_loss(
        log_probs_BT=next_token_log_probs(logits, data["input_ids"], data["response_mask"])[0],
        old_log_probs_BT=data["old_log_probs"],
        advantages_BT=data["advantages"],
        mask_BT=data["response_mask"][:, 1:],
        ref_log_probs_BT=data["ref_log_probs"],
        surrogate=PPOClip(clip_low=0.1, clip_high=0.1),
        agg_mode="token-mean",
        kl_coef=0.2,
    )
    torch.testing.assert_close(loss, expected.total)
    assert metrics["actor/kl_loss@sum"] == pytest.approx(expected.kl.item())


def test_l21_base_metrics_add_up_over_micro_batches() -> None:
    data, logits = policy_batch(rows=4)
    data = with_counts(data, "response_mask")
    worker = make_actor()
    _, whole, _ = loss_and_gradient(worker, data, logits)
    columns = slice(0, 10)
    parts = [
        loss_and_gradient(worker, narrowed(data, [i], columns), logits[i : i + 1])[1]
        for i in range(4)
    ]
    for key in whole:
        if key.endswith("@sum"):
            assert sum(part[key] for part in parts) == pytest.approx(
                whole[key], rel=1e-5, abs=1e-6
            ), key
    assert all("@" in key for key in whole)


def test_tr5_kl_terms_never_see_a_placeholder() -> None:
    data, logits = policy_batch()
    data["old_log_probs"] = torch.zeros_like(data["response_mask"][:, 1:])
    _, metrics, _ = loss_and_gradient(make_actor(), data, logits)
    assert metrics["actor/approxkl@sum"] == metrics["actor/policykl@sum"] == 0
    assert metrics["actor/ratio_max@max"] == metrics["actor/ratio_min@min"] == 1


# Old log-probabilities


def scored(data: DataProto, logits: torch.Tensor) -> torch.Tensor:
    return next_token_log_probs(logits, data["input_ids"], data["response_mask"])[0]


def test_recomputed_old_log_probs_are_the_column() -> None:
    data, logits = policy_batch()
    old = make_actor(recompute=True).get_old_log_probs_with_cache(data, scored(data, logits))
    assert torch.equal(old, data["old_log_probs"])
    assert torch.equal(
        make_actor().get_old_log_probs_with_cache(data, scored(data, logits)), data["old_log_probs"]
    )


@pytest.mark.parametrize("placeholder", [True, False])
def test_l14_a_placeholder_is_never_the_old_policy(placeholder: bool) -> None:
    data, logits = policy_batch()
    if placeholder:
        data["old_log_probs"] = torch.zeros_like(data["response_mask"][:, 1:])
    else:
        del data["old_log_probs"]
    log_probs = scored(data, logits)
    assert torch.equal(make_actor().get_old_log_probs_with_cache(data, log_probs), log_probs), (
        "first pass: on-policy"
    )
    with pytest.raises(
        KeyError, match="ppo_epochs=2 needs the old log-probabilities of the first epoch"
    ):
        make_actor(ppo_epochs=2).get_old_log_probs_with_cache(data, log_probs)
    found = "torch.int64, a placeholder" if placeholder else "no such column"
    with pytest.raises(
        KeyError, match=f"needs the column 'old_log_probs' as floats; found {found}"
    ):
        make_actor(recompute=True).get_old_log_probs_with_cache(data, log_probs)


def with_uuids(data: DataProto) -> DataProto:
    data["sample_uuid"] = np.array([f"s{i}" for i in range(len(data))], dtype=object)
    data["old_log_probs"] = torch.zeros_like(data["response_mask"][:, 1:])
    return data


def test_the_first_epoch_is_on_policy_and_later_ones_remember_it() -> None:
    data, logits = policy_batch()
    data = with_uuids(data)
    worker = make_actor(ppo_epochs=2)
    first = scored(data, logits).requires_grad_()
    old = worker.get_old_log_probs_with_cache(data, first)
    assert torch.equal(old, first) and not old.requires_grad
    later = scored(data, logits + torch.randn_like(logits))
    mask = data["response_mask"][:, 1:].bool()
    assert torch.equal(worker.get_old_log_probs_with_cache(data, later)[mask], first[mask])
    worker.clear_old_log_probs_cache()
    assert torch.equal(worker.get_old_log_probs_with_cache(data, later), later)


def test_one_epoch_keeps_nothing() -> None:
    data, logits = policy_batch()
    worker = make_actor()
    worker.get_old_log_probs_with_cache(with_uuids(data), scored(data, logits))
    assert worker._old_log_probs_cache == {}


def test_l15_rows_hit_and_miss_one_by_one_at_any_width() -> None:
    data, logits = policy_batch(5, rows=4, width=10)
    data = with_uuids(data)
    mask = data["response_mask"][:, 1:].bool()
    worker = make_actor(ppo_epochs=2)
    first = scored(data, logits)
    # Rows 2 and 0, trimmed to their own columns and moved to the right.
    used = data["response_mask"][[2, 0]].any(0).nonzero().flatten()
    columns = slice(int(used[0]) - 1, int(used[-1]) + 1)
    piece = narrowed(data, [2, 0], columns)
    worker.get_old_log_probs_with_cache(piece, first[[2, 0], columns.start : columns.stop - 1])
    # The whole batch, wider than what was kept, in another order: two rows are known, two are new.
    order = [1, 0, 3, 2]
    later = scored(data, logits + 1 + torch.randn_like(logits))[order]
    old = worker.get_old_log_probs_with_cache(data.select_idxs(order), later)
    for position, row in enumerate(order):
        expected = first[row] if row in (0, 2) else later[position]
        assert torch.equal(old[position][mask[row]], expected[mask[row]]), row
    # Now the two that were new are known as well.
    again = worker.get_old_log_probs_with_cache(
        data.select_idxs(order), torch.full_like(later, -9.0)
    )
    assert torch.equal(again[mask[order]], old[mask[order]])


def test_a_uuid_of_two_different_samples_is_an_error() -> None:
    data, logits = policy_batch()
    data = with_uuids(data)
    worker = make_actor(ppo_epochs=2)
    worker.get_old_log_probs_with_cache(data, scored(data, logits))
    data["response_mask"] = torch.ones_like(data["response_mask"])
    with pytest.raises(ValueError, match=r"sample 's\d' has 9 response tokens, but had \d when"):
        worker.get_old_log_probs_with_cache(data, scored(data, logits))


def test_two_epochs_through_the_loss() -> None:
    data, logits = policy_batch()
    data = with_uuids(data)
    worker = make_actor(ppo_epochs=2)
    _, first, _ = loss_and_gradient(worker, data, logits)
    assert (
        first["actor/ratio_max@max"] == first["actor/ratio_min@min"] == 1
        and first["actor/clipfrac@sum"] == 0
    )
    _, second, _ = loss_and_gradient(worker, data, logits + 0.1 * torch.randn_like(logits))
    assert second["actor/ratio_max@max"] > 1 > second["actor/ratio_min@min"]


# The critic


def critic_batch(seed: int = 0) -> tuple[DataProto, torch.Tensor]:
    mask = random_mask(seed, 4, 9)
    columns = {
        key: torch.where(mask.bool(), torch.randn(mask.shape), 0.0) for key in ("values", "returns")
    }
    response_mask = torch.nn.functional.pad(mask, (1, 0))
    data = DataProto.from_dict(
        {**columns, "response_mask": response_mask, "input_ids": torch.ones_like(response_mask)}
    )
    return data, torch.randn(4, 10, 1)


def make_critic(**options: Any) -> CriticWorker:
    worker = CriticWorker(WorkerConfig(name="critic"))
    worker.pipeline_config = PPOConfig(prompt_length=8, sequence_length=16, **options)
    return worker


def test_the_critics_loss_by_hand() -> None:
    data = DataProto.from_dict(
        {
            "response_mask": torch.tensor([[0, 1, 1], [0, 0, 1]]),
            "values": torch.tensor([[0.0, 0.0], [9.0, 0.0]]),
            "returns": torch.tensor([[2.0, 4.0], [9.0, 1.0]]),
        }
    )
    output = torch.tensor([[1.0, 2.0, 9.0], [9.0, 0.5, 9.0]])
    loss, metrics = make_critic().loss_func(data, output)
    assert loss.item() == pytest.approx(0.5 * ((1 + 4) / 2 + 0.25) / 2)
    assert metrics == pytest.approx(
        {
            "critic/loss@sum": loss.item(),
            "critic/error@sum": (2.5 + 0.25) / 2,
            "critic/clipfrac@sum": 0.0,
            "critic/vpred@sum": (1.5 + 0.5) / 2,
            "critic/value@sum": 0.0,
        }
    )
    _, metrics = make_critic(value_clip=0.75).loss_func(data, output[..., None])
    assert metrics["critic/clipfrac@sum"] == 0.5, (
        "both tokens of row 0 moved too far, the one of row 1 did not"
    )


def test_ad15_the_critics_micro_batches_add_up() -> None:
    data, output = critic_batch()
    data = with_counts(data, "response_mask")
    worker = make_critic(value_clip=0.3)
    loss, metrics, gradient = loss_and_gradient(worker, data, output)
    parts = [loss_and_gradient(worker, data[i], output[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), gradient)
    for key, value in metrics.items():
        assert sum(part[1][key] for part in parts) == pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_the_critic_ignores_masked_values(garbage: float) -> None:
    data, output = critic_batch()
    worker = make_critic(value_clip=0.3)
    expected_loss, expected_metrics, expected_gradient = loss_and_gradient(worker, data, output)
    mask = data["response_mask"][:, 1:].bool()
    for key in ("values", "returns"):
        data[key] = torch.where(mask, data[key], garbage)
    output = torch.where(torch.nn.functional.pad(mask, (0, 1))[..., None], output, garbage)
    loss, metrics, gradient = loss_and_gradient(worker, data, output)
    assert torch.equal(loss, expected_loss) and metrics == expected_metrics
    assert torch.equal(gradient, expected_gradient)


def test_the_critic_names_a_missing_column() -> None:
    data, output = critic_batch()
    with pytest.raises(
        KeyError, match="the batch has no column 'returns', which the value loss needs"
    ):
        make_critic().loss_func(data.select(["response_mask", "values"]), output)
