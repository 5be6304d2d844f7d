"""ROLL's import paths of the actors for other policy losses: the same workers, which read `pg_variant`."""

from typing import Any

import pytest
import torch
from loss_cases import loss_and_gradient, policy_batch

from roll.configs.worker_config import WorkerConfig
from roll.pipeline.agentic import agentic_actor_worker
from roll.pipeline.agentic.agentic_actor_pg_worker import ActorWorker as AgenticPGWorker
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.rlvr import actor_worker
from roll.pipeline.rlvr.actor_pg_worker import ActorPGWorker
from roll.pipeline.rlvr.rlvr_config import RLVRConfig


@pytest.mark.parametrize(
    ("pg_cls", "cls", "config_cls"),
    [
        (ActorPGWorker, actor_worker.ActorWorker, RLVRConfig),
        (AgenticPGWorker, agentic_actor_worker.ActorWorker, AgenticConfig),
    ],
)
def test_the_loss_is_that_of_pg_variant(pg_cls: Any, cls: Any, config_cls: Any) -> None:
    config = config_cls(
        prompt_length=8, sequence_length=16, force_disable_old_logprobs_recompute=True
    )
    data, logits = policy_batch()
    losses = {}
    for variant in ("topr", "cispo", "ppo"):
        results = []
        for worker_cls in (pg_cls, cls):
            worker = worker_cls(WorkerConfig(name="actor_train", pg_variant=variant))
            worker.pipeline_config = config
            results.append(loss_and_gradient(worker, data, logits))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(
            results[0][2], results[1][2]
        )
        losses[variant] = float(results[0][0])
    assert len(set(losses.values())) == 3
