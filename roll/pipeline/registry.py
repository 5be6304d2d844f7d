"""Which pipeline a config file is for. Needs no torch, so that files can be checked anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.compose import compose
from roll.configs.loader import LoadedConfig, build_config, refuse_unsupported
from roll.configs.pipeline_config import BaseConfig
from roll.configs.problems import did_you_mean, wrong
from roll.configs.unsupported import FOREIGN_PIPELINES
from roll.exceptions import ConfigError
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.sft.sft_config import SFTConfig

if TYPE_CHECKING:
    from roll.pipeline.base_pipeline import BasePipeline

CONFIG_CLASSES: Mapping[str, type[BaseConfig]] = {
    "dpo": DPOConfig,
    "rlvr": RLVRConfig,
    "agentic": AgenticConfig,
    "sft": SFTConfig,
}
PIPELINE_CLASSES: Mapping[str, str] = {
    "dpo": "roll.pipeline.dpo.dpo_pipeline.DPOPipeline",
    "rlvr": "roll.pipeline.rlvr.rlvr_pipeline.RLVRPipeline",
    "agentic": "roll.pipeline.agentic.agentic_pipeline.AgenticPipeline",
    "sft": "roll.pipeline.sft.sft_pipeline.SFTPipeline",
}

EVALUATED = ("rlvr",)  # pipelines that `roll eval` knows


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, warn: bool = True
) -> LoadedConfig:
    """The config of a YAML file for any pipeline.

    Args:
        overrides: `key=value` texts, applied over the file.
        warn: name the keys without effect in a `ConfigWarning`; they are in the result in any case.

    Raises:
        ConfigError: what is wrong with the file, one line per problem.
    """
    composition = compose(path, overrides)
    lines: list[str] = []
    try:
        refuse_unsupported(composition)
    except ConfigError as error:
        if any(key in composition.values for key in FOREIGN_PIPELINES):
            raise  # nothing else of such a file can be judged
        lines = str(error).splitlines()
    try:
        name = detect_pipeline(composition.values)
    except ConfigError as error:
        raise ConfigError("\n".join(lines) or f"{composition.path}: {error}") from None
    try:
        loaded = build_config(composition, CONFIG_CLASSES[name], warn=warn and not lines)
    except ConfigError as error:
        raise ConfigError("\n".join(dict.fromkeys([*lines, *str(error).splitlines()]))) from None
    if lines:
        raise ConfigError("\n".join(lines))
    return loaded


def pipeline_class(config: BaseConfig) -> type[BasePipeline]:
    """The class that runs a config: its `pipeline_cls`, else that of its kind. Imports it, and torch with it."""
    # The import is here because this module also serves those who only check a file.
    from roll.utils.import_utils import import_class

    name = str(getattr(config, "pipeline"))  # noqa: B009, every pipeline's config has it, BaseConfig has not
    return import_class(config.pipeline_cls or PIPELINE_CLASSES[name])


def evaluation(config: BaseConfig) -> Callable[..., dict[str, float]]:
    """The function that validates a checkpoint on its own: (config, checkpoint, *, samples_to) -> metrics."""
    name = str(getattr(config, "pipeline"))  # noqa: B009, as above
    if name not in EVALUATED:
        raise ConfigError(
            f"roll eval knows {', '.join(EVALUATED)} configs, and this is one for {name}"
        )
    return getattr(pipeline_class(config), "evaluate")  # noqa: B009, those of EVALUATED have it


def detect_pipeline(values: Mapping[str, Any]) -> str:
    """The pipeline that composed values are for: by `pipeline`, by `pipeline_cls`, or by keys that only one has.

    Raises:
        ConfigError: there is no sign of any pipeline, or of more than one.
    """
    if not values:
        raise ConfigError("the file is empty")
    named = values.get("pipeline")
    if named is not None:
        if not isinstance(named, str) or named not in CONFIG_CLASSES:
            expected = "one of " + ", ".join(CONFIG_CLASSES)
            raise ConfigError(
                str(wrong("pipeline", named, expected, did_you_mean(str(named), CONFIG_CLASSES)))
            )
        return named
    path = str(values.get("pipeline_cls") or "").lower().split(".")
    found = {name: ["pipeline_cls"] for name in CONFIG_CLASSES if name in path}
    if not found:
        found = {name: [key for key in own_keys(name) if key in values] for name in CONFIG_CLASSES}
        found = {name: keys for name, keys in found.items() if keys}
    if len(found) == 1:
        return next(iter(found))
    if not found:
        looked_for = "; ".join(
            f"{name}: {', '.join(own_keys(name)[:6])} ..." for name in CONFIG_CLASSES
        )
        names = ", ".join(CONFIG_CLASSES)
        raise ConfigError(
            f"no key says which pipeline this is; add `pipeline:` with one of {names} ({looked_for})"
        )
    signs = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in found.items())
    raise ConfigError(
        f"keys of several pipelines ({signs}); remove those of the others, or name one with `pipeline:`"
    )


def own_keys(name: str) -> list[str]:
    """Keys that only the pipeline `name` has."""
    others = {
        key for other, cls in CONFIG_CLASSES.items() if other != name for key in cls.model_fields
    }
    return [key for key in CONFIG_CLASSES[name].model_fields if key not in others]
