"""What of ROLL's module of this name is about batches: requests with several answers, and answers one by one.

Its schedulers are Ray actors. What they do is done here by `roll.pipeline.rlvr.rollout.RolloutCollector` and
`roll.pipeline.rlvr.async_rollout`, in the process of the pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.distributed.scheduler.protocol import DataProto


@dataclass
class ExperienceItem:
    """One answer to a prompt, and the step in which it was begun."""

    prompt_id: int
    domain: str = "default"
    sampling_start_step: int | None = None
    data: DataProto | None = None


def expand_requests(
    data: DataProto, num_return_sequences: int, is_num_return_sequences_expand: bool
) -> list[DataProto]:
    """Requests for `num_return_sequences` answers: that many for one answer each if told to expand, else one for all.

    `data.meta_info["generation_config"]` is changed to say so, as in ROLL.
    """
    if "generation_config" not in data.meta_info:
        raise KeyError(f"meta_info has no 'generation_config' (it has {sorted(data.meta_info)})")
    copies = num_return_sequences if is_num_return_sequences_expand else 1
    data.meta_info["generation_config"]["num_return_sequences"] = num_return_sequences // copies
    return [copy.deepcopy(data) for _ in range(copies)]


def expand_responses(response: DataProto | Sequence[Any] | None) -> list[DataProto]:
    """Batches, in lists of any depth, as batches of one row each, in order. A batch without rows stays as it is."""
    if response is None:
        return []
    if isinstance(response, DataProto):
        return (
            [response[row : row + 1] for row in range(len(response))]
            if len(response) > 1
            else [response]
        )
    return [item for part in response for item in expand_responses(part)]
