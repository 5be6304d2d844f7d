"""What all config classes share: they are frozen, know every key they accept, and explain what is wrong with a value.

A config reaches its final values while it is being made: validators that run after the fields are checked fill in what
follows from other fields (`ConfigModel.settle`). From then on nothing changes, so a config may be shared, pickled and
compared, and reading a field always gives the value that is in effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from roll.configs.problems import ConfigProblems, Problem, describe, problems_of, show
from roll.exceptions import ConfigError


def _refuse_bool(value: Any) -> Any:
    # Python counts True as 1, so `max_steps: true` would otherwise train for one step.
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


def _refuse_bool_for_whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _keep_none(value: Any, check: Any) -> Any:
    return None if value is None else check(value)


Whole = Annotated[int, BeforeValidator(_refuse_bool_for_whole)]
AtLeastOne = Annotated[Whole, Field(ge=1)]
AtLeastZero = Annotated[Whole, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_refuse_bool)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]

# A field that may be left out because a validator works it out from the others: `x: Annotated[int, Late] = LATE`.
# Readers see the type without None, which holds for every config that exists.
Late = WrapValidator(_keep_none)
LATE: Any = None


@dataclass(frozen=True)
class NoEffect:
    """Marks a field that ROLL accepts and that changes nothing here; a file that sets it gets a warning, no error."""

    why: str


UNUSED_IN_ROLL = NoEffect("no code of ROLL reads it either")


@dataclass(frozen=True)
class NotBuilt:
    """Marks a field of something that ROLL has and this project has not: any value but `off` is refused, by name."""

    what: str
    off: Any

    @property
    def off_in_yaml(self) -> str:
        return "null" if self.off is None else str(self.off).lower()

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if value != self.off:
            fix = f"remove it or set it to {self.off_in_yaml}"
            raise ConfigProblems(
                [Problem("", f"found {show(value)}; not built yet: {self.what}; {fix}")]
            )
        return value


@dataclass(frozen=True)
class Entries:
    """Marks a mapping of names to plain mappings, each of which is read as `model`, and may hold its keys only."""

    model: type[BaseModel]


if TYPE_CHECKING:
    _Meta = type(BaseModel)
else:

    class _Meta(type(BaseModel)):
        """Turns pydantic's error about a wrong constructor call into a `ConfigError` in this project's words.

        A metaclass, because an overridden `__init__` would also be called for every nested config, and each level
        would then wrap the message of the level below.
        """

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as error:
                found = problems_of(error, cls)
            raise ConfigError(f"{cls.__name__}: " + describe(found))


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

    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that ROLL's example files carry at this place although nothing that could be meant by them exists here."""

    inherited_without_effect: ClassVar[Mapping[str, str]] = {}
    """Fields of base classes that change nothing for this class, and why: the `NoEffect` marker, after the fact."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, why in vars(cls).get("inherited_without_effect", {}).items():
            field = cls.model_fields[name]  # a copy of the base class's
            field.metadata = [*field.metadata, NoEffect(why)]

    def settle(self, **values: Any) -> None:
        """Fill in derived values. Only validators may call it: until they are done nobody else holds the object."""
        unknown = values.keys() - type(self).model_fields.keys()
        assert not unknown, f"{type(self).__name__} has no fields {sorted(unknown)}"
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that load again to an equal config; see `plain_values`."""
        return plain_values(self)


def plain_values(config: ConfigModel) -> dict[str, Any]:
    """A config as mappings, lists and scalars. Fields without effect appear only where someone changed them."""
    dumped = config.model_dump()  # applies field serializers, so every value is plain
    result: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        is_default = name not in config.model_fields_set or value == field.get_default(
            call_default_factory=True
        )
        if is_without_effect(field) and is_default:
            continue
        result[name] = _plain(value, dumped[name])
    return result


def _plain(value: Any, dumped: Any) -> Any:
    if isinstance(value, ConfigModel):
        return plain_values(value)
    if isinstance(value, dict):
        return {key: _plain(item, dumped[key]) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, dumped_item) for item, dumped_item in zip(value, dumped, strict=True)]
    return dumped


def is_without_effect(field: FieldInfo) -> bool:
    """Whether a field carries the `NoEffect` marker."""
    return any(isinstance(item, NoEffect) for item in field.metadata)
