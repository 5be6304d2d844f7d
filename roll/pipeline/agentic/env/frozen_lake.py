"""FrozenLake as text: cross the ice to the goal, around the holes. Built on gymnasium's.

    P _ _ _      P player, _ ice, O hole, G goal; X the player in a hole, V the player on the goal
    _ O _ O
    _ _ _ O
    O _ _ G

Reaching the goal gives 1 and ends the episode, a hole gives 0 and ends it, a malformed answer gives
`format_penalty` and changes nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.pipeline.agentic.env import GridGame, Reset, Step, parse_action, step_info

try:
    from gymnasium.envs.toy_text import frozen_lake as gym
except ImportError as error:
    raise MissingDependencyError(
        f"the environment frozen_lake needs gymnasium, which is not installed: "
        f"{install_hint('envs')}"
    ) from error

ACTIONS = ("Left", "Down", "Right", "Up")  # gymnasium's numbers 0 to 3
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


@dataclass(kw_only=True, eq=False)
class FrozenLakeEnv(GridGame):
    """ROLL's numbers of symbols: player, ice, hole, goal, player in a hole, on the goal."""

    name = "frozen_lake"
    directions = "left, down, right, up"
    first_action = 0
    standard_symbols = "P_OGXV"

    actions: Sequence[str] = ACTIONS
    size: int | None = None  # side of a random map; None is gymnasium's 4x4 map for every seed
    p: float = 0.8  # probability that a cell of a random map is ice; there is always a way
    map_seed: int | None = None  # of the map before the first reset, which draws its own
    is_slippery: bool = False  # the ice may take the player to the side
    max_steps: int | None = None  # actions after which the episode is truncated
    hole_penalty: float = 0.0  # reward of stepping into a hole
    neighbours: bool = False  # also say what lies left, below, right and above (# is the edge)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.map_seed is not None and self.size is None:
            self.size = 4
        if self.size is not None and self.size < 2:
            expected = "at least 2, or null for the standard 4x4 map"
            raise ConfigError(f"frozen_lake: size: found {self.size}, expected {expected}")
        self._env: Any = None
        self.reset(self.map_seed)
        self._random = random.Random(self.map_seed or 0)

    def reset(self, seed: int | None = None) -> Reset:
        if self._env is None or self.size is not None:
            rows = None if self.size is None else gym.generate_random_map(self.size, self.p, seed)
            self._env = gym.FrozenLakeEnv(desc=rows, map_name="4x4", is_slippery=self.is_slippery)
        self._env.reset(seed=seed)
        self._random, self._steps = random.Random(seed), 0
        player, ice, hole, goal = self.symbols[:4]
        return self.start(
            f"Move the player {player} over the ice ({ice}) to the goal ({goal}) without falling "
            f"into a hole ({hole}). The actions are {', '.join(self.actions)}."
        )

    def step(self, action: str) -> Step:
        self._steps += 1
        name = parse_action(action, self.action_pattern, self.actions).name
        before = int(self._env.s)
        reward, terminated = self.format_penalty, False
        if name is not None:
            _, reward, terminated, _, _ = self._env.step(self.actions.index(name))
        success = terminated and float(reward) > 0
        if terminated and not success:
            reward = self.hole_penalty
        truncated = not terminated and self.max_steps is not None and self._steps >= self.max_steps
        info = step_info(
            success=success,
            action_is_valid=name is not None,
            action_is_effective=int(self._env.s) != before,
        )
        return self.board(), float(reward), bool(terminated), bool(truncated), info

    def board(self) -> str:
        player, ice, hole, goal, in_hole, on_goal = self.symbols
        ground = {"S": ice, "F": ice, "H": hole, "G": goal}
        player_on = {"S": player, "F": player, "H": in_hole, "G": on_goal}
        cells = [[cell.decode() for cell in row] for row in self._env.desc]
        row, column = divmod(int(self._env.s), self._env.ncol)
        text = [[ground[cell] for cell in line] for line in cells]
        text[row][column] = player_on[cells[row][column]]
        if self.neighbours:
            around = []
            for down, right in _MOVES:
                y, x = row + down, column + right
                inside = 0 <= y < self._env.nrow and 0 <= x < self._env.ncol
                around.append(ground[cells[y][x]] if inside else "#")
            text.append(around)
        return "\n".join(self.separator.join(line) for line in text)
