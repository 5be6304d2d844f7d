"""FrozenLake as text."""

import pytest

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env.base import Env
from roll.pipeline.agentic.env.frozen_lake import FrozenLakeEnv

WAY = ["Down", "Down", "Right", "Right", "Down", "Right"]


def answer(action):
    return f"<answer>{action}</answer>"


def test_the_way_to_the_goal():
    env = FrozenLakeEnv()
    observation, info = env.reset(seed=0)
    assert observation == "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G"
    assert "The actions are Left, Down, Right, Up." in info["env_instruction"]
    assert isinstance(env, Env)
    for action in WAY[:-1]:
        observation, reward, terminated, truncated, info = env.step(answer(action))
        assert (reward, terminated, truncated) == (0.0, False, False)
    observation, reward, terminated, _, info = env.step(answer(WAY[-1]))
    assert observation.endswith("O _ _ V") and reward == 1.0 and terminated
    assert info["metrics"] == {
        "success": True,
        "action_is_valid": True,
        "action_is_effective": True,
    }


def test_a_hole_ends_the_episode():
    env = FrozenLakeEnv(hole_penalty=-0.5)
    env.reset(seed=0)
    env.step(answer("Right"))
    observation, reward, terminated, _, info = env.step(answer("down"))
    assert observation.splitlines()[1] == "_ X _ O" and reward == -0.5 and terminated
    assert info["metrics"]["success"] is False


@pytest.mark.parametrize(
    "text", ["", "Left", "<answer>jump</answer>", "<answer>", "\x00", "<answer>Left Right</answer>"]
)
def test_a_malformed_answer_changes_nothing(text):
    env = FrozenLakeEnv(format_penalty=-0.1)
    before, _ = env.reset(seed=0)
    after, reward, terminated, _, info = env.step(text)
    assert (
        after == before
        and reward == -0.1
        and not terminated
        and not info["metrics"]["action_is_valid"]
    )


def test_a_wall_is_valid_and_has_no_effect():
    env = FrozenLakeEnv()
    env.reset(seed=0)
    *_, info = env.step(answer("Left"))
    assert info["metrics"]["action_is_valid"] and not info["metrics"]["action_is_effective"]


def test_random_maps_depend_on_the_seed_alone():
    env = FrozenLakeEnv(size=3, neighbours=True)
    maps = {seed: env.reset(seed)[0] for seed in range(20)}
    assert all(
        FrozenLakeEnv(size=3, neighbours=True).reset(seed)[0] == text for seed, text in maps.items()
    )
    assert len(set(maps.values())) > 5
    assert all(
        len(text.splitlines()) == 4 and text.splitlines()[3].split()[0] == "#"
        for text in maps.values()
    )


def test_own_names_and_limits():
    env = FrozenLakeEnv(
        actions="LDRU", action_pattern="^([LDRU])$", separator="", env_instruction="", max_steps=2
    )
    observation, info = env.reset(seed=0)
    assert observation == "P___\n_O_O\n___O\nO__G" and info["env_instruction"] == ""
    assert env.step("D")[0].startswith("____\nPO_O")
    assert env.step("D")[3]  # truncated
    assert (
        env.sample_random_action() in "LDRU"
        and FrozenLakeEnv().sample_random_action().startswith("<answer>")
    )


def test_options_that_make_no_sense():
    with pytest.raises(ConfigError, match="size: found 1, expected at least 2"):
        FrozenLakeEnv(size=1)
    with pytest.raises(ConfigError, match="expected names for left, down, right, up"):
        FrozenLakeEnv(actions=["L", "R"])


def test_the_map_before_the_first_reset_comes_from_map_seed():
    env = FrozenLakeEnv(map_seed=42)  # ROLL's argument, with its size of 4
    twin = FrozenLakeEnv(size=4, map_seed=42)
    others = {FrozenLakeEnv(map_seed=seed).step("")[0] for seed in range(8)}
    assert env.step("")[0] == twin.step("")[0] and len(others) > 3
    assert len(env.step("")[0].splitlines()) == 4
    # A reset goes by its own seed alone.
    assert env.reset(seed=7)[0] == FrozenLakeEnv(size=4).reset(seed=7)[0]
    action = f"<answer>{env.ACTION_LOOKUP[0]}</answer>"
    assert env.step(action)[4]["metrics"]["action_is_valid"]


def test_symbols_and_actions_as_roll_names_them():
    env = FrozenLakeEnv(
        grid_lookup={0: "@", 2: "H"},
        grid_vocab={"@": "you", "H": "hole"},
        action_lookup={0: "West", 1: "South", 2: "East", 3: "North"},
    )
    observation, info = env.reset(seed=0)
    assert observation == "@ _ _ _\n_ H _ H\n_ _ _ H\nH _ _ G"
    assert info["env_instruction"] == (
        "Move the player @ over the ice (_) to the goal (G) without falling into a hole (H). "
        "The actions are West, South, East, North. The symbols are @: you, H: hole."
    )
    assert env.step(answer("South"))[0].startswith("_ _ _ _\n@")
    with pytest.raises(
        ConfigError, match=r"grid_lookup: found \[6\], expected numbers from 0 to 5"
    ):
        FrozenLakeEnv(grid_lookup={6: "x"})
