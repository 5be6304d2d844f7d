"""Reading named columns of a batch, and writing new ones without touching the batch that was
given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roll.algorithms.rewards import group_index

if TYPE_CHECKING:
    from roll.distributed.scheduler.protocol import DataProto

# A column of one of these names says which rows belong together, whatever their order.
GROUP_COLUMNS = ("group_id", "group_ids")


def column(data: DataProto, key: str, needed_by: str = "this step") -> Any:
    """The tensor or object column `key`; a KeyError names it and who needs it."""
    if key not in data:
        raise KeyError(f"the batch has no column {key!r}, which {needed_by} needs: {data}")
    return data[key]


def loss_mask(data: DataProto, key: str = "response_mask") -> Tensor:
    """The tokens that a loss over the mask `key` sums over, and that its counts count: (B, T),
    bool.

    `response_mask` is (B, S). Any other mask is (B, T) and selects among the response tokens: what
    it marks in a prompt or in padding takes part in neither the sum nor the counts. Labels speak
    for themselves: all but -100.
    """
    mask = column(data, key, "the loss")
    if key in ("labels", "labels_for_loss"):
        return mask != -100
    if key == "response_mask":
        return mask[:, 1:] != 0
    return (mask != 0) & loss_mask(data) if "response_mask" in data else mask != 0


def with_columns(
    data: DataProto, metrics: Mapping[str, float] | None = None, /, **columns: Any
) -> DataProto:
    """A batch with the columns of `data`, these added or replaced, and `metrics` added to those in
    `meta_info`.

    `data` stays as it is. The two share the tensors that are not replaced.
    """
    out = copy.copy(data)
    out.update(columns)
    if metrics:
        out.meta_info["metrics"] = {**out.meta_info.get("metrics", {}), **metrics}
    return out


def row_groups(data: DataProto, config: Any | None = None) -> Tensor | None:
    """The number of each row's group, (B,): rows with equal ids if there is a column of ids;
    otherwise, with a config, `actor_infer.generating_args.num_return_sequences` neighbouring rows;
    otherwise None."""
    for key in GROUP_COLUMNS:
        if key in data:
            return group_index(len(data), ids=data[key])
    if config is None:
        return None
    return group_index(len(data), size=config.actor_infer.generating_args.num_return_sequences)
