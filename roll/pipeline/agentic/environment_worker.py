"""Workers that play environments. They hold no model: answers come from elsewhere."""

from collections.abc import Sequence
from typing import Any

from roll.distributed.executor.worker import Worker
from roll.pipeline.agentic.env_host import EnvCall, EnvHost, EnvReply, EnvSpec, LocalEnvs


class EnvironmentWorker(Worker):
    """Up to `max_env_num_per_worker` environments, in a process that can be killed (see `EnvHost`).

    All environments of a worker take turns in that process. Environments that are slow because they
    compute get more processes with a smaller `max_env_num_per_worker`.
    """

    _host: EnvHost | LocalEnvs | None = None

    def open_envs(self, specs: Sequence[EnvSpec]) -> None:
        """Which environments this worker has. They are made when they are first reset."""
        self.close_envs()
        config: Any = self.worker_config
        self._host = LocalEnvs(specs)
        if config.env_isolation:
            self._host = EnvHost(specs, timeout_s=config.env_timeout)

    def submit(self, calls: Sequence[EnvCall]) -> None:
        """Start resets and steps, at most one for an environment."""
        assert self._host is not None, "open_envs comes first"
        self._host.submit(calls)

    def collect(self, wait_s: float) -> list[EnvReply]:
        """All replies that are outstanding, or those that come within `wait_s` seconds."""
        assert self._host is not None, "open_envs comes first"
        return self._host.collect(wait_s)

    def close_envs(self) -> None:
        """End the process, and with it all environments."""
        if self._host is not None:
            self._host.close()
            self._host = None
