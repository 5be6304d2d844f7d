"""Batches and configs for the tests of the batch-level steps, and a check that nothing in them was
changed."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import torch

from roll.distributed.scheduler.protocol import DataProto

NAN = math.nan


def reward_config(**options: Any) -> SimpleNamespace:
    fields = {
        "adv_estimator": "reinforce",
        "norm_mean_type": None,
        "norm_std_type": None,
        "reward_clip": None,
        "add_token_level_kl": True,
        "kl_penalty": "kl",
        "actor_infer": SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=2)),
    }
    return SimpleNamespace(**fields | options)


def scored(rewards: list[float], **non_tensors: Any) -> DataProto:
    return DataProto.from_dict(
        {"response_level_rewards": torch.tensor(rewards)}, non_tensors=non_tensors
    )


def token_batch(**columns: Any) -> DataProto:
    """Two rows of S = 5 with an observation inside the first and after its last response token."""
    defaults = {
        "response_mask": torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 1, 1]]),
        "attention_mask": torch.ones(2, 5, dtype=torch.long),
        "response_level_rewards": torch.tensor([1.0, -0.5]),
        "old_log_probs": torch.tensor([[-1.0, NAN, -2.0, NAN], [NAN, -0.5, -1.0, -0.7]]),
        "ref_log_probs": torch.tensor([[-1.5, NAN, -1.8, NAN], [NAN, -0.5, -1.3, -0.1]]),
    }
    tensors = {key: value for key, value in (defaults | columns).items() if value is not None}
    return DataProto.from_dict(tensors)


def snapshot(*objects: Any) -> Any:
    return copy.deepcopy(objects)


def assert_unchanged(before: Any, *after: Any) -> None:
    """Deep comparison of batches and configs, NaN equal to NaN."""
    for old, new in zip(before, after, strict=True):
        if isinstance(old, DataProto):
            assert set(old.batch.keys()) == set(new.batch.keys())
            for key in old.batch.keys():
                torch.testing.assert_close(
                    old.batch[key], new.batch[key], rtol=0, atol=0, equal_nan=True
                )
            assert set(old.non_tensor_batch) == set(new.non_tensor_batch)
            assert all(
                (old.non_tensor_batch[key] == new.non_tensor_batch[key]).all()
                for key in old.non_tensor_batch
            )
            assert old.meta_info == new.meta_info
        else:
            assert old == new


def advantage_batch(**columns: Any) -> DataProto:
    defaults = {
        "response_mask": torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 1, 0]]),
        "token_level_rewards": torch.tensor([[0.5, NAN, 1.0, NAN], [NAN, 0.0, -1.0, NAN]]),
        "values": torch.tensor([[0.2, NAN, 0.4, NAN], [NAN, 0.1, 0.3, NAN]]),
    }
    return DataProto.from_dict(
        {key: value for key, value in (defaults | columns).items() if value is not None}
    )
