"""One optimizer step has one gradient, however its rows are cut, padded, scored or spread over ranks."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab_worker import Lab
from tiny_models import VOCAB_SIZE
from training_setup import (
    LOSSES,
    MODELS,
    PROBES,
    make_batch,
    make_config,
    make_model_folders,
    mode_options,
    pad_batch,
    reference_gradients,
    relative_error,
)

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager

TOLERANCE = 1e-5
TWELVE_TOKENS = 12 * VOCAB_SIZE * 4 / 2**30  # GiB of their logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    return make_model_folders(tmp_path_factory.mktemp("models"))


def check(pipeline, mode, folder, *, left=0, right=0, backend="auto", **options):
    config = make_config(pipeline, folder, **options, **mode_options(mode))
    batch = make_batch(pipeline)
    expected = reference_gradients(pipeline, folder, config, batch)
    resources = ResourceManager(num_gpus_per_node=0, num_nodes=1, backend=backend)
    with Cluster("actor_train", PROBES[pipeline], resources, config.actor_train) as cluster:
        cluster.initialize(config)
        for gradients, _ in cluster.gradients(pad_batch(batch, left=left, right=right)):
            assert relative_error(gradients, expected) < TOLERANCE


@pytest.mark.parametrize(("pipeline", "mode"), LOSSES)
def test_every_loss(folders, pipeline, mode):
    check(pipeline, mode, folders["qwen2", True], micro_batch=3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("linear_logits", [True, False])
def test_every_head(folders, model, linear_logits):
    check("agentic", "token-mean", folders[model], strategy_config={"linear_logits": linear_logits})


@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_micro_batches_by_rows(folders, pipeline, micro_batch):
    check(pipeline, None, folders["llama", False], micro_batch=micro_batch)


@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
@pytest.mark.parametrize("max_tokens", [14, 40, 1000])
def test_micro_batches_by_token_budget(folders, pipeline, max_tokens):
    check(pipeline, None, folders["qwen2", False], max_tokens=max_tokens)


@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4), (2, 5)])
def test_padding(folders, pipeline, left, right):
    check(pipeline, None, folders["qwen2", True], left=left, right=right)


@pytest.mark.parametrize("pipeline", ["agentic", "dpo"])
def test_gradient_checkpointing(folders, pipeline):
    check(pipeline, None, folders["llama", True], gradient_checkpointing=True)


@pytest.mark.parametrize("pipeline", ["agentic", "dpo"])
def test_fsdp2_on_one_rank(folders, pipeline, lone_process_group):
    check(pipeline, None, folders["qwen2", True], strategy="fsdp2_train")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
def test_the_head_in_parts(folders, model, pipeline):
    check(pipeline, None, folders[model], micro_batch=8, strategy_config={"keep_logits_gib": TWELVE_TOKENS})


@pytest.mark.parametrize("pipeline", ["agentic", "dpo"])
def test_the_head_in_parts_with_fsdp2(folders, pipeline, lone_process_group):
    few = {"keep_logits_gib": TWELVE_TOKENS}
    check(pipeline, None, folders["qwen2", True], micro_batch=8, strategy="fsdp2_train", strategy_config=few)


@pytest.mark.ray
@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
@pytest.mark.parametrize(("pipeline", "workers"), [("agentic", 2), ("dpo", 2), ("rlvr", 4)])
def test_ranks(folders, strategy, pipeline, workers):
    check(pipeline, None, folders["qwen2", False], strategy=strategy, workers=workers, left=1, right=2, backend="ray")


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[int, Cluster]]:
    """Clusters of 1, 2 and 4 processes on Ray, each of which tries one configuration after the other."""
    clusters: dict[int, Cluster] = {}
    yield clusters
    for cluster in clusters.values():
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("pipeline", "mode"), LOSSES)
def test_whole_grid(folders, labs, workers, strategy, model, pipeline, mode):
    """Ranks, sharding, architectures, heads, losses and aggregation modes; the cutting alternates along the grid."""
    if workers not in labs:
        resources = ResourceManager(num_gpus_per_node=0, num_nodes=1, backend="ray")
        labs[workers] = Cluster("lab", Lab, resources, SimpleNamespace(world_size=workers))
    turn = LOSSES.index((pipeline, mode)) + MODELS.index(model)
    options = {
        "strategy": strategy,
        "strategy_config": {"linear_logits": turn % 2 == 0, "keep_logits_gib": TWELVE_TOKENS if turn % 4 == 0 else 1},
        "gradient_checkpointing": turn % 3 == 0,
        "workers": workers,
        "max_tokens": 28 if turn % 4 == 1 else None,
        "micro_batch": 1 + turn % 2,
        **mode_options(mode),
    }
    config = make_config(pipeline, folders[model], **options)
    batch = make_batch(pipeline)
    expected = reference_gradients(pipeline, folders[model], config, batch)
    labs[workers].execute_all_sync("start", pipeline, config)
    for gradients, _ in labs[workers].gradients(pad_batch(batch, left=turn % 3, right=2)):
        assert relative_error(gradients, expected) < TOLERANCE
