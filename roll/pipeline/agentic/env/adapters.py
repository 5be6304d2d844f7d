"""Environments of other libraries: `gymnasium:Taxi-v4`, and GEM's own ids such as `game:GuessTheNumber-v0`.

A gymnasium environment is text-like if its actions are a number or a text. Its observation becomes text: the `ansi`
rendering if it has one, otherwise the observation itself, written out. GEM's environments speak our protocol already.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.pipeline.agentic.env.answers import answer_with
from roll.pipeline.agentic.env.base import Env, Info, Reset, Step, find_groups, parse_action

_MAX_TEXT = 2000
# By its own list of requirements gem-llm replaces the antlr4 runtime with one that OmegaConf cannot use.
GEM_INSTALL = (
    "pip install --no-deps gem-llm==0.0.4 && pip install nltk==3.9.1 reasoning-gym==0.1.23"
)


class GymnasiumEnv(Env):
    """A gymnasium environment with text in and out.

    Args:
        env_id: the id under which gymnasium knows it.
        actions: names of the actions, in the order of their numbers; the numbers themselves if left out.
        observation: `ansi` (the rendering), `value` (the observation), or None for the first where there is one.
        action_pattern: where the action stands in the answer.
        max_steps: actions of an episode, after which it is truncated; gymnasium's own limit holds as well.
        format_penalty: reward of an answer without a valid action, which changes nothing.
        success_reward: an episode that ends with a step of at least this reward is a success.
        env_config: arguments of the environment itself.
        env_instruction: the rules as the policy reads them.
    """

    def __init__(
        self,
        env_id: str,
        *,
        actions: Sequence[str] | None = None,
        observation: str | None = None,
        action_pattern: str = r"<answer>(.*?)</answer>",
        max_steps: int | None = None,
        format_penalty: float = 0.0,
        success_reward: float = 1.0,
        env_config: Mapping[str, Any] | None = None,
        env_instruction: str | None = None,
    ) -> None:
        gymnasium = _library("gymnasium", install_hint("envs"))
        if observation not in (None, "ansi", "value"):
            raise ConfigError(
                f'{env_id}: observation: found "{observation}", expected "ansi" or "value"'
            )
        try:
            self._env: Any = gymnasium.make(env_id, **(env_config or {}))
            modes = self._env.metadata.get("render_modes") or []
            if observation == "ansi" and "ansi" not in modes:
                raise ConfigError(
                    f'{env_id}: observation: found "ansi", but it renders {modes}; use "value"'
                )
            self._renders = observation != "value" and "ansi" in modes
            if self._renders:
                self._env.close()
                self._env = gymnasium.make(env_id, **{**(env_config or {}), "render_mode": "ansi"})
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium:{env_id}: {error}") from None
        self.actions = _action_names(self._env.action_space, actions, env_id)
        self.action_pattern, self.max_steps, self.format_penalty = (
            action_pattern,
            max_steps,
            format_penalty,
        )
        self.success_reward = success_reward
        known = (
            f"The actions are {', '.join(self.actions)}." if self.actions else "Answer with a text."
        )
        self.instruction = known if env_instruction is None else env_instruction
        self._text, self._steps, self._random = "", 0, random.Random(0)

    def reset(self, seed: int | None = None) -> Reset:
        observation, _ = self._env.reset(seed=seed)
        self._env.action_space.seed(seed)
        self._steps, self._random = 0, random.Random(seed)
        self._text = self._observe(observation)
        return self._text, {"env_instruction": self.instruction}

    def step(self, action: str) -> Step:
        self._steps += 1
        move, content = self._parse(action)
        reward, terminated, truncated = self.format_penalty, False, False
        if move is not None:
            observation, reward, terminated, truncated, _ = self._env.step(move)
            self._text = self._observe(observation)
        truncated = bool(truncated) or (
            self.max_steps is not None and self._steps >= self.max_steps
        )
        success = bool(terminated) and float(reward) >= self.success_reward
        metrics = {"success": success, "action_is_valid": move is not None}
        info: Info = {
            "metrics": metrics,
            "metrics_agg_mode": {"success": "last"},
            "action_content": content,
        }
        return self._text, float(reward), bool(terminated), truncated and not terminated, info

    def sample_random_action(self) -> str:
        """A valid answer, for the random proxy."""
        text = (
            self._random.choice(self.actions)
            if self.actions
            else str(self._env.action_space.sample())
        )
        return answer_with(self.action_pattern, text)

    def close(self) -> None:
        self._env.close()

    def _parse(self, text: str) -> tuple[Any, str]:
        if self.actions:
            parsed = parse_action(text, self.action_pattern, self.actions)
            start = int(getattr(self._env.action_space, "start", 0))
            return None if parsed.name is None else start + self.actions.index(
                parsed.name
            ), parsed.content
        groups = find_groups(self.action_pattern, text)
        content = "" if groups is None else groups[-1].strip()
        is_valid = groups is not None and self._env.action_space.contains(content)
        return (content if is_valid else None), content

    def _observe(self, observation: Any) -> str:
        value = self._env.render() if self._renders else observation
        text = value if isinstance(value, str) else _written_out(value)
        # Renderings mark cells by colour; without a terminal the marked text stands in brackets.
        text = re.sub(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", r"[\1]", text, flags=re.DOTALL)
        return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()[:_MAX_TEXT]


class GemEnv(Env):
    """A GEM environment: `gem.make(env_id, **config)`, with a `success` metric where its info does not have one.

    It has `sample_random_action` if, and only if, GEM's environment has one of its own.
    """

    def __init__(self, env_id: str, **config: Any) -> None:
        self._wrap(_library("gem", GEM_INSTALL).make(env_id, **config))

    def _wrap(self, env: Any) -> None:
        self._env = env
        inherited = getattr(_library("gem", GEM_INSTALL), "Env", None)
        own = getattr(type(env), "sample_random_action", None)
        if own is not None and own is not getattr(inherited, "sample_random_action", None):
            self.sample_random_action = lambda: str(env.sample_random_action())

    def reset(self, seed: int | None = None) -> Reset:
        observation, info = self._env.reset(seed=seed)
        return observation, dict(info or {})

    def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = self._env.step(action)
        info = dict(info or {})
        info["metrics"] = {
            "success": bool(terminated) and float(reward) > 0,
            **info.get("metrics", {}),
        }
        info["metrics_agg_mode"] = {"success": "last", **info.get("metrics_agg_mode", {})}
        return observation, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


class GemQaEnv(GemEnv):
    """ROLL's `roll_qa`: GEM's questions with an answer to be matched, from a dataset of one's own."""

    def __init__(self, **config: Any) -> None:
        self._wrap(_library("gem.envs.qa_env", GEM_INSTALL).QaEnv(**config))

    def reset(self, seed: int | None = None) -> Reset:
        # Given a seed, GEM may draw a row behind the last one; without it, it goes on with the row `idx`.
        if seed is not None:
            self._env.idx = random.Random(seed).randrange(len(self._env.dataset))
        return super().reset(None)


class GemCodeEnv(GemEnv):
    """ROLL's `roll_code`: GEM's programming tasks with tests to be passed, from a dataset of one's own."""

    def __init__(self, **config: Any) -> None:
        self._wrap(_library("gem.envs.code_env", GEM_INSTALL).CodeEnv(**config))


def _library(name: str, how: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"this environment needs {name}, which cannot be imported: {how}"
        ) from error


def _action_names(space: Any, names: Sequence[str] | None, env_id: str) -> tuple[str, ...]:
    """One name for each number of a discrete space; none for a space of texts."""
    kind = type(space).__name__
    if kind == "Text":
        return ()
    if kind != "Discrete":
        raise ConfigError(
            f"gymnasium:{env_id}: its actions are {space}; expected a number (Discrete) or a Text"
        )
    if names is not None and len(names) != space.n:
        raise ConfigError(
            f"gymnasium:{env_id}: actions: found {len(names)} names, expected {space.n}"
        )
    return (
        tuple(names)
        if names is not None
        else tuple(str(space.start + index) for index in range(space.n))
    )


def _written_out(value: Any) -> str:
    """A short text of numbers, sequences and mappings of them."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_written_out(item)}" for key, item in value.items())
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return " ".join(_written_out(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
