"""FrozenLake as text: cross the ice to the goal, around the holes. Built on gymnasium's environment.

    P _ _ _      P player, _ ice, O hole, G goal; X the player in a hole, V the player on the goal
    _ O _ O
    _ _ _ O
    O _ _ G

Reaching the goal gives 1 and ends the episode, a hole gives 0 and ends it, a malformed answer gives `format_penalty`
and changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.pipeline.agentic.env.answers import answer_with
from roll.pipeline.agentic.env.base import (
    Env,
    Info,
    Reset,
    Step,
    meanings,
    parse_action,
    symbols_in_effect,
)

try:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as _GymFrozenLake
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map
except ImportError as error:
    raise MissingDependencyError(
        f"the environment frozen_lake needs gymnasium, which is not installed: {install_hint('envs')}"
    ) from error

ACTIONS = ("Left", "Down", "Right", "Up")  # gymnasium's numbers 0 to 3
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


class FrozenLakeEnv(Env):
    """FrozenLake.

    Args:
        size: side of a random map; None takes gymnasium's standard 4x4 map, the same for every seed.
        p: probability that a cell of a random map is ice; maps without a way to the goal are thrown away.
        map_seed: seed of the random map before the first reset, of `size` 4 if left out; a reset draws its own.
        is_slippery: the ice may take the player to the side.
        max_steps: actions of an episode, after which it is truncated; None is no limit.
        format_penalty: reward of an answer without a valid action.
        hole_penalty: reward of stepping into a hole.
        action_pattern: where the action stands in the answer.
        neighbours: say what lies left, below, right and above of the player, too (# is the edge).
        separator: between the cells of a row.
        actions: names of the four actions, in the order left, down, right, up.
        action_lookup: ROLL's form of `actions`, by the numbers 0 to 3.
        grid_lookup: other symbols by ROLL's numbers: 0 player, 1 ice, 2 hole, 3 goal, 4 player in a hole, 5 player on
            the goal.
        grid_vocab: what symbols mean; stands behind the rules.
        env_instruction: the rules as the policy reads them; "" leaves them out.
    """

    def __init__(
        self,
        *,
        size: int | None = None,
        p: float = 0.8,
        map_seed: int | None = None,
        is_slippery: bool = False,
        max_steps: int | None = None,
        format_penalty: float = 0.0,
        hole_penalty: float = 0.0,
        action_pattern: str = r"<answer>(.*?)</answer>",
        neighbours: bool = False,
        separator: str = " ",
        actions: Sequence[str] = ACTIONS,
        action_lookup: Mapping[int, str] | None = None,
        grid_lookup: Mapping[int, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        env_instruction: str | None = None,
    ) -> None:
        if map_seed is not None and size is None:
            size = 4
        if size is not None and size < 2:
            raise ConfigError(
                f"frozen_lake: size: found {size}, expected at least 2, or null for the standard 4x4 map"
            )
        self.size, self.p, self.is_slippery = size, p, is_slippery
        self.max_steps, self.format_penalty, self.hole_penalty = (
            max_steps,
            format_penalty,
            hole_penalty,
        )
        self.action_pattern, self.neighbours, self.separator = action_pattern, neighbours, separator
        if action_lookup is not None:
            actions = [action_lookup[number] for number in sorted(action_lookup)]
        if len(actions) != len(_MOVES):
            raise ConfigError(
                f"frozen_lake: actions: found {list(actions)}, expected names for left, down, right, up"
            )
        self.actions = tuple(actions)
        self.ACTION_LOOKUP = dict(enumerate(self.actions))
        player, ice, hole, goal, in_hole, on_goal = symbols_in_effect(
            "frozen_lake", "P_OGXV", grid_lookup
        )
        self._symbols = {"S": ice, "F": ice, "H": hole, "G": goal}
        self._on_top = {"S": player, "F": player, "H": in_hole, "G": on_goal}
        rules = (
            f"Move the player {player} over the ice ({ice}) to the goal ({goal}) without falling into a hole ({hole}). "
            f"The actions are {', '.join(self.actions)}."
        )
        self.instruction = (rules if env_instruction is None else env_instruction) + meanings(
            grid_vocab
        )
        self._env: Any = self._build(
            None if size is None else generate_random_map(size, p, map_seed)
        )
        self._env.reset(seed=map_seed)
        self._random = random.Random(map_seed or 0)
        self._steps = 0

    def _build(self, rows: list[str] | None) -> Any:
        return _GymFrozenLake(desc=rows, map_name="4x4", is_slippery=self.is_slippery)

    def reset(self, seed: int | None = None) -> Reset:
        if self.size is not None:
            self._env = self._build(generate_random_map(self.size, self.p, seed))
        self._env.reset(seed=seed)
        self._random = random.Random(seed)
        self._steps = 0
        return self._observation(), {"env_instruction": self.instruction}

    def step(self, action: str) -> Step:
        self._steps += 1
        parsed = parse_action(action, self.action_pattern, self.actions)
        before = int(self._env.s)
        reward, terminated = self.format_penalty, False
        if parsed.name is not None:
            _, reward, terminated, _, _ = self._env.step(self.actions.index(parsed.name))
        success = terminated and float(reward) > 0
        if terminated and not success:
            reward = self.hole_penalty
        truncated = not terminated and self.max_steps is not None and self._steps >= self.max_steps
        metrics = {
            "success": success,
            "action_is_valid": parsed.name is not None,
            "action_is_effective": int(self._env.s) != before,
        }
        info: Info = {
            "metrics": metrics,
            "metrics_agg_mode": {"success": "last"},
            "action_content": parsed.content,
        }
        return self._observation(), float(reward), bool(terminated), bool(truncated), info

    def sample_random_action(self) -> str:
        """A valid answer, for the random proxy."""
        return answer_with(self.action_pattern, self._random.choice(self.actions))

    def _observation(self) -> str:
        cells = [[cell.decode() for cell in row] for row in self._env.desc]
        row, column = divmod(int(self._env.s), self._env.ncol)
        text = [[self._symbols[cell] for cell in line] for line in cells]
        text[row][column] = self._on_top[cells[row][column]]
        lines = [self.separator.join(line) for line in text]
        if self.neighbours:
            around = []
            for down, right in _MOVES:
                y, x = row + down, column + right
                inside = 0 <= y < self._env.nrow and 0 <= x < self._env.ncol
                around.append(self._symbols[cells[y][x]] if inside else "#")
            lines.append(self.separator.join(around))
        return "\n".join(lines)
