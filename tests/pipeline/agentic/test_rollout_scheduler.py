"""Many environments at once, with a policy that answers by rule."""

import psutil
import pytest
from agentic_setup import STEP, EchoProxy, env_config, scheduler_of

from roll.engines.request import GenerationOutput
from roll.models.tiny import character_tokenizer
from roll.rollout.collate import collate

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_groups_are_complete_and_in_order():
    with scheduler_of(env_config({"Good": "GoodEnv"})) as scheduler:
        rollout = scheduler.rollout(0, 4)
    assert [(item.group_id, item.env_id) for item in rollout.trajectories] == [
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    ]
    first, second, third, _ = rollout.trajectories
    assert first.traj_group_id == second.traj_group_id != third.traj_group_id
    assert len({item.traj_id for item in rollout.trajectories}) == 4
    assert first.score == 3.0 and first.metrics == {
        "success": 1.0,
        "action_is_valid": 1.0,
        "num_actions": 3.0,
    }
    assert rollout.metrics["env/Good/success"] == 1.0 and rollout.metrics["scheduler/turns"] == 12
    assert rollout.metrics["rollout/template_drift"] == 0.0


def test_all_ready_environments_are_answered_at_once():
    proxy = EchoProxy(character_tokenizer())
    with scheduler_of(env_config({"Good": "GoodEnv"}), proxy) as scheduler:
        scheduler.rollout(0, 4)
    assert [len(asked) for asked in proxy.asked] == [4, 4, 4]
    conversation = proxy.asked[2][0].messages
    assert [message["role"] for message in conversation] == ["user", "assistant"] * 2 + ["user"]
    assert (
        conversation[0]["content"].startswith("say a\nstart ") and conversation[1]["content"] == "a"
    )
    # Token ids of a turn continue those of the turn before.
    before, after = proxy.asked[0][0].request.prompt_ids, proxy.asked[1][0].request.prompt_ids
    assert after[: len(before)] == before


def test_seeds_come_from_the_config_alone():
    def first_observations(step, mode="train", **options):
        proxy = EchoProxy(character_tokenizer())
        with scheduler_of(env_config({"Good": "GoodEnv"}, **options), proxy, mode) as scheduler:
            scheduler.rollout(step, 4)
        return [turn.messages[0]["content"] for turn in proxy.asked[0]]

    texts = first_observations(0)
    assert texts == first_observations(0)
    assert texts[0] == texts[1] != texts[2]  # a group starts from one seed
    assert not set(texts) & set(first_observations(1)) and not set(texts) & set(
        first_observations(0, seed=43)
    )
    # Validation plays the same episodes every time, and others than training.
    assert first_observations(0, "val") == first_observations(5, "val")
    assert not set(texts) & set(first_observations(0, "val"))


def test_more_trajectories_than_environments():
    with scheduler_of(env_config({"Good": "GoodEnv"}, rollout_batch_size=12)) as scheduler:
        rollout = scheduler.rollout(0, 12)
        others = scheduler.rollout(1, 12)
    groups = [item.traj_group_id for item in rollout.trajectories]
    assert (
        len(groups) == 12
        and len(set(groups)) == 6
        and [groups[i] == groups[i + 1] for i in (0, 2, 4)] == [True] * 3
    )
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


def test_bad_environments_are_counted_and_never_block_the_others():
    envs = {tag: name for tag, (name, _) in BAD.items()} | {
        "Good": "GoodEnv",
        "Once": "EndsAtOnceEnv",
    }
    manager = {"num_env_groups": 9, "group_size": 2, "env_timeout": 0.5, "env_retries": 0}
    with scheduler_of(env_config(envs, manager=manager)) as scheduler:
        rollout = scheduler.rollout(0, 18)
    assert [item.tag for item in rollout.trajectories] == ["Good"] * 2 + ["Once"] * 2
    for tag, (_, reason) in BAD.items():
        assert rollout.failures[tag, reason] == 2, (tag, rollout.failures)
        assert rollout.metrics[f"env/{tag}/failed/{reason}"] == 2.0
    assert rollout.metrics["scheduler/empty_groups"] == 7
    assert [len(item.turns) for item in rollout.trajectories] == [3, 3, 1, 1]


def test_an_episode_is_started_again():
    with scheduler_of(env_config({"Flaky": "SometimesRaisingEnv"})) as scheduler:
        rollout = scheduler.rollout(0, 4)
    assert len(rollout.trajectories) == 4
    assert rollout.failures["Flaky", "exception"] > 0
    assert rollout.metrics["scheduler/env_restarts"] == rollout.failures["Flaky", "exception"]


def test_spare_environments_are_not_waited_for():
    """Three environments for groups of two; environment 1 never answers."""

    def answer(turn):
        return "a"

    manager = {"num_env_groups": 1, "group_size": 2, "group_size_redundancy": 1}
    with scheduler_of(
        env_config({"Good": "GoodEnv"}, manager=manager, rollout_batch_size=2)
    ) as scheduler:
        rollout = scheduler.rollout(0, 2)
        again = scheduler.rollout(1, 2)
    assert len(rollout.trajectories) == len(again.trajectories) == 2


def test_a_filter_drops_groups_and_others_take_their_place():
    seen = []

    def drop(group_id, episode_id, trajectories):
        seen.append([item.traj_group_id for item in trajectories])
        return len(seen) == 1

    with scheduler_of(env_config({"Good": "GoodEnv"}), drop=drop) as scheduler:
        rollout = scheduler.rollout(0, 4)
    assert len(rollout.trajectories) == 4 and len(rollout.filtered) == 2 and len(seen) == 3
    assert rollout.metrics["scheduler/group_filter_count"] == 1
    assert {item.traj_group_id for item in rollout.filtered}.isdisjoint(
        item.traj_group_id for item in rollout.trajectories
    )


def test_a_filter_that_drops_everything_comes_to_an_end():
    with scheduler_of(env_config({"Good": "GoodEnv"}), drop=lambda *_: True) as scheduler:
        assert scheduler.rollout(0, 4).trajectories == []


def test_a_prompt_that_is_too_long_from_the_start():
    with scheduler_of(env_config({"Long": "LongEnv", "Good": "GoodEnv"})) as scheduler:
        rollout = scheduler.rollout(0, 8)
    assert [item.tag for item in rollout.trajectories] == ["Good"] * 4
    assert rollout.failures["Long", "prompt_too_long"] == 4


def test_an_episode_that_outgrows_the_sequence_ends_with_what_it_has():
    config = env_config(
        {"Good": {"env_type": "bad_envs:GoodEnv", "env_config": {"turns": 50}}}, sequence_length=100
    )
    with scheduler_of(config) as scheduler:
        rollout = scheduler.rollout(0, 4)
    (played, *_) = rollout.trajectories
    assert played.stop_reason == "max_length" and 1 <= len(played.turns) < 50
    batch = collate([played], 0)
    assert batch["input_ids"].shape[1] <= 100 and float(batch["scores"].sum()) == played.score > 0


def test_max_steps_ends_an_episode():
    config = env_config(
        {"Good": {"env_type": "bad_envs:GoodEnv", "env_config": {"turns": 50}, "max_steps": 2}}
    )
    with scheduler_of(config) as scheduler:
        played = scheduler.rollout(0, 4).trajectories[0]
    assert played.stop_reason == "max_steps" and len(played.turns) == 2


def test_a_policy_that_fails_costs_only_its_episode():
    def answer(turn):
        if "_0:" in turn.request.request_id.split("_", 1)[1] + ":":
            return GenerationOutput(
                turn.request.request_id, 0, [], [], "error", 0, error="memory: none left"
            )
        return "a"

    proxy = EchoProxy(character_tokenizer(), answer)
    with scheduler_of(env_config({"Good": "GoodEnv"}), proxy) as scheduler:
        rollout = scheduler.rollout(0, 4)
    assert 0 < len(rollout.trajectories) < 4
    assert rollout.failures["Good", "generation"] == 4 - len(rollout.trajectories)


def test_several_workers_and_slow_environments():
    manager = {
        "num_env_groups": 4,
        "group_size": 2,
        "max_env_num_per_worker": 3,
        "env_timeout": 20.0,
        "env_wait": 0.05,
    }
    config = env_config({"Good": "GoodEnv", "Slow": "SlowEnv"}, manager=manager)
    with scheduler_of(config) as scheduler:
        assert scheduler.env_cluster.world_size == 3
        rollout = scheduler.rollout(0, 8)
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
    proxy = EchoProxy(character_tokenizer())
    with scheduler_of(env_config({"Good": template}), proxy) as scheduler:
        rollout = scheduler.rollout(0, 4)
    third = proxy.asked[2][0].messages
    assert third[0] == {"role": "system", "content": "say a"}
    assert third[1]["content"] == "Step 2:\nturn 1\nAnswer: a|turn 2|3|3|{unknown}"
    played = rollout.trajectories[0]
    assert played.prompts_are_whole and len(played.turns) == 3
    assert len({turn.state for turn in played.turns}) == 3


def test_environments_in_this_process():
    with scheduler_of(
        env_config({"Good": "GoodEnv"}, manager={"env_isolation": False})
    ) as scheduler:
        before = psutil.Process().children()
        assert len(scheduler.rollout(0, 4).trajectories) == 4
        assert psutil.Process().children() == before
