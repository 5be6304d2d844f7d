"""Environments that misbehave, and one that does not. No torch: they run in processes of their
own."""

import os
import time

from roll.pipeline.agentic.env import Env


class GoodEnv(Env):
    """Three turns; an answer with an `a` in it is worth 1, and success is to have given one in the
    last turn."""

    def __init__(self, turns: int = 3, **_: object) -> None:
        self.turns = turns

    def reset(self, seed=None):
        self.seed, self.step_number = seed, 0
        return f"start {seed}", {"env_instruction": "say a"}

    def step(self, action):
        self.step_number += 1
        right = "a" in action
        info = {
            "metrics": {"success": right, "action_is_valid": True},
            "metrics_agg_mode": {"success": "last"},
        }
        return f"turn {self.step_number}", float(right), self.step_number >= self.turns, False, info

    def sample_random_action(self):
        return "a"


class RaisingEnv(GoodEnv):
    def step(self, action):
        raise RuntimeError("the floor is lava")


class SometimesRaisingEnv(GoodEnv):
    """Fails in the first attempt at an episode, not in the second."""

    attempts: dict = {}  # noqa: RUF012

    def step(self, action):
        tries = self.attempts.setdefault(self.seed, set())
        tries.add(id(self))
        if len(tries) == 1:
            raise RuntimeError("not today")
        return super().step(action)


class HangingEnv(GoodEnv):
    def step(self, action):
        time.sleep(1000)


class StubbornEnv(GoodEnv):
    """Hangs and cannot be interrupted."""

    def step(self, action):
        while True:
            try:
                time.sleep(1000)
            except BaseException:  # noqa: BLE001
                continue


class HangingResetEnv(GoodEnv):
    def reset(self, seed=None):
        while True:
            pass


class CrashingEnv(GoodEnv):
    def step(self, action):
        os._exit(3)


class NaNEnv(GoodEnv):
    def step(self, action):
        return "x", float("nan"), False, False, {}


class NoneRewardEnv(GoodEnv):
    def step(self, action):
        return "x", None, False, False, {}


class NoneEnv(GoodEnv):
    def reset(self, seed=None):
        return None, {}


class NoneStepEnv(GoodEnv):
    def step(self, action):
        return None


class NumberObservationEnv(GoodEnv):
    def step(self, action):
        return 7, 0.0, False, False, {}


class EndsAtOnceEnv(GoodEnv):
    """Over after the first answer, without a last observation."""

    def step(self, action):
        return None, 0.5, True, False, {"metrics": {"success": True}}


class UnbuildableEnv(GoodEnv):
    def __init__(self, **_: object) -> None:
        raise ValueError("no such level")


class SlowEnv(GoodEnv):
    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


class GatedEnv(GoodEnv):
    """Answers when a file is there."""

    def __init__(self, gate: str, **config: object) -> None:
        super().__init__(**config)
        self.gate = gate

    def step(self, action):
        while not os.path.exists(self.gate):
            time.sleep(0.01)
        return super().step(action)


class LongEnv(GoodEnv):
    def reset(self, seed=None):
        return "x" * 500, {}


class LeavingThingsBehindEnv(GoodEnv):
    """Starts a process and a thread that outlive the episode."""

    def reset(self, seed=None):
        import subprocess
        import threading

        subprocess.Popen(["sleep", "987"])
        threading.Thread(target=time.sleep, args=(987,)).start()
        return super().reset(seed)


class SuffixEnv(GoodEnv):
    """As GEM's games: every answer of the environment comes with what to do next."""

    def step(self, action):
        *reply, info = super().step(action)
        return *reply, {**info, "suffix": "next?"}
