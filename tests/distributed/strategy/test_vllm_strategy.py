"""vLLM itself, on this machine's CPU: log-probs, weights that arrive, and what every engine
owes."""

import importlib
import os
import sys
import threading

import pytest
import torch
from tiny_models import make_model_folder, tiny_model, tiny_tokenizer
from training_setup import PROBES, make_batch, make_config

from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.strategy.vllm_strategy import VllmStrategy, held_checksums
from roll.distributed.weight_sync import ModelUpdateGroup, checksum
from roll.engines.request import GenerationRequest, SamplingParams
from roll.exceptions import ConfigError, MissingDependencyError, WorkerError
from roll.pipeline.base_worker import InferWorker

TOKENIZER = tiny_tokenizer()


def infer_role(folder, *, strategy_config=None, **options):
    return WorkerConfig(
        name="actor_infer",
        model_args={"model_name_or_path": str(folder), "dtype": "fp32", **options},
        strategy_args={"strategy_name": "vllm", "strategy_config": strategy_config or {}},
    )


class Pair:
    """A role that trains and a role that generates with vLLM, and how to compare them."""

    def __init__(
        self, folder, *, backend="local", strategy="hf_train", sequence_length=64, **options
    ):
        self.config = make_config(
            "dpo",
            folder,
            training_args={"learning_rate": 1e-2},
            strategy=strategy,
            sequence_length=sequence_length,
        )
        resources = ResourceManager(0, 1, backend=backend)
        self.train = Cluster("actor_train", PROBES["dpo"], resources, self.config.actor_train)
        self.infer = Cluster("actor_infer", InferWorker, resources, infer_role(folder, **options))
        for cluster in (self.train, self.infer):
            cluster.initialize(self.config)
        self.updates = ModelUpdateGroup(self.train, self.infer, bucket_megabytes=1)

    def update(self, step):
        self.train.train_step(make_batch("dpo", seed=step))
        return self.updates.model_update(step)

    @property
    def strategy(self) -> VllmStrategy:
        return self.infer.workers[0].strategy

    @property
    def engine(self):
        return self.strategy.generation_engine

    def model(self):
        return self.train.workers[0].strategy.model


def requests_of(*lengths, num_samples=1, max_new_tokens=10, **sampling):
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return [
        GenerationRequest(
            f"r{index}",
            tuple(torch.randint(4, 99, (length,), generator=generator).tolist()),
            params,
            num_samples,
        )
        for index, length in enumerate(lengths)
    ]


def largest_gap(model, requests, outputs, temperature=1.0):
    request_named = {request.request_id: request for request in requests}
    gaps = []
    for output in outputs:
        request = request_named[output.request_id]
        given = [*request.prompt_ids, *request.prefix_ids]
        ids = torch.tensor([given + output.token_ids])
        logits = model(ids, use_cache=False).logits
        logits = logits if isinstance(logits, torch.Tensor) else logits.materialize()
        log_probs = (logits[0].detach().float() / temperature).log_softmax(-1)
        expected = [
            log_probs[len(given) - 1 + i, token].item() for i, token in enumerate(output.token_ids)
        ]
        gaps.append((torch.tensor(output.log_probs) - torch.tensor(expected)).abs().max().item())
    return max(gaps)


# -- without starting vLLM -------------------------------------------------------------------------


def test_a_missing_library_names_the_extra_and_the_nearest_strategy(tmp_path, monkeypatch):
    module = importlib.import_module("roll.distributed.strategy.vllm_strategy")
    monkeypatch.setitem(sys.modules, "vllm", None)
    module._import_vllm.cache_clear()
    resources = ResourceManager(0, 1, backend="local")
    config = make_config("dpo", make_model_folder(tmp_path))
    cluster = Cluster("actor_infer", InferWorker, resources, infer_role(tmp_path))
    with pytest.raises(WorkerError, match=r"\[vllm\].*hf_infer") as caught:
        cluster.initialize(config)
    assert isinstance(caught.value.__cause__, MissingDependencyError)
    module._import_vllm.cache_clear()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("strategy_config", "model", "message"),
    [
        (
            {"max_modle_len": 3},
            {},
            r'config.max_modle_len: vLLM has no such engine argument; did you mean "max_mod',
        ),
        ({"tensor_parallel_size": 2}, {}, "runs on one device"),
        ({}, {"head_dim": 24}, r"no attention for heads of size 24 .*it has 32, 64.*hf_infer"),
    ],
)
def test_what_vllm_cannot_do_is_named_before_it_starts(tmp_path, strategy_config, model, message):
    folder = make_model_folder(tmp_path, **model)
    role = infer_role(folder, strategy_config=strategy_config)
    cluster = Cluster("actor_infer", InferWorker, ResourceManager(0, 1, backend="local"), role)
    with pytest.raises(WorkerError, match=message) as caught:
        cluster.initialize(make_config("dpo", folder))
    assert isinstance(caught.value.__cause__, ConfigError)


# -- one engine in this process for all of these; the order matters nowhere ------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    # vLLM and what it imports set all of these, and child processes would inherit them.
    inherited = (
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LOCAL_WORLD_SIZE",
        "NUMEXPR_MAX_THREADS",
        "OMP_NUM_THREADS",
    )
    before = {name: os.environ.get(name) for name in inherited}
    threads = torch.set_num_threads
    folder = make_model_folder(tmp_path_factory.mktemp("tied"))
    pair = Pair(folder, strategy_config={"gpu_memory_utilization": 0.5, "block_size": 32})
    # Starting vLLM leaves the process as it was.
    assert {name: os.environ.get(name) for name in inherited} == before
    assert torch.set_num_threads is threads
    return pair


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_trainer(pair, temperature):
    pair.updates.model_update(0)
    requests = requests_of(4, 9, 1, num_samples=3, temperature=temperature)
    outputs = pair.engine.generate(requests)
    assert [(output.request_id, output.sample_index) for output in outputs] == [
        (f"r{request}", sample) for request in range(3) for sample in range(3)
    ]
    assert largest_gap(pair.model(), requests, outputs, temperature) < 1e-4
    assert len({tuple(output.token_ids) for output in outputs}) == 9


@pytest.mark.vllm
def test_truncated_distributions_are_normalised(pair):
    requests = requests_of(4, top_k=1)
    (output,) = pair.engine.generate(requests)
    assert output.log_probs == [0.0] * len(output.token_ids)


@pytest.mark.vllm
def test_a_sample_depends_on_seed_and_key_only(pair):
    requests = requests_of(4, 7, 5, num_samples=2)
    together = pair.engine.generate(requests)
    alone = [output for request in reversed(requests) for output in pair.engine.generate([request])]
    by_name = {(output.request_id, output.sample_index): output.token_ids for output in alone}
    assert all(
        output.token_ids == by_name[output.request_id, output.sample_index] for output in together
    )
    other = pair.engine.generate(requests_of(4, 7, 5, num_samples=2, seed=1))
    assert [output.token_ids for output in other] != [output.token_ids for output in together]


@pytest.mark.vllm
def test_new_weights_arrive_and_are_verified(pair):
    requests = requests_of(4, 9, temperature=0.0)
    pair.updates.model_update(0)
    before = pair.engine.generate(requests)
    sums = []
    for step in (1, 2):
        sums.append(pair.update(step)["system/weight_checksum"])
        after = pair.engine.generate(requests)
        # The tiny model ties its head to its embedding, which vLLM alone would not notice.
        assert largest_gap(pair.model(), requests, after) < 1e-4
        assert {output.policy_version for output in after} == {step}
    assert sums[0] != sums[1]
    assert [output.log_probs for output in after] != [output.log_probs for output in before]


@pytest.mark.vllm
def test_weights_that_vllm_does_not_use_are_noticed(pair):
    pair.updates.model_update(0)
    delivered = dict(pair.model().named_parameters())
    expected = pair.train.workers[0].strategy.weight_checksums(set(delivered))

    def held(weights):
        return pair.engine.on_model(
            lambda worker: held_checksums(worker.model_runner.get_model(), weights)
        )

    assert held({name: weight.detach() for name, weight in delivered.items()}) == expected
    for name, weight in delivered.items():
        changed = weight.detach().clone()
        changed.view(-1)[3] += 1.0
        assert held({name: changed})[name] != checksum(changed), name


@pytest.mark.vllm
def test_a_tied_head_that_was_not_repacked_stops_the_update(pair, monkeypatch):
    module = importlib.import_module("roll.distributed.strategy.vllm_strategy")
    monkeypatch.setattr(
        module, "_reload", lambda worker, weights: worker.reload_weights(weights_iterator=weights)
    )
    with pytest.raises(
        RuntimeError, match=r"does not hold the weights that were sent.*embed_tokens"
    ):
        pair.update(1)
    monkeypatch.undo()
    pair.updates.model_update(0)


@pytest.mark.vllm
def test_the_prefix_cache_forgets_old_weights(pair, monkeypatch):
    requests = requests_of(40, temperature=0.0, max_new_tokens=8)  # more than a block of 32 tokens
    pair.engine.generate(requests)
    pair.update(3)
    outputs = pair.engine.generate(requests)
    assert largest_gap(pair.model(), requests, outputs) < 1e-4
    # Without the reset, the prompt's keys and values are those of the old weights: the test can
    # fail.
    monkeypatch.setattr(pair.engine, "reset_prefix_cache", lambda: None)
    pair.update(4)
    assert largest_gap(pair.model(), requests, pair.engine.generate(requests)) > 1e-3
    monkeypatch.undo()
    pair.updates.model_update(4)


@pytest.mark.vllm
def test_ends_and_stop_strings_are_those_of_every_engine(pair):
    pair.updates.model_update(0)
    requests = requests_of(5, max_new_tokens=20, stop_token_ids=())
    (whole,) = pair.engine.generate(requests)
    text = TOKENIZER.decode(whole.token_ids)
    stop = text[4:7]
    end = text.find(stop) + 3
    for include in (True, False):
        stopped = requests_of(
            5, max_new_tokens=20, stop_strings=(stop,), include_stop_str_in_output=include
        )
        (output,) = pair.engine.generate(stopped)
        assert TOKENIZER.decode(output.token_ids) == text[: end if include else end - 3]
        assert output.finish_reason == "stop"
        assert len(output.log_probs) == len(output.token_ids)
    (output,) = pair.engine.generate(
        requests_of(5, max_new_tokens=20, stop_token_ids=(whole.token_ids[2],))
    )
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]
    (output,) = pair.engine.generate(requests_of(5, max_new_tokens=1))
    assert (output.token_ids, output.finish_reason) == (whole.token_ids[:1], "length")


@pytest.mark.vllm
def test_aborted_requests_return_what_they_have_and_go_on(pair):
    requests = requests_of(4, 6, 5, max_new_tokens=40, stop_token_ids=())
    whole = {output.request_id: output for output in pair.engine.generate(requests)}
    steps, step = 0, pair.engine.llm.step

    def counting():
        nonlocal steps
        steps += 1
        if steps == 5:
            thread = threading.Thread(target=pair.engine.abort, args=(["r1"],))
            thread.start()
            thread.join()
        return step()

    pair.engine.llm.step = counting
    try:
        outputs = {output.request_id: output for output in pair.engine.generate(requests)}
    finally:
        del pair.engine.llm.step
    assert (
        outputs["r0"].token_ids == whole["r0"].token_ids
        and outputs["r2"].token_ids == whole["r2"].token_ids
    )
    part = outputs["r1"]
    assert part.finish_reason == "abort"
    assert 0 < len(part.token_ids) < 40
    assert part.token_ids == whole["r1"].token_ids[: len(part.token_ids)]
    rest = requests[1].resume(part)
    (output,) = pair.engine.generate([rest])
    assert len(part.token_ids) + len(output.token_ids) <= 40
    assert largest_gap(pair.model(), [rest], [output]) < 1e-4
    assert pair.engine.llm.get_num_unfinished_requests() == 0


@pytest.mark.vllm
def test_workers_generate_rows_with_their_log_probs(pair):
    pair.updates.model_update(4)
    prompts = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 30, 31], [40, 41, 42]]),
            "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        },
        meta_info={
            "generation_config": {"max_new_tokens": 6, "num_return_sequences": 2},
            "global_step": 4,
        },
    )
    rows = pair.infer.generate(prompts)
    assert len(rows) == 4
    assert rows.non_tensor_batch["policy_version"].tolist() == [4] * 4
    mask = rows.batch["response_mask"][:, 1:].bool()
    logits = pair.model()(
        rows.batch["input_ids"], attention_mask=rows.batch["attention_mask"]
    ).logits
    logits = logits if isinstance(logits, torch.Tensor) else logits.materialize()
    expected = (
        logits.detach()[:, :-1]
        .log_softmax(-1)
        .gather(-1, rows.batch["input_ids"][:, 1:, None])[..., 0]
    )
    torch.testing.assert_close(
        rows.batch["infer_logprobs"][mask], expected[mask], rtol=0, atol=1e-4
    )
    assert (rows.batch["infer_logprobs"][~mask] == 0).all()


@pytest.mark.vllm
def test_vllm_has_no_forward_passes(pair):
    with pytest.raises(RuntimeError, match="computes no log-probs"):
        pair.strategy.forward_step(make_batch("dpo"), lambda data, output: (output, {}))


# -- other models and places -----------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
def test_vllm_in_an_actor_of_its_own_gets_its_weights_by_broadcast(tmp_path, strategy):
    # An untied head, random until the first update.
    folder = make_model_folder(tmp_path, "llama", tied=False)
    pair = Pair(folder, backend="ray", strategy=strategy, strategy_config={"load_format": "dummy"})
    requests = requests_of(4, 9, 5, temperature=0.0)
    with pair.train, pair.infer:
        with pytest.raises(WorkerError, match="load_format dummy"):
            pair.infer.generate_requests(requests)
        pair.updates.model_update(0)
        first = pair.infer.generate_requests(requests)
        assert largest_gap(tiny_model("llama", tied=False), requests, first) < 1e-4
        metrics = pair.update(1)
        second = pair.infer.generate_requests(requests)
        assert {output.policy_version for output in second} == {1}
        assert [output.log_probs for output in second] != [output.log_probs for output in first]
        assert metrics["system/weight_checksum"] > 0
        # Abort gets through while the worker generates.
        running = pair.infer.generate_requests(requests_of(4, 5, max_new_tokens=55), blocking=False)
        pair.infer.abort_requests()
        outputs = [
            output for share in pair.infer.gather(running, "generate_requests") for output in share
        ]
        assert len(outputs) == 2
        assert {output.finish_reason for output in outputs} <= {"abort", "length", "stop"}
