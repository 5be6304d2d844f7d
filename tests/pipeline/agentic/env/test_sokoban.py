"""Sokoban: rules by hand, and levels that a search solves."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env.registry import make
from roll.pipeline.agentic.env.sokoban import _MOVES, ACTIONS, SokobanEnv, _next


def set_up(text: str, **options) -> SokobanEnv:
    """An environment in a position that is drawn."""
    rows = [line.split() for line in text.strip().splitlines()]
    env = make("sokoban", dim_room=(len(rows), len(rows[0])), **options)
    cells = {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}
    env.floor = frozenset(place for place, cell in cells.items() if cell != "#")
    env.targets = frozenset(place for place, cell in cells.items() if cell in "OVS")
    env.boxes = {place for place, cell in cells.items() if cell in "XV"}
    env.player = next(place for place, cell in cells.items() if cell in "PS")
    return env


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"


LEVEL = """
# # # # # #
# P X _ O #
# _ _ _ _ #
# # # # # #
"""


def test_an_episode_by_hand():
    env = set_up(LEVEL)
    observation, reward, terminated, truncated, info = env.step(answer("right"))
    assert observation.splitlines()[1] == "# _ P X O #"
    assert (reward, terminated, truncated) == (-0.1, False, False)
    assert info["metrics"] == {
        "success": False,
        "action_is_valid": True,
        "action_is_effective": True,
    }
    observation, reward, terminated, _, info = env.step(answer("Right"))
    assert observation.splitlines()[1] == "# _ _ P V #"
    assert reward == pytest.approx(-0.1 + 1 + 10) and terminated
    assert info["metrics"]["success"] is True


def test_what_is_in_the_way():
    env = set_up("# # # # #\n# P X # #\n# _ O _ #\n# # # # #")
    for name in ("Up", "Left", "Right"):
        before = env._observation()
        observation, reward, terminated, _, info = env.step(answer(name))
        assert (observation, reward, terminated) == (before, -0.1, False)
        assert (
            info["metrics"]["action_is_effective"] is False
            and info["metrics"]["action_is_valid"] is True
        )


def test_two_boxes_in_a_row_do_not_move_and_boxes_leave_targets_at_a_cost():
    env = set_up("# # # # # # #\n# P V X _ O #\n# _ _ _ _ _ #\n# # # # # # #", num_boxes=2)
    assert env.step(answer("Right"))[0].splitlines()[1] == "# P V X _ O #"
    env = set_up("# # # # # #\n# P V _ _ #\n# _ _ _ _ #\n# # # # # #")
    observation, reward, *_ = env.step(answer("Right"))
    assert observation.splitlines()[1] == "# _ S X _ #" and reward == pytest.approx(-1.1)


def test_malformed_answers_cost_their_penalty_and_the_end_comes():
    env = set_up(LEVEL, format_penalty=-0.5, max_steps=2)
    before = env._observation()
    observation, reward, terminated, truncated, info = env.step("go right")
    assert (observation, reward, terminated, truncated) == (before, -0.6, False, False)
    assert info["metrics"]["action_is_valid"] is False
    assert env.step(answer("Down"))[3] is True


def shortest_solution(env: SokobanEnv) -> int | None:
    """Actions of a shortest solution, by breadth-first search."""
    start = (env.player, frozenset(env.boxes))
    seen, todo = {start: 0}, deque([start])
    while todo:
        player, boxes = todo.popleft()
        if boxes == env.targets:
            return seen[player, boxes]
        for move in _MOVES:
            ahead, after = _next(player, move), boxes
            if ahead in boxes:
                beyond = _next(ahead, move)
                if beyond not in env.floor or beyond in boxes:
                    continue
                after = boxes - {ahead} | {beyond}
            elif ahead not in env.floor:
                continue
            state = (ahead, after)
            if state not in seen:
                seen[state] = seen[player, boxes] + 1
                todo.append(state)
    return None


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    size=st.tuples(st.integers(5, 7), st.integers(4, 7)),
    boxes=st.integers(1, 2),
)
def test_every_level_can_be_solved_and_is_not_solved_yet(seed, size, boxes):
    room = (size[0] - 2) * (size[1] - 2)
    env = make("sokoban", dim_room=size, num_boxes=min(boxes, room // 4))
    observation, _ = env.reset(seed)
    solution = shortest_solution(env)
    assert solution is not None and solution > 0
    assert (
        observation.count("X") == observation.count("O") + observation.count("S") == env.num_boxes
    )
    assert make("sokoban", dim_room=size, num_boxes=env.num_boxes).reset(seed)[0] == observation


def test_deeper_search_makes_longer_solutions():
    def mean_length(depth: int) -> float:
        env = make("sokoban", search_depth=depth)
        lengths = []
        for seed in range(30):
            env.reset(seed)
            lengths.append(shortest_solution(env))
        return sum(lengths) / len(lengths)

    assert mean_length(100) > mean_length(5)


def test_levels_differ_and_names_can_be_chosen():
    env = make(
        "sokoban",
        actions=["u", "d", "l", "r"],
        action_pattern=r"([udlr])",
        separator="",
        env_instruction="",
    )
    levels = {env.reset(seed)[0] for seed in range(20)}
    assert len(levels) > 15 and all(len(level) == 6 * 7 - 1 for level in levels)
    assert env.reset(0)[1] == {"env_instruction": ""}
    assert env.step("u")[4]["metrics"]["action_is_valid"] is True
    assert env.sample_random_action() in "udlr"
    assert ACTIONS[0] in make("sokoban").reset(0)[1]["env_instruction"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dim_room": (3, 6)}, "dim_room: found"),
        ({"dim_room": (4, 4)}, "dim_room: found"),
        ({"num_boxes": 0}, "num_boxes: found 0, expected 1 to 4"),
        ({"num_boxes": 5}, "num_boxes: found 5, expected 1 to 4"),
        ({"actions": ["a"]}, "actions: found"),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(ConfigError, match=message):
        make("sokoban", **config)


def test_symbols_as_roll_names_them():
    symbols = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}
    plain, renamed = SokobanEnv(), SokobanEnv(grid_lookup=symbols, grid_vocab={"W": "wall"})
    table = str.maketrans(dict(zip("#_OVXPS", symbols.values(), strict=True)))
    for seed in range(5):
        assert renamed.reset(seed)[0] == plain.reset(seed)[0].translate(table)
    assert renamed.instruction.startswith("Push every box (B) onto a target (G).")
    assert renamed.instruction.endswith(
        "A is you, W is a wall. The actions are Up, Down, Left, Right. The symbols are W: wall."
    )
    assert renamed.ACTION_LOOKUP == {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
