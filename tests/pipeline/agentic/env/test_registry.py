"""Environments by id and by path, and actions in text."""

import bad_envs
import pytest

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env.base import default_parser_action_func, parse_action
from roll.pipeline.agentic.env.registry import entry_point_of, make, register, registered_ids


def test_by_id_by_path_and_by_class():
    assert type(make("frozen_lake", size=3)).__name__ == "FrozenLakeEnv"
    assert isinstance(make("bad_envs.GoodEnv", turns=2), bad_envs.GoodEnv)
    assert make("bad_envs:GoodEnv", turns=2).turns == 2
    register("my_game", bad_envs.GoodEnv)
    assert make("my_game", turns=4).turns == 4 and "my_game" in registered_ids()
    assert entry_point_of("gymnasium:Taxi-v3")[1] == ("Taxi-v3",)


def test_what_does_not_exist():
    with pytest.raises(
        ConfigError, match="no environment 'frozen_lak'; did you mean 'frozen_lake'"
    ):
        make("frozen_lak")
    with pytest.raises(ConfigError, match="there is no module 'nowhere'"):
        make("nowhere.Game")
    with pytest.raises(ConfigError, match="module bad_envs has no 'Game'"):
        make("bad_envs:Game")


def test_actions_in_text():
    parsed = parse_action(
        "<think>hm</think> <answer> LEFT </answer>",
        "<think>(.*?)</think>.*<answer>(.*?)</answer>",
        ["Left"],
    )
    assert (parsed.name, parsed.think, parsed.content) == ("Left", "hm", "LEFT")
    assert parse_action("nothing", "<a>(.*)</a>", ["Left"]).name is None
    assert parse_action("<e>Left<e>", "^(.*)$", ["Left"], special_tokens=["<e>"]).name == "Left"
    result = default_parser_action_func(
        "<answer>right</answer>", "<answer>(.*?)</answer>", {1: "Left", 2: "Right"}, None
    )
    assert result == {"action": 2, "action_content": "right", "think_content": ""}
