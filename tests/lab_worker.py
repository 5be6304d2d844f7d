"""Processes in which tests start one training worker after another: starting a process is what
costs.

The worker under test lives inside a `Lab`, with the lab's rank, and is called through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from training_setup import PROBES

from roll.distributed.executor.worker import Worker, worker_context
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.models.checkpoint import random_states


class Lab(Worker):
    inner: Any = None

    def start(self, pipeline: str, config: Any, role: str = "actor_train") -> None:
        """Replace the worker under test by a new one."""
        self.inner = None
        with worker_context(self.context):
            self.inner = PROBES[pipeline](getattr(config, role))
        self.inner.initialize(config)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL)
    def gradients(self, data: DataProto) -> Any:
        return self.inner.gradients(data)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST)
    def train_step(self, data: DataProto) -> DataProto:
        return self.inner.train_step(data)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST)
    def compute_log_probs(self, data: DataProto) -> DataProto:
        return self.inner.compute_log_probs(data)

    def save(self, folder: str, global_step: int) -> None:
        self.inner.strategy.save_checkpoint(folder, global_step)

    def load(self, folder: str) -> int:
        return self.inner.strategy.load_checkpoint(folder)

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.inner.strategy.named_weights()}

    def write_weights(self, weights: dict[str, Tensor]) -> None:
        self.inner.strategy.update_weights(weights)

    def state(self) -> dict[str, Any]:
        """Of a DeepSpeed worker: everything that a resumed run must have in common with one that
        never stopped."""
        strategy = self.inner.strategy
        zero = strategy.optimizer
        zero.flat_states()
        return {
            "weights": self.weights(),
            "optimizer": {
                name: {key: zero.whole_state(parameter, key).clone() for key in zero.state_keys()}
                for name, parameter in zero.parameters.items()
            },
            "steps": [float(state["step"]) for state in zero.flat_states()],
            "learning_rates": [group["lr"] for group in zero.adam.param_groups],
            "scheduler": strategy.scheduler.state_dict(),
            "random": random_states(),
        }


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Bit for bit, through nested lists and dicts."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other, (path, one, other)
