"""Workers that play environments. They hold no model: answers come from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.distributed.executor.worker import Worker
from roll.pipeline.agentic.env_calls import EnvCall, EnvReply, EnvSpec
from roll.pipeline.agentic.env_host import EnvHost, LocalEnvs


class EnvironmentWorker(Worker):
    """Up to `max_env_num_per_worker` environments, in a process of their own that can be killed (see `EnvHost`).

    All environments of a worker take turns in that process. Environments that are slow because they compute get more
    processes with a smaller `max_env_num_per_worker`.
    """

    _host: EnvHost | LocalEnvs | None = None

    def open_envs(self, specs: Sequence[EnvSpec]) -> None:
        """Which environments this worker has. They are made when they are first reset."""
        self.close_envs()
        config: Any = self.worker_config
        self._host = (
            EnvHost(specs, timeout_s=config.env_timeout)
            if config.env_isolation
            else LocalEnvs(specs)
        )

    def submit(self, calls: Sequence[EnvCall]) -> None:
        """Start resets and steps, at most one for an environment."""
        assert self._host is not None, "open_envs comes first"
        self._host.submit(calls)

    def collect(self, wait_s: float) -> list[EnvReply]:
        """All replies that are outstanding, or those that come within `wait_s` seconds."""
        assert self._host is not None, "open_envs comes first"
        return self._host.collect(wait_s)

    def num_kills(self) -> int:
        """Processes that had to be killed so far."""
        return 0 if self._host is None else self._host.num_kills

    def close_envs(self) -> None:
        """End the process, and with it all environments."""
        if self._host is not None:
            self._host.close()
            self._host = None
