"""Episodes in a thread, against a policy that takes its time and can be interrupted."""

import threading

import pytest
from agentic_setup import env_config, scheduler_of, tiny_pipeline_config
from process_checks import eventually

from roll.engines.request import GenerationOutput
from roll.exceptions import ConfigError
from roll.models.tiny import character_tokenizer
from roll.pipeline.agentic.async_rollouts import AsyncRollouts
from roll.pipeline.agentic.llm_proxy import PolicyProxy

TOKENIZER = character_tokenizer()


class SlowPolicy:
    """Answers `aaa` with a token every few milliseconds; an abort returns what there is."""

    backend_name = "ray"

    def __init__(self, fail=False):
        self.version, self.fail = 0, fail
        self.aborted = threading.Event()
        self.busy = False
        self.versions = []

    def generate_requests(self, requests):
        if self.fail:
            raise RuntimeError("out of memory")
        self.aborted.clear()
        self.busy = True
        tokens = {request.request_id: [] for request in requests}
        (letter,) = TOKENIZER("a")["input_ids"]
        reason = "stop"
        for _ in range(3 - min(len(request.prefix_ids) for request in requests)):
            if self.aborted.wait(0.01):
                reason = "abort"
                break
            for ids in tokens.values():
                ids.append(letter)
        self.busy = False
        self.versions.append(self.version)
        return [GenerationOutput(name, 0, ids, [-0.1] * len(ids), reason, self.version) for name, ids in tokens.items()]

    def abort_requests(self, request_ids=None):
        self.aborted.set()


def started(scheduler, **options):
    return AsyncRollouts(scheduler, **{"num_trajectories": 4, "ratio": 1, "first_step": 0, "last_step": 5, **options})


def test_steps_come_in_order_and_not_too_far_ahead():
    policy = SlowPolicy()
    proxy = PolicyProxy(actor_infer=policy, tokenizer=TOKENIZER, options={})
    with scheduler_of(env_config({"Good": "GoodEnv"}), proxy) as scheduler:
        rollouts = started(scheduler)
        groups = []
        for step in range(3):
            with rollouts.paused(step):
                assert not policy.busy
                policy.version = step
            rollout = rollouts.take(step)
            assert rollout.metrics["rollout/staleness/max"] <= 2
            assert all(set(turn.response_ids) == set(TOKENIZER("a")["input_ids"]) for item in rollout.trajectories
                       for turn in item.turns)  # fmt: skip
            assert all(len(turn.response_ids) == 3 for item in rollout.trajectories for turn in item.turns)
            groups += [item.traj_group_id for item in rollout.trajectories]
        assert eventually(lambda: 3 in rollouts._ready)
        assert set(rollouts._ready) == {3}  # step 2 is trained now, and the ratio is 1
        rollouts.close()
    assert len(groups) == 12 and len(set(groups)) == 6
    assert not [thread for thread in threading.enumerate() if thread.name == "roll-agentic-rollouts"]


def test_the_end_of_the_run():
    proxy = PolicyProxy(actor_infer=SlowPolicy(), tokenizer=TOKENIZER, options={})
    with scheduler_of(env_config({"Good": "GoodEnv"}), proxy) as scheduler:
        rollouts = started(scheduler, last_step=1)
        with rollouts.paused(0):
            pass
        assert len(rollouts.take(0).trajectories) == 4
        rollouts._thread.join()
        with rollouts.paused(1):  # the last validation
            pass
        rollouts.close()


def test_a_failure_reaches_the_trainer():
    proxy = PolicyProxy(actor_infer=SlowPolicy(fail=True), tokenizer=TOKENIZER, options={})
    with scheduler_of(env_config({"Good": "GoodEnv"}), proxy) as scheduler:
        rollouts = started(scheduler)
        with rollouts.paused(0):
            pass
        with pytest.raises(RuntimeError, match="out of memory"):
            rollouts.take(0)
        rollouts.close()


def test_closing_while_the_policy_answers():
    policy = SlowPolicy()
    proxy = PolicyProxy(actor_infer=policy, tokenizer=TOKENIZER, options={})
    with scheduler_of(env_config({"Good": "GoodEnv"}), proxy) as scheduler:
        rollouts = started(scheduler)
        with rollouts.paused(0):
            pass
        assert eventually(lambda: policy.busy)
        rollouts.close()
        rollouts.close()


def test_it_takes_ray():
    config = env_config({"Good": "GoodEnv"}, async_generation_ratio=1)
    assert config.execution_backend == "ray" and config.enable_old_logprobs_recompute
    with pytest.raises(ConfigError, match='backend: found "local"'):
        env_config({"Good": "GoodEnv"}, async_generation_ratio=1, backend="local")
    with pytest.raises(ConfigError, match="expected policy"):
        env_config({"Good": "GoodEnv"}, async_generation_ratio=1, manager={"llm_proxy": {"proxy_type": "random"}})


@pytest.mark.ray
@pytest.mark.parametrize("ratio", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_on_ray(tmp_path, ratio):
    from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
    from roll.utils.tracking import read_metrics

    val = {"num_env_groups": 2, "tags": ["Good"]}
    config = tiny_pipeline_config(
        tmp_path, {"Good": "GoodEnv"}, async_generation_ratio=ratio, backend="ray", max_steps=3, adv_estimator="gigpo",
        eval_steps=2, val_env_manager=val, val_batch_size=2,
    )  # fmt: skip
    with AgenticPipeline(config, progress=False) as pipeline:
        pipeline.run()
    lines = read_metrics(pipeline.run_dir / "metrics.jsonl")
    assert pipeline.global_step == 3 and "val/success" in lines[2]
    if ratio:
        assert all(line["rollout/staleness/max"] <= 2 for line in lines[:3])
