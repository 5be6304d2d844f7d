"""Whether the environments of a config can be made, asked before any model is loaded."""

from __future__ import annotations

import inspect

from roll.configs.problems import Problem
from roll.exceptions import ConfigError, MissingDependencyError
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.env.registry import entry_point_of, load_entry_point
from roll.utils.import_utils import import_class


def env_problems(config: AgenticConfig) -> list[Problem]:
    """What is wrong with the environments that the tags in use name: an id or class that does not exist, a package that
    is missing, an option that the environment does not have. No environment is made."""
    problems = []
    for tag in config.tags_in_use():
        template, key = config.env_template(tag), f"custom_envs.{tag}"
        try:
            import_class(template.env_manager_cls)
        except (ConfigError, MissingDependencyError) as error:
            problems.append(Problem(f"{key}.env_manager_cls", str(error)))
        if template.env_type is None:
            continue  # `missing_for_training` says so
        try:
            entry_point, leading = entry_point_of(template.env_type)
            made_by = load_entry_point(entry_point)
            if hasattr(made_by, "check"):
                made_by.check()
            signature = inspect.signature(made_by)
        except (ConfigError, MissingDependencyError) as error:
            problems.append(Problem(f"{key}.env_type", str(error)))
            continue
        try:
            signature.bind(*leading, **template.env_config)
        except TypeError as error:
            known = ", ".join(list(signature.parameters)[len(leading) :])
            problems.append(Problem(f"{key}.env_config", f"{error}; {template.env_type} takes {known}"))
    return problems
