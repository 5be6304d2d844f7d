"""What is wrong with a config, in words: each problem names the key, what was found, what was expected and the fix."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from roll.configs.unsupported import UNSUPPORTED_KEYS

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
}
BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "of at least",
    "less_than": "below",
    "less_than_equal": "of at most",
}


@dataclass(frozen=True)
class Problem:
    """One thing to correct. `key` is the dotted path of the key in the config."""

    key: str
    message: str
    instead: str | None = None
    """For a key that is not known: the one that was probably meant, or nothing. None: it is the value that is wrong."""

    def under(self, prefix: str) -> Problem:
        return replace(self, key=".".join(part for part in (prefix, self.key) if part))

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigProblems(ValueError):
    """What a validator raises when values do not fit together. Keys are relative to the validator's class."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(describe(self.problems))


def describe(problems: list[Problem]) -> str:
    """One line for one problem, otherwise a count and one line each."""
    if len(problems) == 1:
        return str(problems[0])
    return f"{len(problems)} problems\n" + "\n".join(f"  {problem}" for problem in problems)


def wrong(key: str, found: Any, expected: str, fix: str = "") -> Problem:
    """The standard sentence: `key: found 3 (int), expected ...; fix`."""
    return Problem(key, f"found {show(found)}, expected {expected}" + (f"; {fix}" if fix else ""))


def show(value: Any) -> str:
    """A value and its type as a reader of YAML knows them: `"many" (str)`, `null`, `[1, 2] (list)`."""
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
    """The two positive multiples of `divisor` around `value`, which is not one itself: (100, 16) gives 96 and 112."""
    below = value // divisor * divisor
    return (below, below + divisor) if below > 0 else (divisor, 2 * divisor)


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Pydantic's errors about `model` as problems. The alternatives of one union become one problem."""
    found: list[Problem] = []
    alternatives: dict[str, list[Problem]] = {}
    for detail in error.errors(include_url=False):
        path, owner = _resolve(model, detail["loc"])
        key = ".".join(path)
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigProblems):
            found += [problem.under(key) for problem in cause.problems]
        else:
            alternatives.setdefault(key, []).append(_problem_of(detail, key, path, owner))
    return found + [
        problem for problems in alternatives.values() for problem in _merge_alternatives(problems)
    ]


def _problem_of(detail: ErrorDetails, key: str, path: list[str], owner: type[BaseModel]) -> Problem:
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(key, owner)
    if kind == "literal_error":
        choices = _choices(context["expected"])
        guess = did_you_mean(found, choices) if isinstance(found, str) else ""
        return wrong(
            key, found, "one of " + ", ".join(choices), guess or _default_hint(owner, path)
        )
    if kind in BOUNDS:
        limit = next(iter(context.values()))
        return wrong(key, found, f"a number {BOUNDS[kind]} {limit:g}", _default_hint(owner, path))
    if kind in EXPECTED:
        return wrong(key, found, EXPECTED[kind], _default_hint(owner, path))
    message = str(context.get("error", detail["msg"]))
    return Problem(key, f"found {show(found)}: {message[0].lower()}{message[1:]}")


def unknown_key(key: str, owner: type[BaseModel]) -> Problem:
    """The problem of a key that `owner` does not have: unsupported on purpose, without effect, or misspelt."""
    name = key.rpartition(".")[2]
    if name in UNSUPPORTED_KEYS:
        return Problem(key, f"not supported: {UNSUPPORTED_KEYS[name]}", instead="")
    if name in getattr(owner, "ignored_keys", ()):
        return Problem(key, "has no effect, in ROLL or here; remove it", instead="")
    guess = did_you_mean(name, owner.model_fields)
    message = f"unknown key; {guess or f'{owner.__name__} has no key like it'}"
    return Problem(key, message, instead=guess.split('"')[1] if guess else "")


def _merge_alternatives(problems: list[Problem]) -> list[Problem]:
    """`found 3 (int), expected text` and `found 3 (int), expected a list` become `..., expected text or a list`."""
    unique = list(dict.fromkeys(problems))
    if len(unique) < 2 or not all(", expected " in problem.message for problem in unique):
        return unique
    found = unique[0].message.split(", expected ")[0]
    expected = [problem.message.split(", expected ")[1].split("; ") for problem in unique]
    fix = expected[0][1:]
    alternatives = " or ".join(dict.fromkeys(parts[0] for parts in expected))
    return [Problem(unique[0].key, "; ".join([f"{found}, expected {alternatives}", *fix]))]


def _choices(expected: str) -> list[str]:
    """Pydantic writes choices as `'a', 'b' or 'c'`."""
    return [part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",")]


def _default_hint(owner: type[BaseModel], path: list[str]) -> str:
    field = owner.model_fields.get(path[-1]) if path else None
    default = PydanticUndefined if field is None else field.default
    if default is PydanticUndefined or default is None:
        return ""
    return f"the default is {default}"


def _resolve(
    model: type[BaseModel], loc: tuple[int | str, ...]
) -> tuple[list[str], type[BaseModel]]:
    """The dotted path that a person would write for pydantic's `loc`, and the class that holds its last key.

    `loc` also names the alternatives of unions ("str", "list[str]"), which are no part of any file; walking along the
    field types tells them from keys.
    """
    path: list[str] = []
    owner = model
    inside: list[Any] = [
        model
    ]  # the types whose keys come next; several of them: `part` first says which
    for part in loc:
        if len(inside) > 1:
            inside = [
                member
                for member in inside
                if str(part).split("[")[0] == getattr(get_origin(member), "__name__", "")
            ]
            continue
        here = inside[0] if inside else None
        inside = []
        if isinstance(here, type) and issubclass(here, BaseModel):
            owner = here
            path.append(str(part))
            field = here.model_fields.get(str(part))
            inside = [] if field is None else members(field.annotation)
        elif get_origin(here) in (dict, list):
            path.append(str(part))
            inside = members(get_args(here)[-1])
    return path, owner


def members(annotation: Any) -> list[Any]:
    """The alternatives of a type, without None and without `Annotated` wrappings."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [
            part
            for member in get_args(annotation)
            if member is not type(None)
            for part in members(member)
        ]
    return [annotation]
