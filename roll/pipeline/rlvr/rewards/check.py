"""Whether the rewards of a config can score, asked before any model is loaded."""

from __future__ import annotations

from typing import Any

from roll.exceptions import ConfigError, MissingDependencyError
from roll.utils.import_utils import import_class


def check_rewards(pipeline_config: Any) -> None:
    """Raise what is wrong with the first reward that cannot work; the message names its key.

    Raises:
        ConfigError: a worker class or function that does not exist or cannot be imported, or a setting that it needs.
        MissingDependencyError: a package that a reward needs.
    """
    for domain, reward in pipeline_config.rewards.items():
        key = f"rewards.{domain}"
        try:
            check_reward(reward)
        except ConfigError as error:
            name = f"{key}.reward_fn" if reward.reward_fn else key
            raise ConfigError(f"{name}: {error}") from None
        except MissingDependencyError as error:
            raise MissingDependencyError(f"{key}: {error}") from None


def check_reward(reward: Any) -> None:
    """`check_rewards` for one of them, without the key in front."""
    worker_cls = (
        import_class(reward.worker_cls) if isinstance(reward.worker_cls, str) else reward.worker_cls
    )
    if hasattr(worker_cls, "check"):
        worker_cls.check(reward)
