"""Environments of other libraries: `gymnasium:Taxi-v4`, and GEM's ids such as `game:Wordle-v0`.

A gymnasium environment is text-like if its actions are a number or a text. Its observation becomes
text: the `ansi` rendering if it has one, otherwise the observation itself, written out. GEM's
environments speak our protocol already.
"""

import importlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.pipeline.agentic.env import (
    ANSWER,
    Env,
    Reset,
    Step,
    answer_with,
    find_groups,
    parse_action,
    step_info,
)

_MAX_TEXT = 2000
# Its own list of requirements replaces the antlr4 runtime with one that OmegaConf cannot use.
GEM_INSTALL = (
    "pip install --no-deps gem-llm==0.0.4 && pip install nltk==3.9.1 reasoning-gym==0.1.23"
)


def _library(name: str, how: str = GEM_INSTALL) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"this environment needs {name}, which cannot be imported: {how}"
        ) from error


@dataclass(eq=False)
class GymnasiumEnv(Env):
    """A gymnasium environment with text in and out."""

    env_id: str  # the id under which gymnasium knows it
    _: KW_ONLY
    actions: Sequence[str] | None = None  # names in the order of the numbers, which are the default
    observation: str | None = None  # `ansi`: the rendering, if there is one; `value`: what it says
    action_pattern: str = ANSWER  # where the action stands in the answer
    max_steps: int | None = None  # actions of an episode, besides gymnasium's own limit
    format_penalty: float = 0.0  # reward of an answer without a valid action, which changes nothing
    success_reward: float = 1.0  # an episode whose last step has this reward is a success
    env_config: Mapping[str, Any] | None = None  # arguments of the environment itself
    env_instruction: str | None = None  # the rules as the policy reads them

    def __post_init__(self) -> None:
        env_id, observation = self.env_id, self.observation
        gymnasium = _library("gymnasium", install_hint("envs"))
        if observation not in (None, "ansi", "value"):
            raise ConfigError(
                f'{env_id}: observation: found "{observation}", expected "ansi" or "value"'
            )
        config = dict(self.env_config or {})
        try:
            self._env: Any = gymnasium.make(env_id, **config)
            modes = self._env.metadata.get("render_modes") or []
            if observation == "ansi" and "ansi" not in modes:
                raise ConfigError(
                    f'{env_id}: observation: found "ansi", but it renders {modes}; use "value"'
                )
            self._renders = observation != "value" and "ansi" in modes
            if self._renders:
                self._env.close()
                self._env = gymnasium.make(env_id, **{**config, "render_mode": "ansi"})
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium:{env_id}: {error}") from None
        space = self._env.action_space
        kind = type(space).__name__
        if kind not in ("Text", "Discrete"):
            expected = "a number (Discrete) or a Text"
            raise ConfigError(f"gymnasium:{env_id}: its actions are {space}; expected {expected}")
        rules, names = "Answer with a text.", ()
        if kind == "Discrete":
            numbers = [str(space.start + index) for index in range(space.n)]
            names = tuple(numbers if self.actions is None else self.actions)
            if len(names) != space.n:
                found = f"found {len(names)} names, expected {space.n}"
                raise ConfigError(f"gymnasium:{env_id}: actions: {found}")
            rules = f"The actions are {', '.join(names)}."
        self.actions = names
        if self.env_instruction is None:
            self.env_instruction = rules
        self._text, self._steps, self._random = "", 0, random.Random(0)

    def reset(self, seed: int | None = None) -> Reset:
        observation, _ = self._env.reset(seed=seed)
        self._env.action_space.seed(seed)
        self._steps, self._random = 0, random.Random(seed)
        self._text = self._observe(observation)
        return self._text, {"env_instruction": self.env_instruction}

    def step(self, action: str) -> Step:
        self._steps += 1
        space = self._env.action_space
        move: Any = None
        if self.actions:
            name = parse_action(action, self.action_pattern, self.actions).name
            if name is not None:
                move = int(getattr(space, "start", 0)) + self.actions.index(name)
        else:
            groups = find_groups(self.action_pattern, action)
            if groups is not None and space.contains(groups[-1].strip()):
                move = groups[-1].strip()
        reward, terminated, truncated = self.format_penalty, False, False
        if move is not None:
            observation, reward, terminated, truncated, _ = self._env.step(move)
            self._text = self._observe(observation)
        is_late = self.max_steps is not None and self._steps >= self.max_steps
        truncated = (bool(truncated) or is_late) and not terminated
        success = bool(terminated) and float(reward) >= self.success_reward
        info = step_info(success=success, action_is_valid=move is not None)
        return self._text, float(reward), bool(terminated), truncated, info

    def sample_random_action(self) -> str:
        """A valid answer, for the random proxy."""
        if self.actions:
            return answer_with(self.action_pattern, self._random.choice(self.actions))
        return answer_with(self.action_pattern, str(self._env.action_space.sample()))

    def close(self) -> None:
        self._env.close()

    def _observe(self, observation: Any) -> str:
        value = self._env.render() if self._renders else observation
        text = value if isinstance(value, str) else _written_out(value)
        # Renderings mark cells by colour; without a terminal the marked text stands in brackets.
        text = re.sub(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", r"[\1]", text, flags=re.DOTALL)
        return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()[:_MAX_TEXT]


def _written_out(value: Any) -> str:
    """A short text of numbers, sequences and mappings of them."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_written_out(item)}" for key, item in value.items())
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return " ".join(_written_out(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class GemEnv(Env):
    """A GEM environment, with a `success` metric where its info has none.

    It has `sample_random_action` if, and only if, GEM's environment has one of its own.
    """

    def __init__(self, env_id: str, **config: Any) -> None:
        self._wrap(_library("gem").make(env_id, **config))

    def _wrap(self, env: Any) -> None:
        self._env = env
        inherited = getattr(_library("gem"), "Env", None)
        own = getattr(type(env), "sample_random_action", None)
        if own is not None and own is not getattr(inherited, "sample_random_action", None):
            self.sample_random_action = lambda: str(env.sample_random_action())

    def reset(self, seed: int | None = None) -> Reset:
        observation, info = self._env.reset(seed=seed)
        return observation, dict(info or {})

    def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = self._env.step(action)
        own = dict(info or {})
        added = step_info(success=bool(terminated) and float(reward) > 0)
        for key, values in added.items():
            own[key] = {**values, **own.get(key, {})}
        return observation, float(reward), bool(terminated), bool(truncated), own

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


class GemQaEnv(GemEnv):
    """ROLL's `roll_qa`: GEM's questions with an answer to be matched, from one's own dataset."""

    def __init__(self, **config: Any) -> None:
        self._wrap(_library("gem.envs.qa_env").QaEnv(**config))

    def reset(self, seed: int | None = None) -> Reset:
        # Given a seed, GEM may draw a row behind the last one; without it, it goes on with `idx`.
        if seed is not None:
            self._env.idx = random.Random(seed).randrange(len(self._env.dataset))
        return super().reset(None)


class GemCodeEnv(GemEnv):
    """ROLL's `roll_code`: GEM's programming tasks with tests to pass, from one's own dataset."""

    def __init__(self, **config: Any) -> None:
        self._wrap(_library("gem.envs.code_env").CodeEnv(**config))
