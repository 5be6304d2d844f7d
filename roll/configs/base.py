"""What all config classes share: they are frozen, know every key, and say what is wrong.

A config reaches its final values while it is made: validators fill in what follows from other
fields (`ConfigModel.settle`). From then on nothing changes, so a config may be shared and compared.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from roll.configs.roll_keys import UNSUPPORTED_KEYS, NotBuilt, keys_without_effect
from roll.exceptions import ConfigError

# -- problems and their words ----------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One thing to correct. `key` is the dotted path of the key in the config."""

    key: str
    message: str
    instead: str | None = None
    """Of an unknown key: the key that was probably meant, or "". None: the value is wrong."""

    def under(self, prefix: str) -> Problem:
        return replace(self, key=".".join(part for part in (prefix, self.key) if part))

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigProblems(ValueError):
    """What a validator raises; keys are relative to the validator's class or field."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(map(str, self.problems)))


def wrong(key: str, found: Any, expected: str, fix: str = "") -> Problem:
    """The standard sentence: `key: found 3 (int), expected ...; fix`."""
    return Problem(key, f"found {show(found)}, expected {expected}" + (f"; {fix}" if fix else ""))


def show(value: Any) -> str:
    """A value as a reader of YAML knows it: `"many" (str)`, `null`, `[1, 2] (list)`."""
    if value is None:
        return "null"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    kind = "mapping" if isinstance(value, dict) else type(value).__name__
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean "beta"?` for the nearest known word, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else ""


def nearest_multiples(value: int, divisor: int) -> tuple[int, int]:
    """The positive multiples of `divisor` around `value`, which is none: (100, 16) -> 96, 112."""
    below = value // divisor * divisor
    return (below, below + divisor) if below > 0 else (divisor, 2 * divisor)


def problems_of(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]
) -> list[Problem]:
    """Pydantic's errors about `values` as problems of `model`."""
    problems: list[Problem] = []
    expected: dict[str, list[str]] = {}  # by key: what each alternative of a union wanted
    hints: dict[str, tuple[Any, str]] = {}
    for detail in error.errors(include_url=False):
        path: list[str] = []
        inside: Any = values
        for part in detail["loc"]:
            # Unions put the names of their alternatives between the keys of the file: skip those.
            is_index = isinstance(inside, list) and isinstance(part, int)
            if is_index or (isinstance(inside, dict) and part in inside):
                path.append(str(part))
                inside = inside[part]
        key, found, context = ".".join(path), detail["input"], detail.get("ctx", {})
        cause = context.get("error")
        if isinstance(cause, ConfigProblems):
            problems += [problem.under(key) for problem in cause.problems]
        elif isinstance(cause, Exception):
            problems.append(Problem(key, f"found {show(found)}: {cause}"))
        elif detail["type"] == "extra_forbidden":
            problems.append(_unknown_key(key, model))
        else:
            # "a valid integer, unable to parse string as an integer" says the same thing twice.
            text = detail["msg"].removeprefix("Input should be ").partition(", unable to")[0]
            if detail["type"] in ("dict_type", "model_type"):
                text = "a mapping (key: value)"
            elif detail["type"].startswith("bool_"):
                text = "true or false"
            elif detail["type"] == "invalid_key":
                text = "keys that are text"
            choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
            if choices:
                text = "one of " + ", ".join(choices)
            expected.setdefault(key, []).append(text)
            hint = did_you_mean(found, choices) if isinstance(found, str) else ""
            field = model.model_fields.get(key)
            if not hint and field is not None and field.default not in (None, ...):
                hint = "" if field.default_factory else f"the default is {field.default}"
            hints[key] = (found, hint)
    for key, texts in expected.items():
        problems.append(wrong(key, hints[key][0], " or ".join(dict.fromkeys(texts)), hints[key][1]))
    return problems


def _unknown_key(key: str, owner: type[BaseModel]) -> Problem:
    name = key.rpartition(".")[2]
    if name in UNSUPPORTED_KEYS:
        return Problem(key, f"not supported: {UNSUPPORTED_KEYS[name]}", instead="")
    guess = did_you_mean(name, [*owner.model_fields, *keys_without_effect(owner)])
    message = f"unknown key; {guess or f'{owner.__name__} has no key like it'}"
    return Problem(key, message, instead=guess.split('"')[1] if guess else "")


# -- types of fields -------------------------------------------------------------------------------


def _refuse_bool(kind: Any) -> BeforeValidator:
    def check(value: Any) -> Any:
        # Python counts True as 1, so `max_steps: true` would otherwise train for one step.
        if isinstance(value, bool):
            raise PydanticKnownError(kind)
        return value

    return BeforeValidator(check)


Whole = Annotated[int, _refuse_bool("int_type")]
AtLeastOne = Annotated[Whole, Field(ge=1)]
AtLeastZero = Annotated[Whole, Field(ge=0)]
Number = Annotated[float, _refuse_bool("float_type")]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]

# A field that a validator works out if it is left out: `x: Annotated[int, Late] = LATE`.
# Readers see the type without None, which holds for every config that exists.
Late = WrapValidator(lambda value, check: None if value is None else check(value))
LATE: Any = None

# -- the class -------------------------------------------------------------------------------------

if TYPE_CHECKING:
    _Meta = type(BaseModel)
else:

    class _Meta(type(BaseModel)):
        """Makes a `ConfigError` of pydantic's error about a constructor call.

        A metaclass, because an overridden `__init__` would also run for every nested config.
        """

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as error:
                found = problems_of(error, cls, kwargs)
            if len(found) == 1:
                raise ConfigError(f"{cls.__name__}: {found[0]}")
            lines = "".join(f"\n  {problem}" for problem in found)
            raise ConfigError(f"{cls.__name__}: {len(found)} problems{lines}")


class ConfigModel(BaseModel, metaclass=_Meta):
    """Base of all config classes."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Leave out the keys that have no effect here, and name every problem with its key."""
        if not isinstance(values, dict):
            return build(values)
        problems: list[Problem] = []
        kept: dict[str, Any] = {}
        for key, value in values.items():
            mark = keys_without_effect(cls).get(key)
            field = cls.model_fields.get(key)
            if isinstance(mark, NotBuilt) and value != mark.off:
                fix = f"remove it or set it to {mark.off_in_yaml}"
                message = f"found {show(value)}; not built yet: {mark.what}; {fix}"
                problems.append(Problem(key, message))
            # An empty section of a file (`training_args:` with nothing below it) is its default.
            is_section = field is not None and isinstance(field.default_factory, type)
            if mark is None and not (value is None and is_section):
                kept[key] = value
        try:
            config = build(kept)
            if not problems:
                return config
        except ValidationError as error:
            problems += problems_of(error, cls, kept)
        raise ConfigProblems(problems)

    def settle(self, **values: Any) -> None:
        """Fill in derived values. Only for validators: until they are done nobody else holds it."""
        unknown = values.keys() - type(self).model_fields.keys()
        assert not unknown, f"{type(self).__name__} has no fields {sorted(unknown)}"
        self.__dict__.update(values)

    def part(self, key: str) -> Any:
        """The value of a key with its config objects, also where the field holds plain mappings."""
        return getattr(self, key, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that load again to an equal config."""
        return plain_values(self)


class Unread(ConfigModel):
    """Stands for config classes of ROLL whose keys have no effect here: it takes any keyword."""

    model_config = ConfigDict(extra="ignore")


def plain_values(config: ConfigModel) -> dict[str, Any]:
    """A config as mappings, lists and scalars that load again to an equal config."""
    return config.model_dump(exclude=set(keys_without_effect(type(config))))
