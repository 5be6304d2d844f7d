"""Sokoban as text: push every box onto a target.

    # # # # #      # wall, _ floor, O target, X box, V box on a target, P player, S player on one
    # _ X O #
    # P _ _ #
    # # # # #

Levels come from a seed and can always be solved: they are made by playing backwards. A solved
position is laid out in a random room, and the player then pulls the boxes away from their targets;
pushing them back the same way solves it.

Each step costs 0.1, a box on a target gives 1, a box off a target takes it back, and the last box
gives another 10. A malformed answer adds `format_penalty` to the cost of a step and nothing else.
"""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env import GridGame, Reset, Step, parse_action, step_info

Cell = tuple[int, int]

ACTIONS = ("Up", "Down", "Left", "Right")
_MOVES: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
_MAX_TRIES = 200


def _next(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


@dataclass(kw_only=True, eq=False)
class SokobanEnv(GridGame):
    """Sokoban. ROLL's numbers of symbols: wall, floor, target, box on a target, box, player, player
    on a target."""

    name = "sokoban"
    directions = "up, down, left, right"
    first_action = 1
    standard_symbols = "#_OVXPS"

    actions: Sequence[str] = ACTIONS
    dim_room: Sequence[int] = (6, 6)  # rows and columns, walls around the room included
    num_boxes: int = 1  # boxes, and targets
    max_steps: int = 20  # actions after which the episode is truncated
    search_depth: int = 30  # moves that are played backwards: more make longer solutions
    wall_density: float = 0.15  # share of the cells inside that are walls
    step_penalty: float = -0.1
    box_reward: float = 1.0
    done_reward: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        dim_room = self.dim_room
        if len(dim_room) != 2 or min(dim_room) < 4 or max(dim_room) < 5:
            expected = "rows and columns of at least 4, and one of at least 5, walls included"
            raise ConfigError(f"sokoban: dim_room: found {list(dim_room)}, expected {expected}")
        self.rows, self.columns = int(dim_room[0]), int(dim_room[1])
        room = (self.rows - 2) * (self.columns - 2)
        if not 1 <= self.num_boxes <= room // 4:
            expected = f"1 to {room // 4} in a room of {room} cells"
            raise ConfigError(f"sokoban: num_boxes: found {self.num_boxes}, expected {expected}")
        self.floor: frozenset[Cell] = frozenset()
        self.targets: frozenset[Cell] = frozenset()
        self.boxes: set[Cell] = set()
        self.player: Cell = (0, 0)

    def reset(self, seed: int | None = None) -> Reset:
        self._random, self._steps = random.Random(seed), 0
        for attempt in range(_MAX_TRIES):
            # Fewer walls each time: some rooms are too narrow to move a box in.
            density = self.wall_density * (1 - attempt / _MAX_TRIES)
            if self._lay_out(density) and self._play_backwards():
                break
        else:
            raise RuntimeError(
                f"sokoban: no level of {self.rows}x{self.columns} with {self.num_boxes} boxes was "
                f"found for seed {seed}; make the room larger, or search_depth"
            )
        wall, _, target, _, box, player, _ = self.symbols
        return self.start(
            f"Push every box ({box}) onto a target ({target}). Boxes can be pushed, one at a time, "
            f"and not pulled. {player} is you, {wall} is a wall. "
            f"The actions are {', '.join(self.actions)}."
        )

    def step(self, action: str) -> Step:
        self._steps += 1
        name = parse_action(action, self.action_pattern, self.actions).name
        reward, moved = self.step_penalty, False
        if name is None:
            reward += self.format_penalty
        else:
            before = len(self.boxes & self.targets)
            moved = self._push(_MOVES[self.actions.index(name)])
            reward += self.box_reward * (len(self.boxes & self.targets) - before)
        success = self.boxes == self.targets
        if success:
            reward += self.done_reward
        truncated = not success and self._steps >= self.max_steps
        info = step_info(
            success=success, action_is_valid=name is not None, action_is_effective=moved
        )
        return self.board(), reward, success, truncated, info

    def _push(self, move: Cell) -> bool:
        """Walk one cell, pushing a box that stands there. False if something is in the way."""
        ahead = _next(self.player, move)
        if ahead in self.boxes:
            beyond = _next(ahead, move)
            if beyond not in self.floor or beyond in self.boxes:
                return False
            self.boxes.remove(ahead)
            self.boxes.add(beyond)
        elif ahead not in self.floor:
            return False
        self.player = ahead
        return True

    def _lay_out(self, wall_density: float) -> bool:
        """A room in one piece, in a solved position. False if it came out too small."""
        free = {
            (row, column)
            for row in range(1, self.rows - 1)
            for column in range(1, self.columns - 1)
            if self._random.random() >= wall_density
        }
        pieces: list[set[Cell]] = []
        while free:
            pieces.append(_piece(min(free), free))
            free -= pieces[-1]
        largest = max(pieces, key=lambda piece: (len(piece), min(piece)), default=frozenset())
        self.floor = frozenset(largest)
        if len(self.floor) < self.num_boxes + 3:
            return False
        *boxes, self.player = self._random.sample(sorted(self.floor), self.num_boxes + 1)
        self.boxes, self.targets = set(boxes), frozenset(boxes)
        return True

    def _play_backwards(self) -> bool:
        """Pull the boxes around, and keep the position in which they are farthest from the targets.

        False if some box never got off the targets.
        """
        best: tuple[int, set[Cell], Cell] | None = None
        for _ in range(self.search_depth):
            # The reverse of `_push`: walk one cell, and perhaps drag the box behind along.
            move, with_box = self._random.choice(_MOVES), self._random.random() < 0.8
            ahead, behind = _next(self.player, move), _next(self.player, (-move[0], -move[1]))
            if ahead in self.floor and ahead not in self.boxes:
                if with_box and behind in self.boxes:
                    self.boxes.remove(behind)
                    self.boxes.add(self.player)
                self.player = ahead
            distance = sum(
                min(abs(b[0] - t[0]) + abs(b[1] - t[1]) for t in self.targets) for b in self.boxes
            )
            if not self.boxes & self.targets and (best is None or distance > best[0]):
                best = (distance, set(self.boxes), self.player)
        if best is None:
            return False
        _, self.boxes, self.player = best
        # Walking is its own reverse, so the player may start wherever it can walk to.
        self.player = self._random.choice(sorted(_piece(self.player, self.floor - self.boxes)))
        return True

    def board(self) -> str:
        wall, floor, target, box_on_target, box, player, player_on_target = self.symbols
        lines = []
        for row in range(self.rows):
            line = []
            for cell in ((row, column) for column in range(self.columns)):
                is_target = cell in self.targets
                if cell == self.player:
                    line.append(player_on_target if is_target else player)
                elif cell in self.boxes:
                    line.append(box_on_target if is_target else box)
                elif cell not in self.floor:
                    line.append(wall)
                else:
                    line.append(target if is_target else floor)
            lines.append(self.separator.join(line))
        return "\n".join(lines)


def _piece(start: Cell, free: Set[Cell]) -> set[Cell]:
    """The cells of `free` that can be walked to."""
    piece, todo = {start}, [start]
    while todo:
        cell = todo.pop()
        fresh = {_next(cell, move) for move in _MOVES} & free - piece
        piece |= fresh
        todo += fresh
    return piece
