"""Rows whose number is known only after the episodes, dealt to a fixed number of optimizer steps."""

import numpy as np
import pytest
import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.batch_adjust import adjust_batch, optimizer_steps
from roll.pipeline.mini_batches import local_rows_of_steps


def config(mode="copy", **options):
    role = {
        "strategy_args": {"strategy_name": "hf_train"},
        "training_args": {"per_device_train_batch_size": 4},
    }
    return AgenticConfig(
        actor_train=role,
        rollout_batch_size=16,
        sequence_length=64,
        train_env_manager={"num_env_groups": 16},
        adv_estimator="gigpo",
        batch_adjust_mode=mode,
        ppo_epochs=2,
        eval_steps=0,
        **options,
    )


def batch(rows):
    return DataProto.from_dict(
        {"x": torch.arange(rows)}, non_tensors={"id": np.arange(rows).astype(object)}
    )


@pytest.mark.parametrize(
    ("mode", "rows", "kept"),
    [
        ("copy", 101, 101),
        ("auto", 101, 101),
        ("delete", 101, 100),
        ("delete", 3, 3),
        ("random_sample", 101, 4),
    ],
)
def test_modes(mode, rows, kept):
    adjusted, metrics = adjust_batch(batch(rows), config(mode), seed=1)
    assert len(adjusted) == kept and metrics["system/batch_remove_count"] == rows - kept
    assert metrics["system/batch_add_count"] == 0 and len(set(adjusted["x"].tolist())) == kept
    assert (
        adjusted["x"].tolist() == adjust_batch(batch(rows), config(mode), seed=1)[0]["x"].tolist()
    )


def test_every_row_has_the_same_weight_in_its_step():
    """16 trajectories by 4 are 4 optimizer steps an epoch, whatever the number of rows."""
    assert optimizer_steps(config()) == {"actor_train": 4}
    steps = list(
        local_rows_of_steps(
            range(101), num_global=101, rows_per_step=4, epochs=2, seed=0, num_steps=4
        )
    )
    assert [len(rows) for rows in steps] == [26, 25, 25, 25] * 2
    assert sorted(row for rows in steps[:4] for row in rows) == list(range(101))
    assert steps[:4] != steps[4:]
    few = list(
        local_rows_of_steps(range(2), num_global=2, rows_per_step=4, epochs=1, seed=0, num_steps=4)
    )
    assert sorted(map(len, few)) == [1, 1]
