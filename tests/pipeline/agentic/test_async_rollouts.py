"""Episodes in a thread, against a policy that can be interrupted. Tests wait for what happens, not for a time."""

import threading
from types import SimpleNamespace

import pytest
from agentic_setup import env_config, scheduler_of, tiny_pipeline_config

from roll.engines.request import GenerationOutput
from roll.exceptions import ConfigError
from roll.models.tiny import character_tokenizer
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
from roll.pipeline.agentic.async_rollouts import AsyncRollouts
from roll.pipeline.agentic.llm_proxy import PolicyProxy

TOKENIZER = character_tokenizer()
LONG = 120.0  # seconds, of waits that end at once unless something is broken


class Policy:
    """Answers `aaa`. Its first call stops after `hold_after` tokens, if that is given, until it is aborted."""

    backend_name = "ray"

    def __init__(self, hold_after=None, next_version=None, fail=False):
        self.version, self.next_version, self.hold_after, self.fail = (
            0,
            next_version,
            hold_after,
            fail,
        )
        self.holds, self.aborted = threading.Event(), threading.Event()
        self.busy = False

    def generate_requests(self, requests):
        if self.fail:
            raise RuntimeError("out of memory")
        self.busy = True
        lengths, reason = [3 - len(request.prefix_ids) for request in requests], "stop"
        if self.hold_after is not None:
            lengths, reason, self.hold_after = [self.hold_after] * len(requests), "abort", None
            self.holds.set()
            assert self.aborted.wait(LONG)
        (letter,) = TOKENIZER("a")["input_ids"]
        outputs = [
            GenerationOutput(
                request.request_id, 0, [letter] * length, [-0.1] * length, reason, self.version
            )
            for request, length in zip(requests, lengths, strict=True)
        ]
        self.version = self.version if self.next_version is None else self.next_version
        self.busy = False
        return outputs

    def abort_requests(self, request_ids=None):
        self.aborted.set()


def scheduler_with(policy, turns=3):
    env = {"env_type": "bad_envs:GoodEnv", "env_config": {"turns": turns}, "max_steps": 5}
    return scheduler_of(
        env_config({"Good": env}), PolicyProxy(actor_infer=policy, tokenizer=TOKENIZER, options={})
    )


def started(scheduler, **options):
    defaults = {
        "num_trajectories": 4,
        "ratio": 1,
        "max_staleness": 1,
        "first_step": 0,
        "last_step": 5,
    }
    return AsyncRollouts(scheduler, **{**defaults, **options})


def answers_of(rollout):
    return [turn for trajectory in rollout.trajectories for turn in trajectory.turns]


def test_steps_come_in_order_and_not_too_far_ahead(monkeypatch):
    policy = Policy()
    with scheduler_with(policy) as scheduler:
        rollouts, played, groups = started(scheduler), [], []
        play = scheduler.rollout

        def watched(step, *args, **options):
            assert step <= rollouts._current + 1, "the ratio is 1"
            played.append(step)
            return play(step, *args, **options)

        monkeypatch.setattr(scheduler, "rollout", watched)
        for step in range(3):
            with rollouts.paused(step):
                assert not policy.busy
                policy.version = step
            rollout = rollouts.take(step)
            assert (
                rollout.metrics["rollout/staleness/max"] <= 1
                and rollout.metrics["rollout/dropped/stale"] == 0
            )
            assert all(
                turn.response_ids == TOKENIZER("aaa")["input_ids"] for turn in answers_of(rollout)
            )
            groups += [item.traj_group_id for item in rollout.trajectories]
        with rollouts._changed:
            assert rollouts._changed.wait_for(lambda: 3 in rollouts._ready, LONG)
        rollouts.close()
    assert played == [0, 1, 2, 3] and set(rollouts._ready) == {3}
    assert len(groups) == 12 and len(set(groups)) == 6
    assert not [
        thread for thread in threading.enumerate() if thread.name == "roll-agentic-rollouts"
    ]


def test_an_answer_goes_on_with_the_new_weights_and_is_of_both_policies():
    policy = Policy(hold_after=2)
    with scheduler_with(policy, turns=1) as scheduler:
        rollouts = started(scheduler, last_step=2)
        with rollouts.paused(0):
            pass
        assert policy.holds.wait(LONG)
        with rollouts.paused(1):
            assert not policy.busy
            policy.version = 1
        first, second = rollouts.take(0), rollouts.take(1)
        rollouts.close()
    assert [(turn.policy_version, turn.newest_version) for turn in answers_of(first)] == [
        (0, 1)
    ] * 4
    assert all(turn.response_ids == TOKENIZER("aaa")["input_ids"] for turn in answers_of(first))
    assert first.metrics["rollout/mixed_version_samples"] == 4
    expected = {
        "rollout/dropped/stale": 0, "rollout/staleness/mean": 0, "rollout/staleness/max": 0,
        "scheduler/off_policy_ratio": 0, "rollout/mixed_version_samples": 0,
    }  # fmt: skip
    assert (
        expected.items() <= second.metrics.items() and second.metrics["rollout/wait_seconds"] >= 0
    )


def test_a_part_without_a_token_does_not_make_an_answer_older():
    policy = Policy(hold_after=0)
    with scheduler_with(policy, turns=1) as scheduler:
        rollouts = started(scheduler, last_step=1)
        with rollouts.paused(0):
            pass
        assert policy.holds.wait(LONG)
        with rollouts.paused(1):
            policy.version = 1
        assert [item.versions for item in rollouts.take(0).trajectories] == [{1}] * 4
        rollouts.close()


def test_episodes_that_are_too_old_are_dropped_and_replaced():
    policy = Policy(next_version=5)  # the first answers come from weights five steps behind
    with scheduler_with(policy) as scheduler:
        rollouts = started(scheduler, first_step=5, last_step=6)
        with rollouts.paused(5):
            pass
        rollout = rollouts.take(5)
        rollouts.close()
    assert len(rollout.stale) == rollout.metrics["rollout/dropped/stale"] == 4
    assert {0} < rollout.stale[0].versions and rollout.metrics["scheduler/group_filter_count"] == 0
    assert [item.versions for item in rollout.trajectories] == [{5}] * 4, (
        "each group was played again"
    )
    assert {item.traj_group_id for item in rollout.trajectories}.isdisjoint(
        it.traj_group_id for it in rollout.stale
    )
    assert rollout.metrics["rollout/staleness/max"] == 0
    dropped = AgenticPipeline._dropped(SimpleNamespace(tokenizer=TOKENIZER), rollout)
    assert [sample.reason for sample in dropped] == ["stale"] * 4


def test_an_episode_within_the_bound_is_kept():
    with scheduler_with(Policy(next_version=5)) as scheduler:
        assert scheduler.rollout(5, 4, max_staleness=5).stale == []
        assert scheduler.rollout(99, 4).stale == [], "synchronous runs have no bound"


def test_the_end_of_the_run():
    with scheduler_with(Policy()) as scheduler:
        rollouts = started(scheduler, last_step=1)
        with rollouts.paused(0):
            pass
        assert len(rollouts.take(0).trajectories) == 4
        rollouts._thread.join()
        with rollouts.paused(1):  # the last validation
            pass
        rollouts.close()


def test_a_failure_reaches_the_trainer():
    with scheduler_with(Policy(fail=True)) as scheduler:
        rollouts = started(scheduler)
        with rollouts.paused(0):
            pass
        with pytest.raises(RuntimeError, match="out of memory"):
            rollouts.take(0)
        rollouts.close()


def test_closing_while_the_policy_answers():
    policy = Policy(hold_after=1)
    with scheduler_with(policy) as scheduler:
        rollouts = started(scheduler)
        with rollouts.paused(0):
            pass
        assert policy.holds.wait(LONG)
        rollouts.close()
        rollouts.close()


def test_it_takes_ray():
    config = env_config({"Good": "GoodEnv"}, async_generation_ratio=1)
    assert config.execution_backend == "ray" and config.enable_old_logprobs_recompute
    with pytest.raises(ConfigError, match='backend: found "local"'):
        env_config({"Good": "GoodEnv"}, async_generation_ratio=1, backend="local")
    with pytest.raises(ConfigError, match="expected policy"):
        env_config(
            {"Good": "GoodEnv"},
            async_generation_ratio=1,
            manager={"llm_proxy": {"proxy_type": "random"}},
        )


@pytest.mark.ray
@pytest.mark.parametrize("ratio", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_on_ray(tmp_path, ratio):
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
        for line in lines[:3]:
            assert line["rollout/staleness/max"] <= 1 and line["rollout/dropped/stale"] == 0
            assert (
                0 <= line["scheduler/off_policy_ratio"] <= 1 and line["rollout/wait_seconds"] >= 0
            )
            assert "critic/entropy/mean" not in line, "old log-probabilities are the sampler's"
