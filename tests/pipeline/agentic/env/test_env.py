"""Environments by id and by path, and actions in text."""

import bad_envs
import pytest

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env import (
    ANSWER,
    Env,
    answer_with,
    entry_point_of,
    make,
    parse_action,
    register,
)


def test_by_id_by_path_and_by_class():
    env = make("sokoban", num_boxes=2)
    assert type(env).__name__ == "SokobanEnv" and env.num_boxes == 2 and isinstance(env, Env)
    assert isinstance(make("bad_envs.GoodEnv", turns=2), bad_envs.GoodEnv)
    assert make("bad_envs:GoodEnv", turns=2).turns == make(bad_envs.GoodEnv, turns=2).turns == 2
    register("my_game", bad_envs.GoodEnv)
    assert make("my_game", turns=4).turns == 4
    assert entry_point_of("gymnasium:Taxi-v3")[1] == ("Taxi-v3",)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("frozen_lak", "no environment 'frozen_lak'; did you mean 'frozen_lake'.*gymnasium:ID"),
        ("webshop", "'webshop' is not built yet: it needs WebShop's own"),
        ("nowhere.Game", "there is no module 'nowhere'"),
        ("bad_envs:Game", "module bad_envs has no 'Game'"),
    ],
)
def test_what_does_not_exist(env_id, message):
    with pytest.raises(ConfigError, match=message):
        make(env_id)


def test_actions_in_text():
    thought = "<think>(.*?)</think>.*<answer>(.*?)</answer>"
    parsed = parse_action("<think>hm</think> <answer> LEFT </answer>", thought, ["Left"])
    assert (parsed.name, parsed.think, parsed.content) == ("Left", "hm", "LEFT")
    assert parse_action("<answer>jump</answer>", ANSWER, ["Left"]) == (None, "jump", "")
    assert parse_action("nothing", ANSWER, ["Left"]) == (None, "nothing", "")
    assert parse_action("go left", "left|right", ["Left"]).name == "Left"
    assert parse_action("<a>left</a>", r"<a>(.*?)</a>|\[(.*?)\]", ["Left"]).name == "Left"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (ANSWER, "<answer>5</answer>"),
        (r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<think></think><answer>5</answer>"),
        (r"(\d+)", "5"),
        (r"\d+", "5"),
        (r"move: (\w+)", "move: 5"),
        (r"^=(.*)$", "=5"),
        (r"^(\d)$", "5"),
        (r"^[a-z]+(?P<n>\d)$", "5"),
    ],
)
def test_answers_that_a_pattern_accepts(pattern, expected):
    assert answer_with(pattern, "5") == expected
