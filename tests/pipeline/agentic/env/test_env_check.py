"""The checker: it passes what comes along, and finds every fault that is built in on purpose."""

import itertools
import time

import pytest

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env.env_check import check_env


class Counter:
    """Counts down from the seed; faults are added by subclasses."""

    def reset(self, seed=None):
        self.left = seed % 5 + 2
        return f"{self.left} left", {"env_instruction": "Say down."}

    def step(self, action):
        valid = action == "down"
        self.left -= 1
        done = self.left == 0
        metrics = {"success": done and valid, "action_is_valid": valid}
        info = {"metrics": metrics, "metrics_agg_mode": {"success": "last"}}
        return f"{self.left} left", float(done), done, False, info

    def sample_random_action(self):
        return "down"


class Raises(Counter):
    def step(self, action):
        return super().step(action) if action == "down" else [][0]


class Nan(Counter):
    def step(self, action):
        return super().step(action)[0], float("nan"), True, False, {}


class ReturnsNone(Counter):
    def step(self, action):
        return None


class FourValues(Counter):
    def step(self, action):
        return super().step(action)[:4]


class NotText(Counter):
    def reset(self, seed=None):
        return 3, {}


class Hangs(Counter):
    def step(self, action):
        time.sleep(60)


class BadMetrics(Counter):
    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"metrics": {"success": "yes"}, "metrics_agg_mode": {"success": "newest"}}


class NoMetrics(Counter):
    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"metrics": 3}


class Same(Counter):
    def reset(self, seed=None):
        return super().reset(0)


class Leaks(Counter):
    """Remembers earlier episodes."""

    episodes = 0

    def reset(self, seed=None):
        self.episodes += 1
        self.left = seed % 5 + 2
        return f"{self.left} left, episode {self.episodes}", {}


class Random(Counter):
    numbers = itertools.count()

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(next(self.numbers)), *rest


class NoRandomActions(Counter):
    sample_random_action = None

    def __getattribute__(self, name):
        if name == "sample_random_action":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Endless(Counter):
    def step(self, action):
        return "on", 0.0, False, False, {}


def check(cls, timeout_s=60.0):
    return check_env(cls, seeds=range(5), timeout_s=timeout_s, max_turns=20)


def test_a_good_environment():
    report = check(Counter)
    assert report.ok and report.is_deterministic and not report.notes
    assert report.num_episodes == 15 and report.success_rate == 1.0
    assert report.reward_range == (0.0, 1.0) and report.return_range == (1.0, 1.0)
    # Seeds 0 to 4 take 2 to 6 turns, in each of three styles.
    assert report.num_steps == 3 * (2 + 3 + 4 + 5 + 6) and report.mean_turns == 4.0
    assert report.longest_observation == len("6 left")
    assert "Counter: ok" in str(report) and "100.0% of random play" in str(report)


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (
            Raises,
            "exception: IndexError: list index out of range (seed 0, malformed actions, turn 1)",
        ),
        (Nan, "nan_reward: step() returned the reward nan"),
        (ReturnsNone, "no_observation: step() returned None"),
        (FourValues, "protocol: step() returned"),
        (NotText, "protocol: reset() returned an observation of int"),
        (Hangs, "timeout: no answer within 0.05 s"),
        (BadMetrics, "protocol: metric 'success' is 'yes', expected a number"),
        (
            BadMetrics,
            "protocol: metrics_agg_mode of 'success' is 'newest', expected one of mean, sum",
        ),
        (NoMetrics, "protocol: info['metrics'] is 3, expected a dict"),
        (Leaks, "not deterministic: observation at turn 0 of seed 0"),
        (Random, "not deterministic: reward at turn 1"),
    ],
)
def test_faults_are_found(cls, problem):
    report = check(cls, timeout_s=0.05 if cls is Hangs else 60.0)
    assert not report.ok
    assert any(found.startswith(problem) for found in report.problems), report.problems
    assert problem in str(report)


def test_one_fault_does_not_fill_the_screen():
    report = check(Raises)
    assert len(report.problems) <= 6 and report.problems[-1].endswith("more of this kind")


def test_notes():
    assert any("no sample_random_action()" in note for note in check(NoRandomActions).notes)
    notes = check(Endless).notes
    assert "15 episodes had not ended after 20 turns" in notes
    assert any("no 'success'" in note for note in notes)
    assert "every seed starts with the same observation" in check(Same).notes


@pytest.mark.parametrize(
    ("env_id", "config"),
    [
        ("frozen_lake", {"max_steps": 10}),
        ("frozen_lake", {"size": 3, "neighbours": True, "is_slippery": True, "max_steps": 10}),
        ("sokoban", {}),
        ("sokoban", {"dim_room": [7, 7], "num_boxes": 2}),
        ("guess_number", {"show_range": True}),
        ("tool_task", {}),
        ("math", {}),
        ("gymnasium:CliffWalking-v1", {"max_steps": 10}),
        ("gymnasium:Taxi-v4", {"max_steps": 10}),
    ],
)
def test_environments_that_come_along_are_clean(env_id, config):
    if "lake" in env_id or "gymnasium" in env_id:
        pytest.importorskip("gymnasium")
    if env_id == "math":
        pytest.importorskip("math_verify")
    report = check_env(env_id, config, range(8))
    assert report.ok, str(report)
    assert report.success_rate is not None


def test_an_environment_that_is_not_there():
    with pytest.raises(ConfigError, match="did you mean 'sokoban'"):
        check_env("sokobann")
