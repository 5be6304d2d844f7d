import math
from typing import Any

import pytest
import torch
from loss_cases import GARBAGE, VOCABULARY, loss_and_gradient
from torch import Tensor

from roll.algorithms.preference_loss import PREFERENCE_LOSSES, preference_loss
from roll.configs.worker_config import WorkerConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.dpo.actor_worker import ActorWorker, get_logps, loss_fn
from roll.pipeline.dpo.dpo_config import DPOConfig


def make_worker(**options: Any) -> ActorWorker:
    worker = ActorWorker(WorkerConfig(name="actor_train"))
    worker.pipeline_config = DPOConfig(prompt_length=8, sequence_length=16, **options)
    return worker


def dpo_batch(seed: int = 0, pairs: int = 3, width: int = 9) -> tuple[DataProto, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, width + 1, (2 * pairs, 1), generator=generator)
    attention_mask = (torch.arange(width) < lengths).long()
    data = DataProto.from_dict(
        {
            "input_ids": torch.randint(VOCABULARY, (2 * pairs, width), generator=generator),
            "attention_mask": attention_mask,
            "prompt_id_lens": torch.randint(1, 5, (pairs,), generator=generator).repeat_interleave(
                2
            ),
            "reference_log_probs": -2 + torch.randn(2 * pairs, width - 1, generator=generator),
        }
    )
    return data, torch.randn(2 * pairs, width, VOCABULARY, generator=generator)


def log_probs_of(data: DataProto, logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]


def sums_of(data: DataProto, logits: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """(chosen, rejected) of the policy and of the reference."""
    masks = data["attention_mask"], data["prompt_id_lens"]
    both = (log_probs_of(data, logits), data["reference_log_probs"])
    return tuple(get_logps(log_probs, *masks) for log_probs in both)


def test_get_logps_by_hand() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -4.0]] * 4)
    attention = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    chosen, rejected = get_logps(log_probs, attention, torch.tensor([2, 2, 2, 1]))
    assert chosen.tolist() == [-6.0, -4.0] and rejected.tolist() == [-2.0, -7.0]


def test_loss_fn_by_hand() -> None:
    policy, reference = (
        (torch.tensor([-10.0]), torch.tensor([-12.0])),
        (torch.tensor([-11.0]), torch.tensor([-11.0])),
    )
    loss, chosen, rejected = loss_fn(*policy, *reference, beta=0.5)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1)))
    assert chosen.tolist() == [0.5] and rejected.tolist() == [-0.5]
    loss, _, _ = loss_fn(*policy, *reference, beta=0.5, label_smoothing=0.2)
    assert loss.item() == pytest.approx(
        0.8 * math.log1p(math.exp(-1)) + 0.2 * math.log1p(math.exp(1))
    )
    loss, _, _ = loss_fn(*policy, *reference, ipo=True, beta=0.1)
    assert loss.item() == pytest.approx((2 - 5) ** 2)


def test_the_worker_scores_completions_and_names_its_metrics() -> None:
    data, logits = dpo_batch()
    loss, metrics, gradient = loss_and_gradient(make_worker(beta=0.3), data, logits)
    policy, reference = sums_of(data, logits)
    expected, chosen, rejected = loss_fn(*policy, *reference, beta=0.3)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(
        {
            "actor/loss@sum": expected.item(),
            "actor/acc@sum": (chosen > rejected).float().mean().item(),
            "actor/margin@sum": (chosen - rejected).mean().item(),
            "actor/chosen_reward@sum": chosen.mean().item(),
            "actor/reject_reward@sum": rejected.mean().item(),
            "actor/chosen_logps@sum": policy[0].mean().item(),
            "actor/reject_logps@sum": policy[1].mean().item(),
        },
        rel=1e-5,
    )
    assert all(type(value) is float for value in metrics.values())
    prompt = torch.arange(9) < data["prompt_id_lens"][:, None] - 1
    assert not gradient[prompt].any() and gradient.any()


def test_d1_the_configuration_reaches_the_loss_and_meta_info_overrides_it() -> None:
    data, logits = dpo_batch()
    default = make_worker().loss_func(data, logits)[0].item()
    for options in ({"beta": 0.5}, {"ipo": True}, {"label_smoothing": 0.2}, {"loss_type": "hinge"}):
        configured = make_worker(**options).loss_func(data, logits)[0].item()
        assert configured != pytest.approx(default), options
        override = DataProto(data.batch, meta_info=dict(options))
        assert make_worker().loss_func(override, logits)[0].item() == configured, options


@pytest.mark.parametrize("loss_type", sorted(PREFERENCE_LOSSES))
def test_every_variant_by_name(loss_type: str) -> None:
    data, logits = dpo_batch()
    smoothing = 0.1 if loss_type in ("robust", "exo_pair") else 0.0
    loss, _, gradient = loss_and_gradient(
        make_worker(loss_type=loss_type, label_smoothing=smoothing), data, logits
    )
    policy, reference = sums_of(data, logits)
    lens = data["attention_mask"].sum(1) - data["prompt_id_lens"]
    expected = preference_loss(
        policy_chosen_P=policy[0],
        policy_rejected_P=policy[1],
        reference_chosen_P=reference[0],
        reference_rejected_P=reference[1],
        chosen_lens_P=lens[::2],
        rejected_lens_P=lens[1::2],
        loss_type=loss_type,
        label_smoothing=smoothing,
    )
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert gradient.isfinite().all()


def test_reference_free_needs_no_reference() -> None:
    data, logits = dpo_batch()
    free = data.select(["input_ids", "attention_mask", "prompt_id_lens"])
    loss, _ = make_worker(reference_free=True).loss_func(free, logits)
    data["reference_log_probs"] = torch.zeros_like(data["reference_log_probs"])
    expected, _ = make_worker().loss_func(data, logits)
    torch.testing.assert_close(loss, expected)
    with pytest.raises(KeyError, match="the batch has no column 'reference_log_probs'"):
        make_worker().loss_func(free, logits)


def test_d7_micro_batches_of_pairs_add_up_in_loss_gradient_and_metrics() -> None:
    data, logits = dpo_batch(pairs=5)
    data.meta_info["global_valid_samples"] = {"default": torch.tensor(10.0)}
    worker = make_worker()
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    pieces = [slice(0, 2), slice(2, 8), slice(8, 10)]
    parts = [loss_and_gradient(worker, data[piece], logits[piece]) for piece in pieces]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), gradient)
    for key, value in metrics.items():
        assert sum(part[1][key] for part in parts) == pytest.approx(value, rel=1e-5, abs=1e-6), key
    del data.meta_info["global_valid_samples"]
    assert loss_and_gradient(worker, data, logits)[0] == loss, "alone, a batch counts its own pairs"


def test_d2_a_split_pair_is_refused() -> None:
    data, logits = dpo_batch()
    with pytest.raises(ValueError, match="5 rows, but chosen and rejected rows alternate"):
        make_worker().loss_func(data[:5], logits[:5])


def test_d3_left_and_right_padding_give_one_loss() -> None:
    data, logits = dpo_batch()
    worker = make_worker(loss_type="ipo")
    loss, metrics, gradient = loss_and_gradient(worker, data, logits)
    pad = torch.nn.functional.pad
    moved = DataProto.from_dict(
        {
            "input_ids": pad(data["input_ids"], (3, 2), value=7),
            "attention_mask": pad(data["attention_mask"], (3, 2)),
            "prompt_id_lens": data["prompt_id_lens"],
            "reference_log_probs": pad(data["reference_log_probs"], (3, 2), value=math.nan),
        }
    )
    same, same_metrics, same_gradient = loss_and_gradient(
        worker, moved, pad(logits, (0, 0, 3, 2), value=math.nan)
    )
    torch.testing.assert_close(same, loss)
    assert same_metrics == pytest.approx(metrics)
    torch.testing.assert_close(same_gradient[:, 3:-2], gradient)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_d4_garbage_outside_completions_changes_no_bit(garbage: float) -> None:
    data, logits = dpo_batch()
    worker = make_worker()
    expected_loss, expected_metrics, expected_gradient = loss_and_gradient(worker, data, logits)
    columns = torch.arange(9)
    completion = data["attention_mask"].bool() & (columns >= data["prompt_id_lens"][:, None])
    data["reference_log_probs"] = torch.where(
        completion[:, 1:], data["reference_log_probs"], garbage
    )
    data["input_ids"] = torch.where(completion, data["input_ids"], -100)
    predicting = torch.nn.functional.pad(completion[:, 1:], (0, 1))
    loss, metrics, gradient = loss_and_gradient(
        worker, data, torch.where(predicting[..., None], logits, garbage)
    )
    assert torch.equal(loss, expected_loss) and metrics == expected_metrics
    assert torch.equal(gradient, expected_gradient)


def test_identities_through_the_worker() -> None:
    data, logits = dpo_batch()
    same = DataProto(data.batch.copy())
    same["reference_log_probs"] = log_probs_of(data, logits)
    loss, metrics = make_worker().loss_func(same, logits)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-4)
    assert metrics["actor/margin@sum"] == pytest.approx(0, abs=1e-5)
    _, straight = make_worker().loss_func(data, logits)
    swap = [1, 0, 3, 2, 5, 4]
    _, swapped = make_worker().loss_func(data.select_idxs(swap), logits[swap])
    assert swapped["actor/margin@sum"] == pytest.approx(-straight["actor/margin@sum"])
    assert swapped["actor/acc@sum"] == pytest.approx(1 - straight["actor/acc@sum"])


def test_contradictory_and_idle_options() -> None:
    data, logits = dpo_batch()
    data.meta_info["ipo"] = True
    with pytest.raises(
        ValueError, match="ipo=True and loss_type='hinge' ask for two different losses"
    ):
        make_worker(loss_type="hinge").loss_func(data, logits)
    data.meta_info = {"label_smoothing": 0.1}
    with pytest.warns(
        UserWarning, match=r"label_smoothing=0\.1 has no effect on loss type 'hinge'"
    ):
        make_worker(loss_type="hinge").loss_func(data, logits)
