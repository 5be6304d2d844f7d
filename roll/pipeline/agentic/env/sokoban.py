"""Sokoban as text: push every box onto a target.

    # # # # #      # wall, _ floor, O target, X box, V box on a target, P player, S player on a target
    # _ X O #
    # P _ _ #
    # # # # #

Levels come from a seed and can always be solved: they are made by playing backwards. A solved position is laid out in a
random room, and the player then pulls the boxes away from their targets; pushing them back the same way solves it.

Each step costs 0.1, a box on a target gives 1, a box off a target takes it back, and the last box gives another 10.
A malformed answer adds `format_penalty` to the cost of a step and changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set

from roll.exceptions import ConfigError
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

Cell = tuple[int, int]

ACTIONS = ("Up", "Down", "Left", "Right")
_MOVES: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
_MAX_TRIES = 200


def _next(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


class SokobanEnv(Env):
    """Sokoban.

    Args:
        dim_room: rows and columns, walls around the room included.
        num_boxes: boxes, and targets.
        max_steps: actions of an episode, after which it is truncated.
        search_depth: moves of the player that are played backwards: the more, the longer the way to the solution.
        wall_density: share of the cells inside that are walls.
        step_penalty, box_reward, done_reward, format_penalty: rewards, see the module.
        action_pattern: where the action stands in the answer.
        separator: between the cells of a row.
        actions: names of the four actions, in the order up, down, left, right.
        action_lookup: ROLL's form of `actions`, by the numbers 1 to 4.
        grid_lookup: other symbols by ROLL's numbers: 0 wall, 1 floor, 2 target, 3 box on a target, 4 box, 5 player,
            6 player on a target.
        grid_vocab: what symbols mean; stands behind the rules.
        env_instruction: the rules as the policy reads them; "" leaves them out.
    """

    def __init__(
        self,
        *,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        max_steps: int = 20,
        search_depth: int = 30,
        wall_density: float = 0.15,
        step_penalty: float = -0.1,
        box_reward: float = 1.0,
        done_reward: float = 10.0,
        format_penalty: float = 0.0,
        action_pattern: str = r"<answer>(.*?)</answer>",
        separator: str = " ",
        actions: Sequence[str] = ACTIONS,
        action_lookup: Mapping[int, str] | None = None,
        grid_lookup: Mapping[int, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        env_instruction: str | None = None,
    ) -> None:
        if len(dim_room) != 2 or min(dim_room) < 4 or max(dim_room) < 5:
            expected = "rows and columns of at least 4, and one of at least 5, walls included"
            raise ConfigError(f"sokoban: dim_room: found {list(dim_room)}, expected {expected}")
        room = (dim_room[0] - 2) * (dim_room[1] - 2)
        if not 1 <= num_boxes <= room // 4:
            raise ConfigError(
                f"sokoban: num_boxes: found {num_boxes}, expected 1 to {room // 4} in a room of {room} cells"
            )
        if action_lookup is not None:
            actions = [action_lookup[number] for number in sorted(action_lookup)]
        if len(actions) != len(_MOVES):
            raise ConfigError(
                f"sokoban: actions: found {list(actions)}, expected names for up, down, left, right"
            )
        self.rows, self.columns = int(dim_room[0]), int(dim_room[1])
        self.num_boxes, self.max_steps = num_boxes, max_steps
        self.search_depth, self.wall_density = search_depth, wall_density
        self.step_penalty, self.box_reward = step_penalty, box_reward
        self.done_reward, self.format_penalty = done_reward, format_penalty
        self.action_pattern, self.separator, self.actions = (
            action_pattern,
            separator,
            tuple(actions),
        )
        self.ACTION_LOOKUP = dict(enumerate(self.actions, start=1))
        self._symbols = symbols_in_effect("sokoban", "#_OVXPS", grid_lookup)
        wall, _, target, _, box, player, _ = self._symbols
        rules = (
            f"Push every box ({box}) onto a target ({target}). Boxes can be pushed, one at a time, and not pulled. "
            f"{player} is you, {wall} is a wall. The actions are {', '.join(self.actions)}."
        )
        self.instruction = (rules if env_instruction is None else env_instruction) + meanings(
            grid_vocab
        )
        self.floor: frozenset[Cell] = frozenset()
        self.targets: frozenset[Cell] = frozenset()
        self.boxes: set[Cell] = set()
        self.player: Cell = (0, 0)
        self._random = random.Random(0)
        self._steps = 0

    def reset(self, seed: int | None = None) -> Reset:
        self._random = random.Random(seed)
        self._steps = 0
        for attempt in range(_MAX_TRIES):
            # Fewer walls each time: some rooms are too narrow to move a box in.
            if (
                self._lay_out(self.wall_density * (1 - attempt / _MAX_TRIES))
                and self._play_backwards()
            ):
                return self._observation(), {"env_instruction": self.instruction}
        raise RuntimeError(
            f"sokoban: no level of {self.rows}x{self.columns} with {self.num_boxes} boxes was found for seed {seed}; "
            "make the room larger, or search_depth"
        )

    def step(self, action: str) -> Step:
        self._steps += 1
        parsed = parse_action(action, self.action_pattern, self.actions)
        reward, moved = self.step_penalty, False
        if parsed.name is None:
            reward += self.format_penalty
        else:
            before = len(self.boxes & self.targets)
            moved = self._push(_MOVES[self.actions.index(parsed.name)])
            reward += self.box_reward * (len(self.boxes & self.targets) - before)
        success = self.boxes == self.targets
        if success:
            reward += self.done_reward
        truncated = not success and self._steps >= self.max_steps
        metrics = {
            "success": success,
            "action_is_valid": parsed.name is not None,
            "action_is_effective": moved,
        }
        info: Info = {
            "metrics": metrics,
            "metrics_agg_mode": {"success": "last"},
            "action_content": parsed.content,
        }
        return self._observation(), reward, success, truncated, info

    def sample_random_action(self) -> str:
        """A valid answer, for the random proxy."""
        return answer_with(self.action_pattern, self._random.choice(self.actions))

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _is_free(self, cell: Cell) -> bool:
        return cell in self.floor and cell not in self.boxes

    def _push(self, move: Cell) -> bool:
        """Walk one cell, pushing a box that stands there. False if something is in the way."""
        ahead = _next(self.player, move)
        if ahead in self.boxes:
            beyond = _next(ahead, move)
            if not self._is_free(beyond):
                return False
            self.boxes.remove(ahead)
            self.boxes.add(beyond)
        elif ahead not in self.floor:
            return False
        self.player = ahead
        return True

    def _pull(self, move: Cell, with_box: bool) -> bool:
        """The reverse of `_push`: walk one cell, and drag the box behind along. False if something is in the way."""
        ahead, behind = _next(self.player, move), _next(self.player, (-move[0], -move[1]))
        if not self._is_free(ahead):
            return False
        if with_box and behind in self.boxes:
            self.boxes.remove(behind)
            self.boxes.add(self.player)
        self.player = ahead
        return True

    # -- levels --------------------------------------------------------------------------------------------------------

    def _lay_out(self, wall_density: float) -> bool:
        """A room in one piece, in a solved position. False if it came out too small."""
        inside = [
            (row, column)
            for row in range(1, self.rows - 1)
            for column in range(1, self.columns - 1)
        ]
        free = {cell for cell in inside if self._random.random() >= wall_density}
        pieces: list[set[Cell]] = []
        while free:
            pieces.append(self._piece(min(free), free))
            free -= pieces[-1]
        self.floor = frozenset(
            max(pieces, key=lambda piece: (len(piece), min(piece)), default=frozenset())
        )
        if len(self.floor) < self.num_boxes + 3:
            return False
        *boxes, self.player = self._random.sample(sorted(self.floor), self.num_boxes + 1)
        self.boxes, self.targets = set(boxes), frozenset(boxes)
        return True

    def _play_backwards(self) -> bool:
        """Pull the boxes around, and keep the position in which they are farthest from their targets.

        False if some box never got off the targets.
        """
        best: tuple[int, set[Cell], Cell] | None = None
        for _ in range(self.search_depth):
            self._pull(self._random.choice(_MOVES), with_box=self._random.random() < 0.8)
            distance = sum(
                min(abs(b[0] - t[0]) + abs(b[1] - t[1]) for t in self.targets) for b in self.boxes
            )
            if not self.boxes & self.targets and (best is None or distance > best[0]):
                best = (distance, set(self.boxes), self.player)
        if best is None:
            return False
        _, self.boxes, self.player = best
        # Walking is its own reverse, so the player may start wherever it can walk to.
        self.player = self._random.choice(sorted(self._piece(self.player, self.floor - self.boxes)))
        return True

    @staticmethod
    def _piece(start: Cell, free: Set[Cell]) -> set[Cell]:
        """The cells of `free` that can be walked to."""
        piece, todo = {start}, [start]
        while todo:
            cell = todo.pop()
            fresh = {_next(cell, move) for move in _MOVES} & free - piece
            piece |= fresh
            todo += fresh
        return piece

    def _observation(self) -> str:
        return "\n".join(
            self.separator.join(self._symbol((row, column)) for column in range(self.columns))
            for row in range(self.rows)
        )

    def _symbol(self, cell: Cell) -> str:
        wall, floor, target, box_on_target, box, player, player_on_target = self._symbols
        is_target = cell in self.targets
        if cell == self.player:
            return player_on_target if is_target else player
        if cell in self.boxes:
            return box_on_target if is_target else box
        if cell not in self.floor:
            return wall
        return target if is_target else floor
