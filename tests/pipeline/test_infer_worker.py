"""The worker that generates: requests split over workers, rows with log-probabilities, weights and
their version."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.weight_sync import ModelUpdateGroup
from roll.engines.request import GenerationRequest, SamplingParams
from roll.pipeline.base_worker import InferWorker, collect_outputs, dispatch_requests
from roll.pipeline.base_worker import InferWorker as InferWorkerOfRoll


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def infer_cluster(folder, *, backend="local", workers=1, dtype="fp32", **options):
    role = WorkerConfig(
        name="actor_infer",
        world_size=workers,
        model_args={"model_name_or_path": str(folder), "dtype": dtype},
        strategy_args={"strategy_name": "hf_infer", "strategy_config": options},
    )
    cluster = Cluster("actor_infer", InferWorker, ResourceManager(0, 1, backend=backend), role)
    cluster.initialize(make_config("dpo", folder, sequence_length=20))
    return cluster


def prompts(*, global_step=0, **generation_config):
    ids = torch.tensor([[0, 0, 30, 31], [40, 41, 42, 43], [0, 50, 51, 52]])
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "prompt_id": torch.tensor([7, 8, 9]),
        },
        meta_info={
            "generation_config": {"max_new_tokens": 8, **generation_config},
            "global_step": global_step,
        },
    )


def requests_of(count, *, max_new_tokens=8, num_samples=1):
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return [
        GenerationRequest(f"r{i}", tuple(range(10 + i, 13 + 2 * i)), params, num_samples)
        for i in range(count)
    ]


def test_its_path_in_roll_still_works():
    assert InferWorkerOfRoll is InferWorker


def test_rows_of_a_group_are_neighbours_and_carry_what_the_engine_said(folder):
    cluster = infer_cluster(folder)
    rows = cluster.generate(prompts(num_return_sequences=3))
    assert len(rows) == 9
    assert rows.batch["input_ids"].shape == (9, 20)
    assert rows.batch["prompt_id"].tolist() == [7, 7, 7, 8, 8, 8, 9, 9, 9]
    assert set(rows.non_tensor_batch["finish_reason"]) <= {"stop", "length"}
    assert rows.non_tensor_batch["policy_version"].tolist() == [0] * 9
    assert rows.non_tensor_batch["drop_reason"].tolist() == [None] * 9
    model = cluster.workers[0].strategy.model
    logits = model(
        rows.batch["input_ids"], attention_mask=rows.batch["attention_mask"]
    ).logits.materialize()
    expected = (
        logits[:, :-1].log_softmax(-1).gather(-1, rows.batch["input_ids"][:, 1:, None])[..., 0]
    )
    mask = rows.batch["response_mask"][:, 1:].bool()
    torch.testing.assert_close(
        rows.batch["infer_logprobs"][mask], expected[mask], rtol=0, atol=1e-5
    )
    assert (rows.batch["infer_logprobs"][~mask] == 0).all()
    assert rows.meta_info["metrics"]["actor_infer/generate/num_retried@sum"] == 0


def test_samples_depend_on_the_step_and_not_on_the_order_of_prompts(folder):
    cluster = infer_cluster(folder)
    first, again, later = (
        cluster.generate(prompts(global_step=step)).batch["responses"] for step in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    order = [2, 0, 1]
    shuffled = cluster.generate(prompts().select_idxs(order)).batch["responses"]
    assert torch.equal(shuffled, first[order])


def test_equal_prompts_without_ids_get_different_samples(folder):
    cluster = infer_cluster(folder)
    data = prompts(max_new_tokens=12)
    data.pop(batch_keys=["prompt_id"])
    twice = DataProto.concat([data, data])
    answers = cluster.generate(twice).batch["responses"].tolist()
    assert answers[:3] != answers[3:]


def test_a_prompt_that_cannot_be_answered_is_a_row_without_response(folder):
    cluster = infer_cluster(folder)
    data = prompts()
    data.batch["input_ids"][1, 1] = 1000
    rows = cluster.generate(data)
    assert rows.non_tensor_batch["finish_reason"][1] == "error"
    assert (
        rows.non_tensor_batch["drop_reason"][1] == "unknown token: id 1000, the vocabulary has 100"
    )
    assert rows.batch["response_mask"].sum(1).tolist()[1] == 0
    assert (rows.batch["response_mask"].sum(1) > 0).tolist() == [True, False, True]
    metrics = rows.meta_info["metrics"]
    assert metrics["actor_infer/generate/dropped/unknown token@sum"] == 1
    assert metrics["actor_infer/generate/num_retried@sum"] == 1


def test_requests_are_answered_in_order(folder):
    outputs = infer_cluster(folder).generate_requests(requests_of(3, num_samples=2))
    assert [(output.request_id, output.sample_index) for output in outputs] == [
        (f"r{request}", sample) for request in range(3) for sample in range(2)
    ]


class Grid:
    world_size = 3


def test_shares_are_contiguous_and_even():
    ((shares,), _) = dispatch_requests(Grid, list("abcdefgh"))
    assert shares == [list("abc"), list("def"), list("gh")]
    ((shares,), _) = dispatch_requests(Grid, ["a"])
    assert shares == [["a"], [], []]
    assert collect_outputs(Grid, [[1, 2], [], [3]]) == [1, 2, 3]


def test_a_model_of_another_precision_gets_a_copy_of_the_weights(folder):
    config = make_config("dpo", folder, training_args={"learning_rate": 1e-2})
    train = Cluster(
        "actor_train", PROBES["dpo"], ResourceManager(0, 1, backend="local"), config.actor_train
    )
    train.initialize(config)
    infer = infer_cluster(folder, dtype="bf16")
    updates = ModelUpdateGroup(train, infer)
    assert not updates.is_shared
    train.train_step(make_batch("dpo"))
    updates.model_update(3)
    ours = dict(infer.workers[0].strategy.model.named_parameters())
    for name, weight in train.workers[0].strategy.model.named_parameters():
        assert torch.equal(ours[name], weight.to(torch.bfloat16)), name
    assert infer.generate_requests(requests_of(1))[0].policy_version == 3


def test_shared_weights_are_seen_at_once_and_outputs_name_their_version(folder):
    config = make_config("dpo", folder, training_args={"learning_rate": 1e-2})
    train = Cluster(
        "actor_train", PROBES["dpo"], ResourceManager(0, 1, backend="local"), config.actor_train
    )
    train.initialize(config)
    infer = infer_cluster(folder)
    updates = ModelUpdateGroup(train, infer)
    assert updates.is_shared
    updates.model_update(0)
    before = infer.generate_requests(requests_of(2))
    train.train_step(make_batch("dpo"))
    updates.model_update(1)
    after = infer.generate_requests(requests_of(2))
    assert [output.policy_version for output in before + after] == [0, 0, 1, 1]
    assert [output.log_probs for output in before] != [output.log_probs for output in after]
    # The shared model still trains after it generated.
    assert train.workers[0].strategy.model.training == infer.workers[0].strategy.model.training
    train.train_step(make_batch("dpo", seed=1))


@pytest.mark.ray
def test_two_workers_on_ray_answer_as_one_does_and_can_be_aborted(folder):
    requests = requests_of(5, num_samples=2)
    alone = infer_cluster(folder).generate_requests(requests)
    with infer_cluster(folder, backend="ray", workers=2) as cluster:
        outputs = cluster.generate_requests(requests)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
        running = cluster.generate_requests(
            [
                GenerationRequest(
                    f"long{i}", (5, 6, 7), SamplingParams(max_new_tokens=500), num_samples=512
                )
                for i in range(2)
            ],
            blocking=False,
        )
        with ThreadPoolExecutor(1) as thread:
            gathered = thread.submit(cluster.gather, running, "generate_requests")
            while not wait([gathered], 0.02).done:  # the first may come before the requests do
                cluster.abort_requests()
        shares = gathered.result()
        reasons = [output.finish_reason for share in shares for output in share]
        assert len(reasons) == 1024
        assert "abort" in reasons
