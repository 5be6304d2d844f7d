"""Which pipeline a config file is for. Needs no torch, so that files can be checked anywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.base import Problem, did_you_mean, wrong
from roll.configs.load import Composition, ConfigWarning, LoadedConfig, build_config, compose
from roll.configs.pipeline_config import BaseConfig
from roll.configs.roll_keys import FOREIGN_PIPELINES, keys_without_effect, unsupported_parts
from roll.exceptions import ConfigError
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.sft.sft_config import SFTConfig
from roll.utils.import_utils import import_class

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
EVALUATED = ("rlvr", "agentic")  # pipelines that `roll eval` knows


def read_config(
    composition: Composition,
) -> tuple[LoadedConfig | None, list[Problem], list[str]]:
    """The config of a composed file for any pipeline; see `build_config` for the three results."""
    problems = [Problem(key, reason) for key, reason in unsupported_parts(composition.values)]
    unsupported = [problem.key for problem in problems]
    if problems and any(key in composition.values for key in FOREIGN_PIPELINES):
        return None, problems, unsupported  # nothing else of such a file can be judged
    try:
        name = detect_pipeline(composition.values)
    except ConfigError as error:
        return None, problems or [Problem("", str(error))], unsupported
    loaded, found, left_out = build_config(composition, CONFIG_CLASSES[name])
    return loaded, problems + found, unsupported + left_out


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, warn: bool = True
) -> LoadedConfig:
    """The config of a YAML file for any pipeline.

    Args:
        overrides: `key=value` texts, applied over the file.
        warn: name the keys without effect in a `ConfigWarning`; the result has them in any case.

    Raises:
        ConfigError: what is wrong with the file, one line per problem.
    """
    composition = compose(path, overrides)
    loaded, problems, _ = read_config(composition)
    if problems or loaded is None:
        raise ConfigError("\n".join(composition.located(problems)))
    for sentence in loaded.warnings() if warn else ():
        warnings.warn(f"{composition.path}: {sentence}", ConfigWarning, stacklevel=2)
    return loaded


def pipeline_class(config: BaseConfig) -> type[BasePipeline]:
    """The class that runs a config, its `pipeline_cls` if set. Imports it, and torch with it."""
    return import_class(config.pipeline_cls or PIPELINE_CLASSES[config.kind])


def evaluation(config: BaseConfig) -> Callable[..., dict[str, float]]:
    """The function that validates a checkpoint: (config, checkpoint, *, samples_to) -> metrics."""
    if config.kind not in EVALUATED:
        known = ", ".join(EVALUATED)
        raise ConfigError(f"roll eval knows {known} configs, and this is one for {config.kind}")
    return getattr(pipeline_class(config), "evaluate")  # noqa: B009, those of EVALUATED have it


def detect_pipeline(values: Mapping[str, Any]) -> str:
    """The pipeline of composed values: by `pipeline`, `pipeline_cls`, or keys that only one has.

    Raises:
        ConfigError: there is no sign of any pipeline, or of more than one.
    """
    if not values:
        raise ConfigError("the file is empty")
    named = values.get("pipeline")
    if named is not None:
        if not isinstance(named, str) or named not in CONFIG_CLASSES:
            expected = "one of " + ", ".join(CONFIG_CLASSES)
            guess = did_you_mean(str(named), CONFIG_CLASSES)
            raise ConfigError(str(wrong("pipeline", named, expected, guess)))
        return named
    known = {
        name: dict.fromkeys([*cls.model_fields, *keys_without_effect(cls)])
        for name, cls in CONFIG_CLASSES.items()
    }
    own: dict[str, list[str]] = {}  # keys that only this pipeline has
    for name, keys in known.items():
        others = [known[other] for other in known if other != name]
        own[name] = [key for key in keys if not any(key in other for other in others)]
    path = str(values.get("pipeline_cls") or "").lower().split(".")
    found = {name: ["pipeline_cls"] for name in CONFIG_CLASSES if name in path}
    if not found:
        signs = {name: [key for key in keys if key in values] for name, keys in own.items()}
        found = {name: keys for name, keys in signs.items() if keys}
    if len(found) == 1:
        return next(iter(found))
    if not found:
        looked_for = "; ".join(f"{name}: {', '.join(own[name][:6])} ..." for name in own)
        how = f"add `pipeline:` with one of {', '.join(CONFIG_CLASSES)}"
        raise ConfigError(f"no key says which pipeline this is; {how} ({looked_for})")
    signs = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in found.items())
    how = "remove those of the others, or name one with `pipeline:`"
    raise ConfigError(f"keys of several pipelines ({signs}); {how}")
