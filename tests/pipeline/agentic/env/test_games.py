"""FrozenLake, Sokoban and guessing: rules by hand, and levels that a search solves."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env import make
from roll.pipeline.agentic.env.sokoban import _MOVES, SokobanEnv, _next


def answer(text: object) -> str:
    return f"<answer>{text}</answer>"


@pytest.fixture
def lake():
    pytest.importorskip("gymnasium")

    def start(**options):
        env = make("frozen_lake", **options)
        return env, *env.reset(seed=0)

    return start


def test_the_way_over_the_lake(lake):
    env, observation, info = lake()
    assert observation == "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G"
    assert "The actions are Left, Down, Right, Up." in info["env_instruction"]
    for action in ("Down", "Down", "Right", "Right", "Down"):
        assert env.step(answer(action))[1:4] == (0.0, False, False)
    observation, reward, terminated, _, info = env.step(answer("Right"))
    assert observation.endswith("O _ _ V") and reward == 1.0 and terminated
    metrics = {"success": True, "action_is_valid": True, "action_is_effective": True}
    assert info == {"metrics": metrics, "metrics_agg_mode": {"success": "last"}}


def test_a_hole_ends_the_episode_and_an_edge_has_no_effect(lake):
    env, *_ = lake(hole_penalty=-0.5)
    metrics = env.step(answer("Left"))[4]["metrics"]
    assert metrics["action_is_valid"] and not metrics["action_is_effective"]
    env.step(answer("Right"))
    observation, reward, terminated, _, info = env.step(answer("down"))
    assert observation.splitlines()[1] == "_ X _ O" and reward == -0.5 and terminated
    assert info["metrics"]["success"] is False


@pytest.mark.parametrize("text", ["", "Left", answer("jump"), "<answer>", answer("Left Right")])
def test_a_malformed_answer_changes_nothing(lake, text):
    env, before, _ = lake(format_penalty=-0.1)
    after, reward, terminated, _, info = env.step(text)
    assert (after, reward, terminated) == (before, -0.1, False)
    assert not info["metrics"]["action_is_valid"]


def test_random_maps_depend_on_the_seed_alone(lake):
    options = {"size": 3, "neighbours": True}
    env, *_ = lake(**options)
    maps = [env.reset(seed)[0] for seed in range(20)]
    assert maps == [lake(**options)[0].reset(seed)[0] for seed in range(20)]
    assert len(set(maps)) > 5
    # The last line says what is around the player, who begins in the corner.
    assert all(text.splitlines()[3].split()[0] == "#" for text in maps)


def test_the_map_before_the_first_reset_comes_from_map_seed(lake):
    def first(**options):
        return make("frozen_lake", **options).step("")[0]

    assert first(map_seed=42) == first(size=4, map_seed=42)
    assert len({first(map_seed=seed) for seed in range(8)}) > 3
    # A reset goes by its own seed alone.
    reset = make("frozen_lake", map_seed=42).reset(seed=7)
    assert reset == make("frozen_lake", size=4).reset(seed=7)


def test_names_symbols_and_limits_of_the_lake(lake):
    env, observation, info = lake(
        actions="LDRU", action_pattern="^([LDRU])$", separator="", env_instruction="", max_steps=2
    )
    assert observation == "P___\n_O_O\n___O\nO__G" and info["env_instruction"] == ""
    assert env.step("D")[0].startswith("____\nPO_O")
    assert env.step("D")[3]  # truncated
    assert env.sample_random_action() in "LDRU"
    env, observation, info = lake(
        grid_lookup={0: "@", 2: "H"},
        grid_vocab={"@": "you", "H": "hole"},
        action_lookup={0: "West", 1: "South", 2: "East", 3: "North"},
    )
    assert observation == "@ _ _ _\n_ H _ H\n_ _ _ H\nH _ _ G"
    assert info["env_instruction"] == (
        "Move the player @ over the ice (_) to the goal (G) without falling into a hole (H). "
        "The actions are West, South, East, North. The symbols are @: you, H: hole."
    )
    assert env.ACTION_LOOKUP[1] == "South"
    assert env.step(answer("South"))[0].startswith("_ _ _ _\n@")


def set_up(text: str, **options) -> SokobanEnv:
    """Sokoban in a position that is drawn."""
    rows = [line.split() for line in text.strip().splitlines()]
    env = make("sokoban", dim_room=(len(rows), len(rows[0])), **options)
    cells = {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}
    env.floor = frozenset(place for place, cell in cells.items() if cell != "#")
    env.targets = frozenset(place for place, cell in cells.items() if cell in "OVS")
    env.boxes = {place for place, cell in cells.items() if cell in "XV"}
    env.player = next(place for place, cell in cells.items() if cell in "PS")
    return env


LEVEL = "# # # # # #\n# P X _ O #\n# _ _ _ _ #\n# # # # # #"


def test_sokoban_by_hand():
    env = set_up(LEVEL)
    observation, reward, terminated, truncated, info = env.step(answer("right"))
    assert observation.splitlines()[1] == "# _ P X O #"
    assert (reward, terminated, truncated) == (-0.1, False, False)
    metrics = {"success": False, "action_is_valid": True, "action_is_effective": True}
    assert info["metrics"] == metrics
    observation, reward, terminated, _, info = env.step(answer("Right"))
    assert observation.splitlines()[1] == "# _ _ P V #"
    assert reward == pytest.approx(-0.1 + 1 + 10) and terminated
    assert info["metrics"]["success"] is True


def test_what_is_in_the_way_of_a_box():
    env = set_up("# # # # #\n# P X # #\n# _ O _ #\n# # # # #")
    for name in ("Up", "Left", "Right"):
        before = env.board()
        observation, reward, terminated, _, info = env.step(answer(name))
        assert (observation, reward, terminated) == (before, -0.1, False)
        assert info["metrics"]["action_is_valid"] and not info["metrics"]["action_is_effective"]
    two = set_up("# # # # # # #\n# P V X _ O #\n# _ _ _ _ _ #\n# # # # # # #", num_boxes=2)
    assert two.step(answer("Right"))[0].splitlines()[1] == "# P V X _ O #"
    # A box that leaves its target takes the reward back.
    env = set_up("# # # # # #\n# P V _ _ #\n# _ _ _ _ #\n# # # # # #")
    observation, reward, *_ = env.step(answer("Right"))
    assert observation.splitlines()[1] == "# _ S X _ #" and reward == pytest.approx(-1.1)


def test_malformed_answers_cost_their_penalty_and_the_end_comes():
    env = set_up(LEVEL, format_penalty=-0.5, max_steps=2)
    before = env.board()
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
            if (ahead, after) not in seen:
                seen[ahead, after] = seen[player, boxes] + 1
                todo.append((ahead, after))
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
    targets = observation.count("O") + observation.count("S")
    assert observation.count("X") == targets == env.num_boxes
    assert make("sokoban", dim_room=size, num_boxes=env.num_boxes).reset(seed)[0] == observation


def test_deeper_search_makes_longer_solutions():
    def total_length(depth: int) -> int:
        env = make("sokoban", search_depth=depth)
        lengths = [shortest_solution(env) for seed in range(30) if env.reset(seed)]
        return sum(lengths)

    assert total_length(100) > total_length(5)


def test_levels_differ_and_names_and_symbols_can_be_chosen():
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
    symbols = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}
    plain, renamed = SokobanEnv(), SokobanEnv(grid_lookup=symbols, grid_vocab={"W": "wall"})
    table = str.maketrans(dict(zip("#_OVXPS", symbols.values(), strict=True)))
    for seed in range(5):
        observation, info = renamed.reset(seed)
        assert observation == plain.reset(seed)[0].translate(table)
    assert info["env_instruction"] == (
        "Push every box (B) onto a target (G). Boxes can be pushed, one at a time, and not pulled. "
        "A is you, W is a wall. The actions are Up, Down, Left, Right. The symbols are W: wall."
    )
    assert renamed.ACTION_LOOKUP == {1: "Up", 2: "Down", 3: "Left", 4: "Right"}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), show_range=st.booleans())
def test_halving_always_finds_the_number(seed, show_range):
    env = make("guess_number", low=1, high=15, max_steps=4, show_range=show_range)
    assert env.reset(seed)[0] == "1-15"
    low, high = 1, 15
    for _ in range(4):
        guess = (low + high) // 2
        observation, reward, terminated, truncated, info = env.step(answer(guess))
        if terminated:
            break
        assert reward == 0.0
        if show_range:
            low, high = map(int, observation.split("-"))
        else:
            low, high = (guess + 1, high) if observation == "higher" else (low, guess - 1)
    assert terminated and not truncated and reward == 1.0 and info["metrics"]["success"] is True


def test_malformed_and_wrong_guesses():
    env = make("guess_number", high=10, max_steps=3, format_penalty=-0.5, wrong_penalty=-0.1)
    secrets = set()
    for seed in range(60):
        env.reset(seed)
        secrets.add(env._secret)
    assert secrets == set(range(1, 11))
    assert env.step("five")[:4] == ("invalid", -0.5, False, False)
    assert env.step(answer(11))[:2] == ("invalid", -0.5)
    wrong = env._secret % 10 + 1
    observation, reward, terminated, truncated, info = env.step(answer(wrong))
    assert (reward, terminated, truncated) == (-0.1, False, True)
    assert observation == ("higher" if wrong < env._secret else "lower")
    assert info["metrics"] == {"success": False, "action_is_valid": True}


@pytest.mark.parametrize(
    ("env_id", "config", "message"),
    [
        ("frozen_lake", {"size": 1}, "size: found 1, expected at least 2"),
        ("frozen_lake", {"actions": "LR"}, "expected names for left, down, right, up"),
        ("frozen_lake", {"grid_lookup": {6: "x"}}, r"found \[6\], expected numbers from 0 to 5"),
        ("frozen_lake", {"grid_lookup": {"0": "x"}}, r"found \['0'\], expected numbers from 0"),
        ("sokoban", {"dim_room": (3, 6)}, "dim_room: found"),
        ("sokoban", {"dim_room": (4, 4)}, "dim_room: found"),
        ("sokoban", {"num_boxes": 0}, "num_boxes: found 0, expected 1 to 4"),
        ("sokoban", {"num_boxes": 5}, "num_boxes: found 5, expected 1 to 4"),
        ("sokoban", {"actions": ["a"]}, "actions: found .* names for up, down, left, right"),
        ("guess_number", {"high": 1}, "high: found 1, expected more than low = 1"),
    ],
)
def test_options_that_make_no_sense(env_id, config, message):
    if env_id == "frozen_lake":
        pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=message):
        make(env_id, **config)
