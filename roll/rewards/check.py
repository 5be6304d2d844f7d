"""Whether the rewards of a config can score, asked before any model is loaded."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

from roll.configs.load import ConfigWarning
from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.rewards.pool import check_reward_fn
from roll.roll_paths import MOVED
from roll.utils.import_utils import import_class

# Keys of a reward's config that some rewards read and others do not.
OPTIONAL_KEYS = (
    "reward_timeout",
    "reward_memory_mb",
    "judge_prompt",
    "judge_model_type",
    "judge_model_name",
    "judge_api_url",
    "judge_api_key",
    "format_pattern",
    "reward_type",
    "generating_args",
    "data_args",
    "infer_batch_size",
)
# Classes of ours that need no more than a package. Importing them means to import torch, which
# takes seconds, so that is left out where there is nothing else to ask.
PLAIN_REWARDS = {"MathRuleRewardWorker": "math_verify", "MultipleChoiceBoxedRuleRewardWorker": ""}


def check_rewards(pipeline_config: Any) -> None:
    """Raise what is wrong with the first reward that cannot work; name keys that nothing reads.

    Raises:
        ConfigError: a class or function that cannot be found or imported, or a setting it needs.
        MissingDependencyError: a package that a reward needs.
    """
    for domain, reward in pipeline_config.rewards.items():
        key = f"rewards.{domain}"
        try:
            idle = check_reward(reward)
        except ConfigError as error:
            name = f"{key}.reward_fn" if reward.reward_fn else key
            raise ConfigError(f"{name}: {error}") from None
        except MissingDependencyError as error:
            raise MissingDependencyError(f"{key}: {error}") from None
        if idle:
            warnings.warn(f"{key}: {idle}", ConfigWarning, stacklevel=2)


def check_reward(reward: Any) -> str | None:
    """`check_rewards` for one of them, without the key in front.

    Returns:
        A sentence that names the keys which were written and have no effect; None if all have one.
    """
    if reward.reward_fn:
        check_reward_fn(reward.reward_fn)
    written = []
    for key in OPTIONAL_KEYS:
        default = type(reward).model_fields[key].get_default(call_default_factory=True)
        if key in reward.model_fields_set and getattr(reward, key) != default:
            written.append(key)
    path = reward.worker_cls
    if isinstance(path, str) and set(written) <= {"reward_timeout", "reward_memory_mb"}:
        name = path.rpartition(".")[2]
        if reward.reward_fn:
            return None
        places = ("roll.rewards.workers", *MOVED)
        if path.rpartition(".")[0] in places and name in PLAIN_REWARDS:
            package = PLAIN_REWARDS[name]
            if package and importlib.util.find_spec(package) is None:
                package = package.replace("_", "-")
                raise MissingDependencyError(f"needs {package}: {install_hint('rewards')}")
            return None
    worker_cls = import_class(path) if isinstance(path, str) else path
    if hasattr(worker_cls, "check") and not reward.reward_fn:
        worker_cls.check(reward)
    read = worker_cls.keys_read(reward) if hasattr(worker_cls, "keys_read") else None
    idle = [key for key in written if read is not None and key not in read]
    if not idle:
        return None
    return f"{', '.join(idle)}: no effect, {worker_cls.__name__} does not read this"
