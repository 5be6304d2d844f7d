"""New weights reach the other role, and both sides can prove it."""

import pytest
import torch
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.weight_sync import ModelUpdateGroup, TensorSpec, checksum, plan_sync


def clusters(folder, *, backend, workers=1, **options):
    training = {"learning_rate": 1e-2}
    config = make_config("dpo", folder, workers=workers, training_args=training, **options)
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
    strategies = [cluster.workers[0].strategy for cluster in (train, infer)]
    assert strategies[0].model is strategies[1].model
    assert strategies[1].policy_version == 1
    assert ModelUpdateGroup(train, infer, frequency=2).model_update(1) == {}


def test_roles_of_one_process_that_cannot_share_copy_and_compare(tmp_path, monkeypatch):
    train, infer = clusters(make_model_folder(tmp_path), backend="local")
    target = infer.workers[0].strategy
    monkeypatch.setattr(target, "share_model", lambda source: False)
    check_updates(train, infer, shared=False)
    # A target that does not take what is sent stops the run.
    updates = ModelUpdateGroup(train, infer)
    monkeypatch.setattr(target, "update_weights", lambda weights: None)
    train.train_step(make_batch("dpo", seed=5))
    with pytest.raises(RuntimeError, match=r"rank 0 .* differing tensors: .*embed_tokens.*stale"):
        updates.model_update(0)


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
            # A reference without adapter gets the merged weights, which round differently.
            updates = ModelUpdateGroup(train, infer, bucket_megabytes=1)
            train.train_step(make_batch("dpo"))
            updates.model_update(0)
            torch.testing.assert_close(log_probs(infer), log_probs(train), rtol=1e-4, atol=1e-5)
        else:
            check_updates(train, infer, shared=False)


def test_buckets_and_the_sample_of_tensors():
    half, full = torch.bfloat16, torch.float32
    specs = [TensorSpec("a", (4,), full), TensorSpec("b", (4,), full), TensorSpec("c", (4,), half)]
    plan = plan_sync([*specs, TensorSpec("large", (100,), half)], 32)
    names = [[spec.name for spec in bucket] for bucket in plan.buckets]
    assert names == [["a", "b"], ["c"], ["large"]]
    assert plan.sampled_names == {"a", "b", "c", "large"}
    plan = plan_sync([TensorSpec(str(i), (1,), full) for i in range(100)], 1000)
    assert len(plan.sampled_names) == 8 and {"0", "99"} <= plan.sampled_names


@pytest.mark.parametrize("length", [10, 2**19])
def test_checksums_see_every_byte_and_the_order(length):
    tensor = torch.arange(float(length))
    assert checksum(tensor) == checksum(tensor.clone())
    changed = tensor.clone()
    changed[7] = torch.nextafter(changed[7], torch.tensor(100.0))
    for other in (changed, tensor.flip(0), tensor.bfloat16()):
        assert checksum(other) != checksum(tensor)
