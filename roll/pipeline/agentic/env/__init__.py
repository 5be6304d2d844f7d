"""Environments: the protocol, the registry, and what the environments that come along share.

    observation, info = env.reset(seed)                                   # text, and a dict
    observation, reward, terminated, truncated, info = env.step(action)   # action: text

ROLL and GEM use the same protocol, so their environments work here. Keys of `info` that are read:

    env_instruction    at reset: the rules; stands in front of the first observation, or where a
                       template puts it
    suffix             text for the placeholder {suffix} of the template
    metrics            numbers of this step: `success`, `action_is_valid` ... (bools are 0 and 1)
    metrics_agg_mode   how a metric becomes one of the episode: mean (default), sum, max, min,
                       first, last
    state              what identifies the state for GiGPO; the observation if left out

`make` finds an environment by its id, by its dotted path, or through an adapter:

    env = make("sokoban", num_boxes=2)
    env = make("my_package.games.MyGame", size=4)   # one of your own, without registration
    env = make("gymnasium:Taxi-v3")
    env = make("game:GuessTheNumber-v0")            # one of GEM's, by GEM's own id

Nothing here imports torch: environments run in processes of their own.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from roll.configs.roll_keys import UNSUPPORTED_ENVIRONMENTS
from roll.exceptions import ConfigError
from roll.utils.import_utils import import_from

Info = dict[str, Any]
Reset = tuple[str, Info]
Step = tuple[str, float, bool, bool, Info]
EntryPoint = str | Callable[..., Any]

ANSWER = r"<answer>(.*?)</answer>"
_HERE = "roll.pipeline.agentic.env"
_known: dict[str, EntryPoint] = {
    "frozen_lake": f"{_HERE}.frozen_lake:FrozenLakeEnv",
    "sokoban": f"{_HERE}.sokoban:SokobanEnv",
    "guess_number": f"{_HERE}.guess_number:GuessNumberEnv",
    "tool_task": f"{_HERE}.questions:ToolTaskEnv",
    "math": f"{_HERE}.questions:MathEnv",
    "roll_math": f"{_HERE}.questions:MathEnv",
    "roll_qa": f"{_HERE}.adapters:GemQaEnv",
    "roll_code": f"{_HERE}.adapters:GemCodeEnv",
}
_GYMNASIUM, _GEM = f"{_HERE}.adapters:GymnasiumEnv", f"{_HERE}.adapters:GemEnv"
# What stands before the colon in the ids of GEM's own environments.
_GEM_FAMILIES = ("game", "math", "rg", "qa", "code", "logic", "eval")


@runtime_checkable
class Env(Protocol):
    """An environment that takes and gives text. A subclass needs `reset` and `step`."""

    def reset(self, seed: int | None = None) -> Reset:
        """Start an episode; the same seed gives the same episode for the same actions."""
        ...

    def step(self, action: str) -> Step:
        """Answer one action, whatever the text is; malformed ones, too."""
        ...

    def close(self) -> None:
        """Free what the environment holds."""
        return None


def register(env_id: str, entry_point: EntryPoint) -> None:
    """Make a class (or function), or its path `module:Class`, known as `env_id` in this process."""
    _known[env_id] = entry_point


def make(env_id: EntryPoint, /, **config: Any) -> Any:
    """The environment `env_id`, made with `config`."""
    entry_point, leading = entry_point_of(env_id)
    return load_entry_point(entry_point)(*leading, **config)


def entry_point_of(env_id: EntryPoint) -> tuple[EntryPoint, tuple[str, ...]]:
    """What makes the environment, and the arguments in front of its own.

    A class stands for itself; a text is an id, a dotted path, or an adapter's `prefix:ID`.
    """
    if not isinstance(env_id, str):
        return env_id, ()
    if env_id in _known:
        return _known[env_id], ()
    prefix, colon, rest = env_id.partition(":")
    if colon and prefix == "gymnasium":
        return _GYMNASIUM, (rest,)
    if colon and prefix in ("gem", *_GEM_FAMILIES):
        return _GEM, (rest if prefix == "gem" else env_id,)
    if colon or "." in env_id:
        return env_id, ()
    if env_id in UNSUPPORTED_ENVIRONMENTS:
        why = UNSUPPORTED_ENVIRONMENTS[env_id]
        raise ConfigError(f"the environment {env_id!r} is not built yet: {why}")
    near = get_close_matches(env_id, _known, n=1)
    prefixes = ", ".join(f"{prefix}:ID" for prefix in ("gymnasium", "gem", *_GEM_FAMILIES))
    raise ConfigError(
        f"there is no environment {env_id!r}{f'; did you mean {near[0]!r}?' if near else '.'} "
        f"Known are {', '.join(sorted(_known))}, dotted paths such as my_package.games.MyGame, "
        f"and {prefixes}"
    )


def load_entry_point(entry_point: EntryPoint) -> Callable[..., Any]:
    """The class behind `module:Class`, `module.Class`, or the class itself."""
    if not isinstance(entry_point, str):
        return entry_point
    module_name, colon, name = entry_point.partition(":")
    if not colon:
        module_name, _, name = entry_point.rpartition(".")
    return import_from(module_name, name, named=f"environment {entry_point!r}")


class ParsedAction(NamedTuple):
    """What was found in an answer: `name` is None where there is no valid action."""

    name: str | None
    content: str
    think: str = ""


def parse_action(text: str, pattern: str, known: Iterable[str]) -> ParsedAction:
    """The action in `text`: the last group of `pattern`; one before it may hold a thought.

    `known` are the names of the actions; upper and lower case are the same.
    Example: parse_action("<answer>left</answer>", ANSWER, ["Left", "Right"]).name == "Left".
    """
    groups = find_groups(pattern, text)
    if groups is None:
        return ParsedAction(None, text)
    content = groups[-1].strip()
    think = groups[0].strip() if len(groups) > 1 else ""
    names = {name.lower(): name for name in known}
    return ParsedAction(names.get(content.lower()), content, think)


def find_groups(pattern: str, text: str, *, last: bool = False) -> list[str] | None:
    """What the groups of a pattern found in a text (all of the match if it has none), or None.

    It is the first match that counts, or the `last` one.
    """
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    match = matches[-1 if last else 0]
    # Of alternatives with a group each, all but one took no part in the match.
    groups = [group for group in match.groups() if group is not None]
    return groups or [match[0]]


def answer_with(pattern: str, action: str) -> str:
    """The reverse of `parse_action`: `pattern` with `action` in the place of its last group.

    It is the action alone where the pattern says more than texts.
    """
    plain = pattern.removeprefix("^").removesuffix("$").replace(r"\s*", "").replace(r"\s+", " ")
    texts = re.split(r"\([^()]*\)", plain)
    text = "".join(texts[:-1]) + action + texts[-1] if len(texts) > 1 else action
    groups = find_groups(pattern, text)
    return text if groups is not None and groups[-1].strip() == action else action


def step_info(**metrics: float) -> Info:
    """The `info` of a step: its metrics; `success` counts as it is at the end."""
    return {"metrics": metrics, "metrics_agg_mode": {"success": "last"}}


@dataclass(kw_only=True, eq=False)
class GridGame(Env):
    """What FrozenLake and Sokoban share: four named actions, the symbols of a board, and rules."""

    name: ClassVar[str]
    directions: ClassVar[str]  # what the four actions do, in order
    first_action: ClassVar[int]  # ROLL's number of the first
    standard_symbols: ClassVar[str]  # in the order of ROLL's numbers

    actions: Sequence[str]  # names of the four actions, in the order of `directions`
    action_lookup: Mapping[int, str] | None = None  # ROLL's form of `actions`, by its numbers
    action_pattern: str = ANSWER  # where the action stands in the answer
    format_penalty: float = 0.0  # reward of an answer without a valid action
    separator: str = " "  # between the cells of a row
    grid_lookup: Mapping[int, str] | None = None  # other symbols, by ROLL's numbers
    grid_vocab: Mapping[str, str] | None = None  # what symbols mean; stands behind the rules
    env_instruction: str | None = None  # the rules as the policy reads them; "" leaves them out

    def __post_init__(self) -> None:
        lookup = self.action_lookup
        if lookup is not None:
            self.actions = [lookup[number] for number in sorted(lookup)]
        if len(self.actions) != 4:
            found = f"found {list(self.actions)}, expected names for {self.directions}"
            raise ConfigError(f"{self.name}: actions: {found}")
        self.actions = tuple(self.actions)
        self.ACTION_LOOKUP = dict(enumerate(self.actions, start=self.first_action))
        own, last = self.grid_lookup or {}, len(self.standard_symbols) - 1
        unknown = [number for number in own if number not in range(last + 1)]
        if unknown:
            found = f"found {unknown}, expected numbers from 0 to {last}"
            raise ConfigError(f"{self.name}: grid_lookup: {found}")
        self.symbols = [own.get(i, symbol) for i, symbol in enumerate(self.standard_symbols)]
        self._random, self._steps = random.Random(0), 0

    def start(self, rules: str) -> Reset:
        """What reset returns: the board, and the rules of the game or of the config."""
        text = rules if self.env_instruction is None else self.env_instruction
        if self.grid_vocab is not None:
            meanings = [f"{symbol}: {meaning}" for symbol, meaning in self.grid_vocab.items()]
            text += f" The symbols are {', '.join(meanings)}."
        return self.board(), {"env_instruction": text}

    def board(self) -> str:
        raise NotImplementedError

    def sample_random_action(self) -> str:
        """A valid answer, for the random proxy."""
        return answer_with(self.action_pattern, self._random.choice(self.actions))
