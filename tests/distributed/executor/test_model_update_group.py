"""New weights reach the other role, and both sides can prove it."""

import pytest
import torch
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.model_update_group import ModelUpdateGroup
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.strategy.weight_sync import TensorSpec, checksum, compare_checksums, plan_sync


def clusters(folder, *, backend, workers=1, **options):
    config = make_config(
        "dpo", folder, workers=workers, training_args={"learning_rate": 1e-2}, **options
    )
    resources = ResourceManager(0, 1, backend=backend)
    pair = [
        Cluster(role, PROBES["dpo"], resources, getattr(config, role))
        for role in ("actor_train", "reference")
    ]
    for cluster in pair:
        cluster.initialize(config)
    return pair


def log_probs(cluster):
    return cluster.compute_log_probs(make_batch("dpo", seed=9)).batch["log_probs"]


def check_updates(train, infer, *, shared):
    before = log_probs(infer)
    updates = ModelUpdateGroup(train, infer, bucket_megabytes=1)
    assert updates.is_shared == shared
    sums = []
    for step in range(2):
        train.train_step(make_batch("dpo", seed=step))
        metrics = updates.model_update(step)
        sums.append(metrics["system/weight_checksum"])
        assert torch.equal(log_probs(infer), log_probs(train))
    assert sums[0] != sums[1]
    assert not torch.allclose(log_probs(infer), before)


def test_roles_of_one_process_share_their_weights(tmp_path):
    train, infer = clusters(make_model_folder(tmp_path), backend="local")
    check_updates(train, infer, shared=True)
    pointers = [next(c.workers[0].strategy.model.parameters()).data_ptr() for c in (train, infer)]
    assert pointers[0] == pointers[1]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("hf_train", {"model_args": {"lora_target": "q_proj,o_proj", "lora_rank": 4}}),
        ("fsdp2_train", {}),
    ],
)
def test_weights_are_broadcast_in_buckets_between_processes(tmp_path, strategy, options):
    workers = 2 if strategy == "fsdp2_train" else 1
    train, infer = clusters(
        make_model_folder(tmp_path), backend="ray", strategy=strategy, workers=workers, **options
    )
    with train, infer:
        if options:
            # A reference without adapter: what arrives are the merged weights, which round differently.
            updates = ModelUpdateGroup(train, infer, bucket_megabytes=1)
            train.train_step(make_batch("dpo"))
            updates.model_update(0)
            torch.testing.assert_close(log_probs(infer), log_probs(train), rtol=1e-4, atol=1e-5)
        else:
            check_updates(train, infer, shared=False)


def test_a_bucket_holds_one_dtype_and_at_most_its_size():
    half, full = torch.bfloat16, torch.float32
    specs = [TensorSpec("a", (4,), full), TensorSpec("b", (4,), full), TensorSpec("c", (4,), half)]
    specs.append(TensorSpec("large", (100,), half))
    plan = plan_sync(specs, 32)
    assert [[spec.name for spec in bucket] for bucket in plan.buckets] == [
        ["a", "b"],
        ["c"],
        ["large"],
    ]
    assert plan.sampled_names == {"a", "b", "c", "large"}


def test_the_sample_is_spread_over_the_model():
    plan = plan_sync([TensorSpec(str(i), (1,), torch.float32) for i in range(100)], 1000)
    assert len(plan.sampled_names) == 8
    assert {"0", "99"} <= plan.sampled_names


def test_checksums_see_every_byte_and_the_order():
    tensor = torch.arange(10.0)
    assert checksum(tensor) == checksum(tensor.clone())
    changed = tensor.clone()
    changed[7] = torch.nextafter(changed[7], torch.tensor(100.0))
    assert checksum(changed) != checksum(tensor)
    assert checksum(tensor.flip(0)) != checksum(tensor)
    assert checksum(tensor.bfloat16()) != checksum(tensor)


def test_a_rank_with_other_weights_stops_the_run():
    compare_checksums({"a": 1, "b": 2}, [{"a": 1, "b": 2}])
    with pytest.raises(RuntimeError, match=r"rank 1 .* differing tensors: b\..*stale"):
        compare_checksums({"a": 1, "b": 2}, [{"a": 1, "b": 2}, {"a": 1, "b": 3}])
