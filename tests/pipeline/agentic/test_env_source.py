"""Many environments at once, with a policy that answers by rule; then the same beside training."""

import threading
from types import SimpleNamespace

import psutil
import pytest
from agentic_setup import STEP, EchoProxy, env_config, source_of

from roll.engines.request import GenerationOutput
from roll.exceptions import ConfigError
from roll.models.tiny import character_tokenizer
from roll.pipeline.agentic.env_source import MAX_REPLACEMENTS, Episode, GroupQueue, derive_seed
from roll.pipeline.agentic.llm_proxy import PolicyProxy
from roll.rollout.collate import collate
from roll.rollout.types import Trajectory

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TOKENIZER = character_tokenizer()
GOOD = {"Good": "GoodEnv"}


# -- which episodes make up a batch ----------------------------------------------------------------


def episode(envs=(0, 1, 2)):
    return Episode(0, "Tag", 5, 77, envs)


def trajectory(env_id):
    return Trajectory(f"t{env_id}", "g", "Tag", env_id, 0, [])


def members(queue):
    return [item.env_id for group in queue.groups for item in group.trajectories]


def test_a_group_is_complete_with_its_first_members():
    queue = GroupQueue([episode()], group_size=2)
    taken = [queue.next_episode(env_id) for env_id in (0, 1, 2)]
    assert taken[0] is taken[1] is taken[2] and queue.next_episode(0) is None
    queue.put(taken[0], 2, trajectory(2))
    assert not queue.is_done
    queue.put(taken[0], 0, trajectory(0))
    assert queue.is_done
    queue.put(taken[0], 1, trajectory(1))  # too late, not counted
    assert members(queue) == [0, 2]


def test_failing_members_make_a_group_smaller_never_late():
    queue = GroupQueue([episode(envs=(0, 1))], group_size=2)
    played = queue.next_episode(0)
    queue.put(played, 0, None)
    assert not queue.is_done
    queue.put(played, 1, trajectory(1))
    assert queue.is_done and queue.num_short == 1 and members(queue) == [1]
    queue = GroupQueue([episode(envs=(0,))], group_size=1)
    queue.put(queue.next_episode(0), 0, None)
    assert queue.is_done and queue.num_empty == 1 and queue.groups == []


@pytest.mark.parametrize("reason", ["group filter", "stale"])
def test_a_dropped_group_is_replaced_a_limited_number_of_times(reason):
    queue = GroupQueue([episode(envs=(0,))], group_size=1, drop=lambda *_: reason)
    ids = []
    while (played := queue.next_episode(0)) is not None:
        ids.append((played.traj_group_id, played.seed))
        queue.put(played, 0, trajectory(0))
    assert queue.is_done and len(ids) == 1 + MAX_REPLACEMENTS == len(set(ids))
    assert queue.num_filtered == (len(ids) if reason == "group filter" else 0)
    assert [item.reason for item in queue.dropped] == [reason] * len(ids)
    assert ids[0][0] == "Tag_0_5_77" and ids[1][0] == "Tag_0_5r1_77"


def test_seeds_depend_on_every_part():
    seeds = [derive_seed(*parts, "A", 0) for parts in ((1, "train"), (2, "train"), (1, "val"))]
    assert len(set(seeds)) == 3 and max(seeds) < 2**31
    assert derive_seed(1, "train", "A", 0) == seeds[0]


# -- playing ---------------------------------------------------------------------------------------


def play(config=None, proxy=None, *, step=0, num=4, mode="train", group_filter=None):
    with source_of(config or env_config(GOOD), proxy, mode) as source:
        if group_filter is not None:
            source.group_filter = SimpleNamespace(filter=group_filter)
        return source.rollout(step, num)


def test_groups_are_complete_and_in_order():
    rollout = play()
    first, second, third, fourth = rollout.trajectories
    places = [(item.group_id, item.env_id) for item in (first, second, third, fourth)]
    assert places == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [group.name for group in rollout.groups] == [first.traj_group_id, third.traj_group_id]
    assert first.traj_group_id == second.traj_group_id != third.traj_group_id
    assert len({item.traj_id for item in rollout.trajectories}) == 4
    assert first.score == 3.0
    assert first.metrics == {"success": 1.0, "action_is_valid": 1.0, "num_actions": 3.0}
    assert rollout.metrics["env/Good/success"] == 1.0 and rollout.metrics["scheduler/turns"] == 12
    assert rollout.metrics["rollout/template_drift"] == 0.0


def test_all_ready_environments_are_answered_at_once():
    proxy = EchoProxy(TOKENIZER)
    play(proxy=proxy)
    assert [len(asked) for asked in proxy.asked] == [4, 4, 4]
    conversation = proxy.asked[2][0].messages
    assert [message["role"] for message in conversation] == ["user", "assistant"] * 2 + ["user"]
    assert conversation[0]["content"].startswith("say a\nstart ")
    assert conversation[1]["content"] == "a"
    # Token ids of a turn continue those of the turn before.
    before, after = proxy.asked[0][0].request.prompt_ids, proxy.asked[1][0].request.prompt_ids
    assert after[: len(before)] == before


def test_seeds_come_from_the_config_alone():
    def first_observations(step, mode="train", **options):
        proxy = EchoProxy(TOKENIZER)
        play(env_config(GOOD, **options), proxy, step=step, mode=mode)
        return [turn.messages[0]["content"] for turn in proxy.asked[0]]

    texts = first_observations(0)
    assert texts == first_observations(0)
    assert texts[0] == texts[1] != texts[2]  # a group starts from one seed
    assert not set(texts) & set(first_observations(1))
    assert not set(texts) & set(first_observations(0, seed=43))
    # Validation plays the same episodes every time, and others than training.
    assert first_observations(0, "val") == first_observations(5, "val")
    assert not set(texts) & set(first_observations(0, "val"))


def test_more_trajectories_than_environments():
    with source_of(env_config(GOOD, rollout_batch_size=12)) as source:
        rollout, others = source.collect(0), source.collect(1)
    groups = [item.traj_group_id for item in rollout.trajectories]
    assert len(groups) == 12 and len(set(groups)) == 6
    assert [groups[i] == groups[i + 1] for i in (0, 2, 4)] == [True] * 3
    assert not set(groups) & {item.traj_group_id for item in others.trajectories}


BAD = {
    "Raising": ("RaisingEnv", "exception"),
    "Hanging": ("HangingEnv", "timeout"),
    "NaN": ("NaNEnv", "nan_reward"),
    "NoneReset": ("NoneEnv", "no_observation"),
    "NoneStep": ("NoneStepEnv", "no_observation"),
    "Stubborn": ("StubbornEnv", "killed"),
    "Crashing": ("CrashingEnv", "killed"),
}


@pytest.mark.slow
def test_bad_environments_are_counted_and_never_block_the_others():
    envs = {tag: name for tag, (name, _) in BAD.items()} | {**GOOD, "Once": "EndsAtOnceEnv"}
    manager = {"num_env_groups": 9, "group_size": 2, "env_timeout": 0.5, "env_retries": 0}
    rollout = play(env_config(envs, manager=manager), num=18)
    assert [item.tag for item in rollout.trajectories] == ["Good"] * 2 + ["Once"] * 2
    for tag, (_, reason) in BAD.items():
        assert rollout.failures[tag, reason] == 2, (tag, rollout.failures)
        assert rollout.metrics[f"env/{tag}/failed/{reason}"] == 2.0
    assert rollout.metrics["scheduler/empty_groups"] == 7
    assert [len(item.turns) for item in rollout.trajectories] == [3, 3, 1, 1]


def test_an_episode_is_started_again():
    rollout = play(env_config({"Flaky": "SometimesRaisingEnv"}))
    failures = rollout.failures["Flaky", "exception"]
    assert len(rollout.trajectories) == 4 and failures > 0
    assert rollout.metrics["scheduler/env_restarts"] == failures


def test_spare_environments_are_not_waited_for():
    manager = {"num_env_groups": 1, "group_size": 2, "group_size_redundancy": 1}
    with source_of(env_config(GOOD, manager=manager, rollout_batch_size=2)) as source:
        assert [len(source.collect(step).trajectories) for step in (0, 1)] == [2, 2]


def test_a_filter_drops_groups_and_others_take_their_place():
    seen = []

    def drop(group_id, episode_id, group):
        seen.append([rows["traj_group_id"][0] for rows in group])
        return len(seen) == 1

    rollout = play(group_filter=drop)
    assert len(rollout.trajectories) == 4 and len(rollout.dropped) == 2 and len(seen) == 3
    assert rollout.metrics["scheduler/group_filter_count"] == 1
    kept = {item.traj_group_id for item in rollout.trajectories}
    assert kept.isdisjoint(item.trajectory.traj_group_id for item in rollout.dropped)
    sample = rollout.dropped[0].sample(TOKENIZER)
    assert sample.reason == "group filter" and sample.score == 3.0 and "start" in sample.prompt
    assert play(group_filter=lambda *_: True).groups == [], "comes to an end"


def test_a_prompt_that_is_too_long_from_the_start():
    rollout = play(env_config({"Long": "LongEnv", **GOOD}), num=8)
    assert [item.tag for item in rollout.trajectories] == ["Good"] * 4
    assert rollout.failures["Long", "prompt_too_long"] == 4


def test_what_ends_an_episode_that_goes_on():
    endless = {"env_type": "bad_envs:GoodEnv", "env_config": {"turns": 50}}
    played = play(env_config({"Good": endless}, sequence_length=100)).trajectories[0]
    assert played.stop_reason == "max_length" and 1 <= len(played.turns) < 50
    batch = collate([played], 0)
    assert batch["input_ids"].shape[1] <= 100 and float(batch["scores"].sum()) == played.score > 0
    played = play(env_config({"Good": endless | {"max_steps": 2}})).trajectories[0]
    assert played.stop_reason == "max_steps" and len(played.turns) == 2


def test_a_policy_that_fails_costs_only_its_episode():
    def answer(turn):
        name = turn.request.request_id
        if "_0:" in name.split("_", 1)[1] + ":":
            return GenerationOutput(name, 0, [], [], "error", 0, error="memory: none left")
        return "a"

    rollout = play(proxy=EchoProxy(TOKENIZER, answer))
    assert 0 < len(rollout.trajectories) < 4
    assert rollout.failures["Good", "generation"] == 4 - len(rollout.trajectories)


def test_several_workers_and_slow_environments():
    manager = {
        "num_env_groups": 4, "group_size": 2, "max_env_num_per_worker": 3, "env_timeout": 20.0,
        "env_wait": 0.05,
    }  # fmt: skip
    with source_of(env_config({**GOOD, "Slow": "SlowEnv"}, manager=manager)) as source:
        assert source.env_cluster.world_size == 3
        rollout = source.rollout(0, 8)
    assert [item.tag for item in rollout.trajectories] == ["Good"] * 4 + ["Slow"] * 4


def test_step_managers_write_a_prompt_for_every_turn():
    template = {
        "env_type": "bad_envs:GoodEnv",
        "env_manager_cls": STEP,
        "agent_system_template": "{env_instruction}",
        "agent_template": "{history}|{current_observation}|{current_step}|{actions_left}|{unknown}",
        "history_length": 1,
        "max_steps": 5,
    }
    proxy = EchoProxy(TOKENIZER)
    played = play(env_config({"Good": template}), proxy).trajectories[0]
    third = proxy.asked[2][0].messages
    assert third[0] == {"role": "system", "content": "say a"}
    assert third[1]["content"] == "Step 2:\nturn 1\nAnswer: a|turn 2|3|3|{unknown}"
    assert played.prompts_are_whole and len(played.turns) == 3
    assert len({turn.state for turn in played.turns}) == 3


def test_environments_in_this_process():
    with source_of(env_config(GOOD, manager={"env_isolation": False})) as source:
        before = psutil.Process().children()
        assert len(source.rollout(0, 4).trajectories) == 4
        assert psutil.Process().children() == before


# -- beside training -------------------------------------------------------------------------------

LONG = 120.0  # seconds, of waits that end at once unless something is broken


class Policy:
    """Answers `aaa`. Its first call stops after `hold_after` tokens, if that is given, until it is
    aborted."""

    backend_name = "ray"

    def __init__(self, hold_after=None, next_version=None, fail=False):
        self.version, self.next_version = 0, next_version
        self.hold_after, self.fail, self.busy = hold_after, fail, False
        self.holds, self.aborted = threading.Event(), threading.Event()

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
        outputs = []
        for request, length in zip(requests, lengths, strict=True):
            ids, log_probs = [letter] * length, [-0.1] * length
            outputs.append(
                GenerationOutput(request.request_id, 0, ids, log_probs, reason, self.version)
            )
        self.version = self.version if self.next_version is None else self.next_version
        self.busy = False
        return outputs

    def abort_requests(self, request_ids=None):
        self.aborted.set()


def ahead(policy, *, turns=3, first_step=0, max_steps=5, ratio=1):
    """A source that plays the coming steps against this policy."""
    env = {"env_type": "bad_envs:GoodEnv", "env_config": {"turns": turns}, "max_steps": 5}
    config = env_config({"Good": env}, async_generation_ratio=ratio, max_steps=max_steps)
    proxy = PolicyProxy(actor_infer=policy, tokenizer=TOKENIZER, options={})
    return source_of(config, proxy, first_step=first_step)


def answers_of(rollout):
    return [turn for trajectory in rollout.trajectories for turn in trajectory.turns]


def test_steps_come_in_order_and_not_too_far_ahead(monkeypatch):
    policy, played, groups = Policy(), [], []
    with ahead(policy) as source:
        buffer, rollout_of = source.buffer, source.rollout

        def watched(step, *args):
            assert step <= buffer.step + 1, "the ratio is 1"
            played.append(step)
            return rollout_of(step, *args)

        monkeypatch.setattr(source, "rollout", watched)
        for step in range(3):
            with buffer.paused(step):
                assert not policy.busy
                policy.version = step
            rollout = source.collect(step)
            assert rollout.metrics["rollout/staleness/max"] <= 1
            assert rollout.metrics["rollout/dropped/stale"] == 0
            letters = TOKENIZER("aaa")["input_ids"]
            assert all(turn.response_ids == letters for turn in answers_of(rollout))
            groups += [item.traj_group_id for item in rollout.trajectories]
        with buffer.changed:
            assert buffer.changed.wait_for(lambda: len(buffer.ready["all"]) == 2, LONG)
    assert played == [0, 1, 2, 3]
    assert len(groups) == 12 and len(set(groups)) == 6
    assert not buffer.thread.is_alive()


def test_an_answer_goes_on_with_the_new_weights_and_is_of_both_policies():
    policy = Policy(hold_after=2)
    with ahead(policy, turns=1, max_steps=2) as source:
        with source.buffer.paused(0):
            pass
        assert policy.holds.wait(LONG)
        with source.buffer.paused(1):
            assert not policy.busy
            policy.version = 1
        first, second = source.collect(0), source.collect(1)
        with source.buffer.paused(2):  # the last validation: nothing is left to play
            pass
    versions = [(turn.policy_version, turn.newest_version) for turn in answers_of(first)]
    assert versions == [(0, 1)] * 4
    assert all(turn.response_ids == TOKENIZER("aaa")["input_ids"] for turn in answers_of(first))
    assert first.metrics["rollout/mixed_version_samples"] == 4
    expected = {
        "rollout/dropped/stale": 0, "rollout/staleness/mean": 0, "rollout/staleness/max": 0,
        "scheduler/off_policy_ratio": 0, "rollout/mixed_version_samples": 0,
    }  # fmt: skip
    assert expected.items() <= second.metrics.items()
    assert second.metrics["rollout/wait_seconds"] >= 0


def test_a_part_without_a_token_does_not_make_an_answer_older():
    policy = Policy(hold_after=0)
    with ahead(policy, turns=1, max_steps=1) as source:
        with source.buffer.paused(0):
            pass
        assert policy.holds.wait(LONG)
        with source.buffer.paused(1):
            policy.version = 1
        assert [item.versions for item in source.collect(0).trajectories] == [{1}] * 4


def test_episodes_that_are_too_old_are_dropped_and_replaced():
    policy = Policy(next_version=5)  # the first answers come from weights five steps behind
    with ahead(policy, first_step=5, max_steps=6) as source:
        with source.buffer.paused(5):
            pass
        rollout = source.collect(5)
    assert [item.reason for item in rollout.dropped] == ["stale"] * 4
    assert rollout.metrics["rollout/dropped/stale"] == 4
    assert rollout.metrics["scheduler/group_filter_count"] == 0
    assert {0} < rollout.dropped[0].trajectory.versions
    assert [item.versions for item in rollout.trajectories] == [{5}] * 4, "played again"
    kept = {item.traj_group_id for item in rollout.trajectories}
    assert kept.isdisjoint(item.trajectory.traj_group_id for item in rollout.dropped)
    assert rollout.metrics["rollout/staleness/max"] == 0


def test_an_episode_within_the_bound_is_kept():
    with ahead(Policy(next_version=5), ratio=5) as source:
        assert source.rollout(5, 4).dropped == []
    proxy = PolicyProxy(actor_infer=Policy(next_version=5), tokenizer=TOKENIZER, options={})
    assert play(proxy=proxy, step=99).dropped == [], "synchronous runs have no bound"


def test_missing_groups_are_not_waited_for():
    with ahead(Policy(), max_steps=1) as source:
        source.group_filter = SimpleNamespace(filter=lambda group_id, *_: group_id == 0)
        with source.buffer.paused(0):
            pass
        assert [group.name[:6] for group in source.collect(0).groups] == ["Good_1"]


def test_a_failure_reaches_the_trainer_and_closing_ends_what_runs():
    with ahead(Policy(fail=True)) as source:
        with source.buffer.paused(0):
            pass
        with pytest.raises(RuntimeError, match="out of memory"):
            source.collect(0)
    policy = Policy(hold_after=1)
    with ahead(policy) as source:
        with source.buffer.paused(0):
            pass
        assert policy.holds.wait(LONG)
        source.buffer.close()
        source.buffer.close()


def test_it_takes_ray():
    config = env_config(GOOD, async_generation_ratio=1)
    assert config.execution_backend == "ray" and config.enable_old_logprobs_recompute
    with pytest.raises(ConfigError, match='backend: found "local"'):
        env_config(GOOD, async_generation_ratio=1, backend="local")
    with pytest.raises(ConfigError, match="expected policy"):
        manager = {"llm_proxy": {"proxy_type": "random"}}
        env_config(GOOD, async_generation_ratio=1, manager=manager)
