"""`compile: true`: the same numbers with and without gradient checkpointing, for rows of any
width."""

import pytest
import torch
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.strategy import hf_strategy


def trained(config, batches):
    cluster = Cluster("actor_train", PROBES["dpo"], ResourceManager(0, 1), config.actor_train)
    cluster.initialize(config)
    losses = [cluster.train_step(batch).meta_info["metrics"]["actor/loss@sum"] for batch in batches]
    return losses, cluster.workers[0].strategy


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_train_alike(tmp_path, monkeypatch, checkpointing):
    # Everything but the code generation, which needs a compiler and half a minute.
    compile_ = torch.compile
    monkeypatch.setattr(
        hf_strategy.torch, "compile", lambda function: compile_(function, backend="aot_eager")
    )
    folder = make_model_folder(tmp_path / "model")
    batches = [make_batch("dpo", seed=step, width=width) for step, width in enumerate((14, 11, 13))]
    options = {
        "gradient_checkpointing": checkpointing,
        "micro_batch": 4,
        "training_args": {"learning_rate": 1e-2},
    }
    plain, _ = trained(make_config("dpo", folder, **options), batches)
    compiled, strategy = trained(
        make_config("dpo", folder, strategy_config={"compile": True}, **options), batches
    )
    assert compiled == pytest.approx(plain, abs=1e-6)
    layers = hf_strategy.decoder_layers(strategy.model)
    assert (
        len({type(layer) for layer in layers}) == 1
        and type(layers[0]).__name__ == "Qwen2DecoderLayer"
    )
    strategy.save_checkpoint(
        tmp_path / "saved", 1
    )  # the names of the weights are those of the model
