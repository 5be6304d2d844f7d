"""One optimizer step has one gradient, however its rows are cut, padded, scored or spread over
ranks."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lab_worker import Lab
from tiny_models import VOCAB_SIZE
from training_setup import (
    LOSSES,
    MODELS,
    MODES,
    PROBES,
    make_batch,
    make_config,
    make_model_folders,
    mode_options,
    pad_batch,
    reference_gradients,
    relative_error,
)
from transformers import AutoModelForTokenClassification, AutoTokenizer

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.models.token_tree import token_tree

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


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("garbage", [-100, -1, VOCAB_SIZE, 2**62, -(2**62)])
def test_masked_places_may_hold_anything(folders, share_prefixes, garbage):
    """Padding, the whole of the first row, and every token-level column where nothing is
    learned."""
    options = {"micro_batch": 8, "strategy_config": {"share_prefixes": share_prefixes}}
    config = make_config("agentic", folders["qwen2", True], **options)
    batch = make_batch("agentic")
    batch["response_mask"][0] = 0
    expected = reference_gradients("agentic", folders["qwen2", True], config, batch)
    batch["attention_mask"][0] = 0
    is_token, is_trained = batch["attention_mask"] != 0, batch["response_mask"][:, 1:] != 0
    batch["position_ids"] = torch.where(is_token, torch.arange(is_token.shape[1]), garbage)
    batch["input_ids"] = torch.where(is_token, batch["input_ids"], garbage)
    for key in ("old_log_probs", "ref_log_probs", "advantages"):
        batch[key] = torch.where(is_trained, batch[key], float("nan"))
    assert token_tree(batch["input_ids"], batch["attention_mask"]) is not None
    resources = ResourceManager(num_gpus_per_node=0, num_nodes=1)
    with Cluster("actor_train", PROBES["agentic"], resources, config.actor_train) as cluster:
        cluster.initialize(config)
        assert cluster.workers[0].strategy.shares_prefixes == share_prefixes
        ((gradients, _),) = cluster.gradients(batch)
        assert relative_error(gradients, expected) < TOLERANCE


def check_a_mask_that_marks_everything(pipeline, mode, folder, *, backend="auto", **options):
    """`final_response_mask` also marks prompts, the gaps of conversations and padding: those take
    part in nothing."""
    config = make_config("rlvr", folder, **options, **mode_options(mode))
    batch = make_batch("rlvr")
    rows = (torch.arange(len(batch)) % 3 > 0)[:, None]
    batch["final_response_mask"] = (rows & (batch["response_mask"][:, 1:] != 0)).float()
    batch["values"], batch["returns"] = batch["old_log_probs"], batch["ref_log_probs"]
    expected = reference_gradients(pipeline, folder, config, batch)
    batch["final_response_mask"] = rows.expand_as(batch["advantages"]).float()
    resources = ResourceManager(num_gpus_per_node=0, num_nodes=1, backend=backend)
    with Cluster("actor_train", PROBES[pipeline], resources, config.actor_train) as cluster:
        cluster.initialize(config)
        for gradients, _ in cluster.gradients(batch):
            assert relative_error(gradients, expected) < TOLERANCE


@pytest.fixture(scope="module")
def value_model(folders, tmp_path_factory) -> Path:
    model = AutoModelForTokenClassification.from_pretrained(folders["qwen2", True], num_labels=1)
    model.save_pretrained(folder := tmp_path_factory.mktemp("value"))
    AutoTokenizer.from_pretrained(folders["qwen2", True]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_a_mask_that_is_no_part_of_the_response_mask(folders, mode, micro_batch):
    check_a_mask_that_marks_everything(
        "rlvr", mode, folders["qwen2", True], micro_batch=micro_batch
    )


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_such_a_mask_and_the_value_loss(value_model, micro_batch):
    check_a_mask_that_marks_everything(
        "critic", None, value_model, micro_batch=micro_batch, value_clip=0.2
    )


@pytest.mark.ray
def test_such_a_mask_on_two_ranks(folders, value_model):
    check_a_mask_that_marks_everything(
        "rlvr", None, folders["qwen2", True], workers=2, backend="ray"
    )
    check_a_mask_that_marks_everything("critic", None, value_model, workers=2, backend="ray")


@pytest.mark.parametrize("pipeline", ["agentic", "dpo"])
def test_gradient_checkpointing(folders, pipeline):
    check(pipeline, None, folders["llama", True], gradient_checkpointing=True)


@pytest.mark.parametrize("pipeline", ["agentic", "dpo"])
def test_fsdp2_on_one_rank(folders, pipeline, lone_process_group):
    check(pipeline, None, folders["qwen2", True], strategy="fsdp2_train")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pipeline", ["agentic", "rlvr", "dpo"])
def test_the_head_in_parts(folders, model, pipeline):
    check(
        pipeline,
        None,
        folders[model],
        micro_batch=8,
        strategy_config={"keep_logits_gib": TWELVE_TOKENS},
    )


@pytest.mark.parametrize("pipeline", ["agentic", "dpo"])
def test_the_head_in_parts_with_fsdp2(folders, pipeline, lone_process_group):
    few = {"keep_logits_gib": TWELVE_TOKENS}
    check(
        pipeline,
        None,
        folders["qwen2", True],
        micro_batch=8,
        strategy="fsdp2_train",
        strategy_config=few,
    )


@pytest.mark.ray
@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
@pytest.mark.parametrize(("pipeline", "workers"), [("agentic", 2), ("dpo", 2), ("rlvr", 4)])
def test_ranks(folders, strategy, pipeline, workers):
    check(
        pipeline,
        None,
        folders["qwen2", False],
        strategy=strategy,
        workers=workers,
        left=1,
        right=2,
        backend="ray",
    )


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[int, Cluster]]:
    """Clusters of 1, 2 and 4 processes on Ray, each of which tries one configuration after the
    other."""
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
    """Ranks, sharding, architectures, heads, losses and aggregation modes; the cutting alternates
    along the grid."""
    if workers not in labs:
        resources = ResourceManager(num_gpus_per_node=0, num_nodes=1, backend="ray")
        labs[workers] = Cluster("lab", Lab, resources, SimpleNamespace(world_size=workers))
    turn = LOSSES.index((pipeline, mode)) + MODELS.index(model)
    options = {
        "strategy": strategy,
        "strategy_config": {
            "linear_logits": turn % 2 == 0,
            "keep_logits_gib": TWELVE_TOKENS if turn % 4 == 0 else 1,
        },
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
