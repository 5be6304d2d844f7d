"""Optimizer steps: against a plain loop, with numbers that are not finite, and on rows chosen over
all ranks."""

import math
from typing import ClassVar

import pytest
import torch
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config, pad_batch, relative_error
from transformers import AutoModelForCausalLM

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.strategy import strategy
from roll.distributed.strategy.strategy import Ranks
from roll.distributed.strategy.train_strategy import PLACEHOLDER, NonFiniteStepError
from roll.exceptions import WorkerError

LORA = {"lora_target": "q_proj,v_proj", "lora_rank": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


def local_cluster(pipeline, config, role="actor_train"):
    resources = ResourceManager(num_gpus_per_node=0, num_nodes=1)
    cluster = Cluster(role, PROBES[pipeline], resources, getattr(config, role))
    cluster.initialize(config)
    return cluster


def local_worker(pipeline, config, role="actor_train"):
    return local_cluster(pipeline, config, role).workers[0]


def dpo_loss_of_plain_model(model, batch):
    """DPO from first principles: sums of log-softmax over the completion, one number for each
    row."""
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    logits = model(ids, attention_mask=mask, use_cache=False).logits.float()
    log_probs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    completion = (mask[:, 1:] == 1) & (
        torch.arange(1, ids.shape[1]) >= batch.batch["prompt_id_lens"][:, None]
    )
    margins = torch.where(completion, log_probs - batch.batch["reference_log_probs"], 0.0).sum(-1)
    return -torch.nn.functional.logsigmoid(0.1 * (margins[0::2] - margins[1::2])).mean()


@pytest.mark.parametrize("lora", [False, True])
def test_training_matches_a_plain_loop(folder, lora):
    options = {"model_args": LORA} if lora else {}
    training_args = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2}
    config = make_config("dpo", folder, training_args=training_args, **options)
    worker = local_worker("dpo", config)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        from peft import LoraConfig, get_peft_model

        plain = get_peft_model(
            plain, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        )
        plain.load_state_dict(worker.strategy.model.state_dict())
    optimizer = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )
    total = config.actor_train.training_args.max_steps
    for step in range(4):
        batch = make_batch("dpo", seed=step)
        rate = 1e-2 * (step / 2 if step < 2 else (total - step) / (total - 2))
        assert worker.strategy.learning_rate == pytest.approx(rate)
        optimizer.param_groups[0]["lr"] = rate
        loss = dpo_loss_of_plain_model(plain, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = worker.train_step(batch).meta_info["metrics"]
        assert metrics["actor/loss@sum"] == pytest.approx(loss.item(), rel=1e-5)
    ours, theirs = worker.strategy.model.state_dict(), plain.state_dict()
    assert relative_error(ours, theirs) < 1e-5


def weights_of(worker):
    return {name: value.clone() for name, value in worker.strategy.model.state_dict().items()}


def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_alone(folder, tmp_path):
    config = make_config(
        "agentic", folder, output_dir=str(tmp_path), training_args={"learning_rate": 1e-2}
    )
    worker = local_worker("agentic", config)
    good, bad = make_batch("agentic"), make_batch("agentic")
    bad.batch["advantages"] = torch.full_like(bad.batch["advantages"], torch.inf)
    worker.strategy.train_step(good, worker.loss_func)
    before, state = weights_of(worker), repr(worker.strategy.optimizer.state_dict()["state"])
    metrics = worker.strategy.train_step(bad, worker.loss_func)
    assert not math.isfinite(metrics["actor_train/grad_norm"])
    assert metrics["actor_train/skipped_steps@max"] == 1
    assert repr(worker.strategy.optimizer.state_dict()["state"]) == state
    for name, value in worker.strategy.model.state_dict().items():
        assert torch.equal(value, before[name])
    # A good step in between starts the count again.
    assert worker.strategy.train_step(good, worker.loss_func)["actor_train/skipped_steps@max"] == 0


@pytest.mark.parametrize("part", ["loss", "gradient"])
def test_a_step_is_skipped_if_only_its_loss_or_only_its_gradient_is_not_finite(
    folder, tmp_path, part
):
    config = make_config(
        "agentic", folder, output_dir=str(tmp_path), training_args={"learning_rate": 1e-2}
    )
    worker = local_worker("agentic", config)
    totals = []

    def broken(data, output):
        loss, metrics = worker.loss_func(data, output)
        zero = loss - loss.detach()
        loss = loss + (
            torch.inf if part == "loss" else zero.sqrt()
        )  # a constant; 0 with an infinite slope
        totals.append(loss.item())
        return loss, metrics

    before = weights_of(worker)
    metrics = worker.strategy.train_step(make_batch("agentic"), broken)
    assert math.isfinite(sum(totals)) is (part == "gradient")
    assert math.isfinite(metrics["actor_train/grad_norm"]) is (part == "loss")
    assert metrics["actor_train/skipped_steps@max"] == 1
    assert all(
        torch.equal(value, before[name])
        for name, value in worker.strategy.model.state_dict().items()
    )


class Meeting(Ranks):
    """Two ranks that come one after the other: the sums of the second include what the first
    brought."""

    brought: ClassVar[list[list[float]]] = []

    def sum(self, values):
        self.brought.append(list(values))
        return [sum(column) for column in zip(*self.brought, strict=True)]


@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
def test_a_rank_without_rows_counts_nothing(folder, pipeline, monkeypatch):
    strategy = local_worker(pipeline, make_config(pipeline, folder)).strategy
    batch = make_batch(pipeline)
    alone = strategy.global_counts(batch)
    idle = batch.slice(0, 1)
    idle.meta_info = {**batch.meta_info, PLACEHOLDER: True}
    strategy.ranks = Meeting(0, 1, strategy.device)
    monkeypatch.setattr(Meeting, "brought", [])
    strategy.global_counts(idle)
    assert strategy.global_counts(batch) == alone
    assert set(Meeting.brought[0]) == {0.0} and alone["global_valid_samples"]["default"] == len(
        batch
    )


def test_three_bad_steps_in_a_row_stop_the_run_with_the_batch_on_disk(folder, tmp_path):
    config = make_config("agentic", folder, output_dir=str(tmp_path))
    worker = local_worker("agentic", config)
    bad = make_batch("agentic")
    bad.batch["advantages"][0] = torch.inf
    worker.strategy.train_step(bad, worker.loss_func)
    worker.strategy.train_step(bad, worker.loss_func)
    with pytest.raises(
        NonFiniteStepError, match=r"3 optimizer steps in a row were not finite.*DataProto\.load"
    ) as caught:
        worker.strategy.train_step(bad, worker.loss_func)
    assert str(tmp_path) in str(caught.value)
    dumped = DataProto.load(tmp_path / "non_finite" / worker.worker_name)
    assert torch.equal(dumped.batch["input_ids"], bad.batch["input_ids"])


def test_log_probs_equal_a_plain_float64_forward(folder):
    config = make_config("agentic", folder)
    worker = local_worker("agentic", config)
    batch = make_batch("agentic")
    result = worker.compute_log_probs(batch)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = batch.batch["input_ids"]
    with torch.no_grad():
        logits = plain(ids, attention_mask=batch.batch["attention_mask"], use_cache=False).logits[
            :, :-1
        ]
    log_softmax = torch.log_softmax(logits / 0.95, -1)  # the default sampling temperature
    mask = batch.batch["response_mask"][:, 1:] != 0
    expected = torch.where(mask, log_softmax.gather(-1, ids[:, 1:, None])[..., 0], 0.0)
    entropy = torch.where(mask, -(log_softmax.exp() * log_softmax).sum(-1), 0.0)
    torch.testing.assert_close(result.batch["log_probs"].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.batch["entropy"].double(), entropy, rtol=1e-5, atol=1e-5)
    assert (result.batch["log_probs"][~mask] == 0).all()


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("jump", [0, 1, 7, -2])
def test_positions_of_the_caller_are_those_of_plain_transformers(
    folder, share_prefixes, left, jump
):
    """Tokens from the fifth on stand `jump` positions further right; padding has any position."""
    worker = local_worker(
        "dpo", make_config("dpo", folder, strategy_config={"share_prefixes": share_prefixes})
    )
    assert worker.strategy.shares_prefixes == share_prefixes
    batch = pad_batch(make_batch("dpo"), left=left, right=2)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    without = worker.compute_log_probs(batch)["log_probs"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    positions += jump * (positions >= 4)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = plain(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[
            :, :-1
        ]
    expected = torch.where(
        mask[:, 1:] != 0, logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0], 0.0
    )
    batch["position_ids"] = torch.where(mask != 0, positions, -5)
    log_probs = worker.compute_log_probs(batch)["log_probs"]
    real = (mask[:, :-1] != 0) & (mask[:, 1:] != 0)
    torch.testing.assert_close(log_probs[real].double(), expected[real], rtol=1e-5, atol=1e-5)
    if jump == 0:  # what our own pipelines pass
        assert torch.equal(log_probs, without)
    else:
        assert (log_probs - without)[real].abs().max() > 1e-3
    gradients, _ = worker.gradients(batch)
    del batch.batch["position_ids"]
    change = relative_error(gradients, worker.gradients(batch)[0])
    assert change < 1e-6 if jump == 0 else change > 1e-3


def test_positions_of_several_channels(folder):
    worker = local_worker("dpo", make_config("dpo", folder))
    batch = make_batch("dpo")
    plain = worker.compute_log_probs(batch)["log_probs"]
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    batch["position_ids"] = positions[:, None].expand(-1, 3, -1)
    assert torch.equal(worker.compute_log_probs(batch)["log_probs"], plain)
    batch["position_ids"] = 2 * batch["position_ids"]
    with pytest.raises(
        ValueError, match=r"position_ids have shape \(8, 3, 14\), expected \(8, 14\)"
    ):
        worker.compute_log_probs(batch)
    batch["position_ids"] = positions[:, :-1]
    with pytest.raises(ValueError, match=r"position_ids have shape \(8, 13\), expected \(8, 14\)"):
        worker.compute_log_probs(batch)


def test_train_reference_and_inference_roles_agree_to_the_last_bit(folder):
    batch = make_batch("dpo")
    config = make_config("dpo", folder)
    results = [
        local_worker("dpo", config, role).compute_log_probs(batch).batch["log_probs"]
        for role in ("actor_train", "reference")
    ]
    lora = make_config("dpo", folder, model_args=LORA)
    without_adapter = DataProto(batch=batch.batch, meta_info={"disable_adapter": True})
    results.append(local_worker("dpo", lora).compute_log_probs(without_adapter).batch["log_probs"])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_seeds_call_gives_one_batch_in_input_order(folder):
    reference_cluster = local_cluster("dpo", make_config("dpo", folder), "reference")
    batch = make_batch("dpo")
    log_probs = reference_cluster.execute_all_sync("compute_log_probs", batch).batch["log_probs"]
    assert log_probs.shape == (len(batch), batch.batch["input_ids"].shape[1] - 1)
    alone = [
        reference_cluster.compute_log_probs(batch[i]).batch["log_probs"] for i in range(len(batch))
    ]
    torch.testing.assert_close(log_probs, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_an_empty_batch_is_refused(folder):
    worker = local_worker("dpo", make_config("dpo", folder))
    with pytest.raises(ValueError, match="no rows"):
        worker.compute_log_probs(make_batch("dpo").slice(0, 0))


def test_a_strategy_that_does_not_generate_says_which_does(folder):
    worker = local_worker("dpo", make_config("dpo", folder))
    with pytest.raises(RuntimeError, match=r"hf_train does not generate.*hf_infer or vllm"):
        worker.strategy.generation_engine  # noqa: B018  (asking for it is the test)


def test_errors_of_a_step_name_the_worker(folder):
    cluster = local_cluster("dpo", make_config("dpo", folder))
    batch = make_batch("dpo")
    batch.pop("reference_log_probs")
    with pytest.raises(WorkerError, match=r"actor_train-0.*train_step.*reference_log_probs"):
        cluster.train_step(batch)


def test_a_dtype_that_would_train_wrongly_is_refused(folder):
    message = r"actor_train\.model_args\.dtype: found fp16, expected bf16 or fp32"
    with pytest.raises(WorkerError, match=message):
        local_cluster("dpo", make_config("dpo", folder, model_args={"dtype": "fp16"}))


@pytest.mark.parametrize(("large", "is_said"), [(100, True), (10**9, False)])
def test_a_large_model_that_leaves_the_gpus_alone_is_mentioned(folder, monkeypatch, large, is_said):
    said = []
    worker = local_worker("dpo", make_config("dpo", folder))
    monkeypatch.setattr(strategy, "LARGE_ON_A_CPU", large)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(worker.logger, "warning", said.append)
    worker.strategy.build_model(lambda **_: worker.strategy.model)
    text = "actor_train computes on the CPU, although this machine has 2 GPU(s)"
    assert (said and text in said[0]) if is_said else not said
