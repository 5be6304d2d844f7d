"""Logits are made once: kept for backward, with the same gradient to the bit, or trained part by
part."""

import pytest
import torch
from log_probs_reference import TensorWatch
from tiny_models import VOCAB_SIZE, make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.distributed.strategy import train_strategy
from roll.ops import log_probs
from roll.ops.linear_log_probs import loss_in_parts
from roll.ops.linear_logits import LinearLogits


def gradients(pipeline, folder, batch, micro_batch=2, model_args=None, **strategy_config):
    config = make_config(
        pipeline,
        folder,
        micro_batch=micro_batch,
        model_args=model_args,
        strategy_config=strategy_config,
    )
    worker = PROBES[pipeline](config.actor_train)
    worker.initialize(config)
    with TensorWatch() as watch:
        found, _ = worker.gradients(batch)
    return found, watch.num_products


@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
def test_every_loss_takes_three_products_with_the_same_gradient(tmp_path, monkeypatch, pipeline):
    monkeypatch.setattr(log_probs, "SMALL_NUMBER_OF_LOGITS", 0)
    folder, batch = make_model_folder(tmp_path), make_batch(pipeline)
    kept, num_kept = gradients(pipeline, folder, batch)
    again, num_again = gradients(pipeline, folder, batch, keep_logits_gib=0)
    num_micro_batches = len(batch) // (2 * batch.meta_info.get("rows_per_unit", 1))
    assert num_again - num_kept == num_micro_batches
    assert kept.keys() == again.keys() and all(
        torch.equal(kept[name], again[name]) for name in kept
    )


@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
def test_logits_that_cannot_all_be_kept_are_made_once_too(tmp_path, monkeypatch, pipeline):
    """Micro-batches of which a row, or a pair, can be kept: three products for each part."""
    monkeypatch.setattr(log_probs, "SMALL_NUMBER_OF_LOGITS", 0)
    folder, batch = make_model_folder(tmp_path), make_batch(pipeline)
    tokens = batch["attention_mask"].shape[1] * batch.meta_info.get("rows_per_unit", 1)
    few = tokens * VOCAB_SIZE * 4 / 2**30
    whole, num_whole = gradients(pipeline, folder, batch, micro_batch=4)
    in_parts, num_in_parts = gradients(pipeline, folder, batch, micro_batch=4, keep_logits_gib=few)
    num_parts = []

    def counted(output, parts, loss_of_rows):
        num_parts.append(len(parts))
        return loss_in_parts(output, parts, loss_of_rows)

    monkeypatch.setattr(train_strategy, "loss_in_parts", counted)
    again, _ = gradients(pipeline, folder, batch, micro_batch=4, keep_logits_gib=few)
    assert num_parts and num_in_parts - num_whole == 3 * sum(count - 1 for count in num_parts)
    for name in whole:
        assert torch.equal(in_parts[name], again[name])
        torch.testing.assert_close(in_parts[name], whole[name], rtol=1e-4, atol=1e-6)


def test_no_parts_where_adding_up_takes_more_than_it_saves(tmp_path, monkeypatch):
    """In half precision the gradient of the head is summed in float32, which is more memory than
    may be used here."""
    monkeypatch.setattr(train_strategy, "loss_in_parts", None)
    few = 12 * VOCAB_SIZE * 2 / 2**30
    folder, batch = make_model_folder(tmp_path), make_batch("agentic")
    gradients(
        "agentic", folder, batch, micro_batch=4, model_args={"dtype": "bf16"}, keep_logits_gib=few
    )


@pytest.mark.parametrize(("dtype", "num_parts"), [(torch.float16, 1), (torch.float32, 4)])
def test_no_parts_in_a_precision_whose_loss_is_scaled(tmp_path, dtype, num_parts):
    few = 12 * VOCAB_SIZE * 4 / 2**30
    config = make_config(
        "dpo", make_model_folder(tmp_path), strategy_config={"keep_logits_gib": few}
    )
    worker = PROBES["dpo"](config.actor_train)
    worker.initialize(config)
    batch = make_batch("dpo")
    output = LinearLogits(
        torch.zeros(*batch["input_ids"].shape, 8, dtype=dtype),
        torch.zeros(VOCAB_SIZE, 8, dtype=dtype),
    )
    assert len(worker.strategy.parts_of(batch, output)) == num_parts


def test_prefixes_are_shared_unless_told_otherwise(tmp_path):
    folder, batch = make_model_folder(tmp_path), make_batch("dpo")
    shared, num_shared = gradients("dpo", folder, batch)
    apart, num_apart = gradients("dpo", folder, batch, share_prefixes=False)
    assert num_shared == num_apart and any(
        not torch.equal(shared[name], apart[name]) for name in shared
    )
    for name in shared:
        torch.testing.assert_close(shared[name], apart[name], rtol=1e-4, atol=1e-6)
