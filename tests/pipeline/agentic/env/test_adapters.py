"""Environments of other libraries."""

import re
import sys
from types import SimpleNamespace

import pytest

from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.pipeline.agentic.env import make
from roll.pipeline.agentic.env.adapters import GymnasiumEnv
from roll.pipeline.agentic.env.env_check import check_env

gymnasium = pytest.importorskip("gymnasium")


class Echo(gymnasium.Env):
    """Texts in and out; the word ends it."""

    action_space = gymnasium.spaces.Text(8, charset="abc")
    observation_space = gymnasium.spaces.Text(8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "start", {}

    def step(self, action):
        return action[::-1], float(action == "abc"), action == "abc", False, {}


class Vector(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2, start=3)
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        return {"a": self.observation_space.high, "b": action}, 0.5, False, True, {}


class Continuous(Vector):
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))


@pytest.fixture(scope="module", autouse=True)
def registered():
    for cls in (Echo, Vector, Continuous):
        gymnasium.register(
            f"roll-test/{cls.__name__}-v0", entry_point=cls, disable_env_checker=True
        )


def test_numbers_with_names_and_a_rendering():
    options = {"actions": ["Up", "Right", "Down", "Left"], "format_penalty": -2.0, "max_steps": 2}
    env = make("gymnasium:CliffWalking-v1", **options)
    observation, info = env.reset(0)
    assert observation.splitlines()[3] == "x  C  C  C  C  C  C  C  C  C  C  T"
    assert info["env_instruction"] == "The actions are Up, Right, Down, Left."
    observation, reward, terminated, truncated, info = env.step("<answer>up</answer>")
    assert observation.splitlines()[2].startswith("x  o")
    assert (reward, terminated, truncated) == (-1.0, False, False)
    assert info["metrics"] == {"success": False, "action_is_valid": True}
    again, reward, terminated, truncated, info = env.step("<answer>jump</answer>")
    assert (again, reward, terminated, truncated) == (observation, -2.0, False, True)
    assert info["metrics"]["action_is_valid"] is False
    env.close()


def test_a_rendering_without_colours_or_a_value():
    text = make("gymnasium:Taxi-v4").reset(0)[0]
    assert "\x1b" not in text and "[" in text
    assert make("gymnasium:Taxi-v4", observation="value").reset(0)[0].isdigit()


def test_texts():
    env = make("gymnasium:roll-test/Echo-v0", action_pattern="say (.*)")
    assert env.reset(0)[0] == "start"
    assert env.step("say ab")[:3] == ("ba", 0.0, False)
    assert env.step("say xyz")[4]["metrics"]["action_is_valid"] is False
    observation, reward, terminated, _, info = env.step("say abc")
    assert (observation, reward, terminated, info["metrics"]["success"]) == ("cba", 1.0, True, True)
    assert env.sample_random_action()


def test_observations_are_written_out_and_numbers_may_start_anywhere():
    env = make("gymnasium:roll-test/Vector-v0", action_pattern=r"(\d)")
    assert env.reset(0)[0] == "-1 -1"
    assert env.actions == ("3", "4")
    assert env.step("4")[:4] == ("a=1 1 b=4", 0.5, False, True)


@pytest.mark.parametrize(
    ("env_id", "config", "message"),
    [
        ("NoSuch-v0", {}, "NoSuch"),
        ("roll-test/Continuous-v0", {}, r"its actions are Box.* expected a number"),
        ("CliffWalking-v1", {"actions": ["a"]}, "found 1 names, expected 4"),
        ("roll-test/Vector-v0", {"observation": "ansi"}, 'found "ansi", but it renders'),
        ("roll-test/Vector-v0", {"observation": "pixels"}, 'found "pixels"'),
    ],
)
def test_what_is_not_text_like(env_id, config, message):
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnv(env_id, **config)


def test_gem_environments_are_passed_through(monkeypatch):
    class Game:
        def __init__(self, size):
            self.size = size

        def reset(self, seed=None):
            return f"size {self.size}", {"suffix": "?"}

        def step(self, action):
            return "end", 1, True, False, {"metrics": {"moves": 3}}

        def sample_random_action(self):
            return "\\boxed{1}"

    made = []

    def gem_make(env_id, **config):
        made.append(env_id)
        return Game(**config)

    monkeypatch.setitem(sys.modules, "gem", SimpleNamespace(make=gem_make))
    families = ["game", "math", "rg", "qa", "code", "logic"]
    for prefix in families:
        assert make(f"{prefix}:Thing-v0", size=2).reset(1)[0] == "size 2"
    env = make("gem:game:Thing-v0", size=4)
    assert made == [f"{prefix}:Thing-v0" for prefix in [*families, "game"]]
    assert env.reset(1) == ("size 4", {"suffix": "?"})
    assert env.sample_random_action() == "\\boxed{1}"
    observation, reward, terminated, truncated, info = env.step("x")
    assert (observation, reward, terminated, truncated) == ("end", 1.0, True, False)
    assert info["metrics"] == {"success": True, "moves": 3}
    env.close()


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "gem", None)
    for env_id in ("gem:game:Thing-v0", "rg:letter_counting", "roll_qa", "roll_code"):
        with pytest.raises(
            MissingDependencyError, match=r"needs gem.*: pip install --no-deps gem-llm"
        ):
            make(env_id)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("envs"))):
        make("gymnasium:Taxi-v4")


def test_games_of_the_real_gem():
    pytest.importorskip("gem")
    report = check_env(
        "game:GuessTheNumber-v0", {"min_number": 1, "max_number": 20, "max_turns": 9}, range(3)
    )
    assert report.ok and report.is_deterministic, str(report)
    tasks = check_env("rg:letter_counting", {"size": 50, "seed": 42}, range(3))
    assert tasks.ok and "no sample_random_action" in tasks.notes[0], str(tasks)


def test_questions_of_the_real_gem_come_from_ones_own_data():
    pytest.importorskip("gem")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"problem": "2+2?", "answer": "4"}])
    env = make("roll_qa", dataset=rows, question_key="problem", answer_key="answer")
    assert "2+2?" in env.reset(0)[0]
    *_, info = env.step("<answer>4</answer>")
    assert info["metrics"]["success"]
