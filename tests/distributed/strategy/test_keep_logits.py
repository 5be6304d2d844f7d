"""Logits that are kept for backward: one product less, and the same gradient to the bit."""

import pytest
import torch
from log_probs_reference import TensorWatch
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.exceptions import ConfigError
from roll.ops import log_probs


def gradients(pipeline, folder, batch, **strategy_config):
    config = make_config(pipeline, folder, strategy_config=strategy_config)
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
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("found", [-1, "2", True])
def test_a_wrong_number_is_named(tmp_path, found):
    with pytest.raises(ConfigError, match=r"actor_train\.strategy_args\.strategy_config\.keep_logits_gib: found"):
        gradients("dpo", make_model_folder(tmp_path), make_batch("dpo"), keep_logits_gib=found)


def test_prefixes_are_shared_unless_told_otherwise(tmp_path):
    folder, batch = make_model_folder(tmp_path), make_batch("dpo")
    shared, num_shared = gradients("dpo", folder, batch)
    apart, num_apart = gradients("dpo", folder, batch, share_prefixes=False)
    assert num_shared == num_apart and any(not torch.equal(shared[name], apart[name]) for name in shared)
    for name in shared:
        torch.testing.assert_close(shared[name], apart[name], rtol=1e-4, atol=1e-6)


def test_a_wrong_share_prefixes_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"strategy_config\.share_prefixes: found 'yes', expected true or false"):
        gradients("dpo", make_model_folder(tmp_path), make_batch("dpo"), share_prefixes="yes")
