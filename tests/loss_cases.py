"""Batches for the tests of losses: ragged rows with gaps, garbage under the mask, and ways to cut
and to pad them."""

from typing import Any

import torch
from torch import Tensor

from roll.distributed.scheduler.protocol import DataProto

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, -1e9)


def random_mask(seed: int, rows: int = 4, width: int = 9, empty_row: bool = False) -> Tensor:
    """(rows, width), int64. Rows begin and end anywhere, with gaps; none is empty but, if asked
    for, the last."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, width, dtype=torch.long)
    for row in mask:
        first, last = torch.randint(0, width, (2,), generator=generator).sort().values.tolist()
        row[first : last + 1] = 1
        holes = torch.rand(width, generator=generator) < 0.3
        holes[first] = holes[last] = False
        row[holes] = 0
    if empty_row:
        mask[-1] = 0
    return mask


def policy_columns(seed: int, mask: Tensor, spread: float = 0.4) -> dict[str, Tensor]:
    """Random columns of a policy loss, zero under the mask."""
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(scale: float) -> Tensor:
        return torch.randn(mask.shape, generator=generator) * scale

    log_probs = -1.5 + normal(0.5)
    columns = {
        "log_probs_BT": log_probs,
        "old_log_probs_BT": log_probs + normal(spread),
        "ref_log_probs_BT": log_probs + normal(spread),
        "advantages_BT": normal(1.0),
        "entropy_BT": torch.rand(mask.shape, generator=generator),
        "is_weight_BT": 0.5 + torch.rand(mask.shape, generator=generator),
    }
    return {
        name: torch.where(mask.bool(), value, torch.zeros(())) for name, value in columns.items()
    }


def poisoned(tensor: Tensor, mask: Tensor, garbage: float) -> Tensor:
    """`tensor` with garbage wherever the mask is 0."""
    return torch.where(mask.bool(), tensor, torch.tensor(garbage, dtype=tensor.dtype))


def padded(tensor: Tensor, left: int, right: int, garbage: float) -> Tensor:
    """Columns of garbage on either side; zeros for integer tensors (masks)."""
    value = garbage if tensor.is_floating_point() else 0
    return torch.nn.functional.pad(tensor, (left, right), value=value)


def window(mask: Tensor) -> slice:
    """The columns that any of these rows uses."""
    used = mask.bool().any(0).nonzero().flatten()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)


def cuts(rows: int, seed: int) -> list[list[int]]:
    """A random partition of the rows, in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator).tolist()
    pieces: list[list[int]] = [[]]
    for row, new in zip(order, (torch.rand(rows, generator=generator) < 0.5).tolist(), strict=True):
        if new and pieces[-1]:
            pieces.append([])
        pieces[-1].append(row)
    return pieces


def lists(**tensors: Any) -> dict[str, Any]:
    """Nested lists for the float64 references."""
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in tensors.items()
    }


VOCABULARY = 11


def policy_batch(
    seed: int = 0, rows: int = 4, width: int = 10, empty_row: bool = False
) -> tuple[DataProto, Tensor]:
    """(a batch of trajectories of several turns, the logits of the policy at hand)."""
    mask = random_mask(seed, rows, width - 1, empty_row)
    generator = torch.Generator().manual_seed(seed + 2)
    input_ids = torch.randint(VOCABULARY, (rows, width), generator=generator)
    logits = torch.randn(rows, width, VOCABULARY, generator=generator)
    log_probs = logits.log_softmax(-1)[:, :-1].gather(-1, input_ids[:, 1:, None])[..., 0]

    def near(scale: float) -> Tensor:
        noise = scale * torch.randn(mask.shape, generator=generator)
        return torch.where(mask.bool(), log_probs + noise, torch.zeros(()))

    data = DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "response_mask": torch.nn.functional.pad(mask, (1, 0)),
            "old_log_probs": near(0.3),
            "ref_log_probs": near(0.3),
            "infer_logprobs": near(0.3),
            "advantages": torch.where(
                mask.bool(), torch.randn(mask.shape, generator=generator), torch.zeros(())
            ),
        }
    )
    return data, logits


def with_counts(data: DataProto, *mask_keys: str) -> DataProto:
    """The batch with the counts that a strategy would put into its meta_info."""
    tokens, samples = {}, {"default": float(len(data))}
    for key in mask_keys:
        mask = data[key][:, 1:] if key == "response_mask" else data[key]
        tokens[key], samples[key] = float((mask != 0).sum()), float((mask != 0).any(1).sum())
    width = data["input_ids"].shape[1] - 1
    counts = {"batch_num_tokens": tokens, "global_valid_samples": samples, "loss_norm_width": width}
    return DataProto(data.batch, data.non_tensor_batch, {**data.meta_info, **counts})


def narrowed(data: DataProto, rows: list[int], columns: slice) -> DataProto:
    """Some rows, with the columns of (B, S) tensors cut to `columns` and those of (B, S-1) tensors
    to match."""
    full = data["input_ids"].shape[1]
    piece = data.select_idxs(rows)
    for key, value in piece.batch.items():
        if value.dim() == 2 and value.shape[1] == full:
            piece[key] = value[:, columns]
        elif value.dim() == 2 and value.shape[1] == full - 1:
            piece[key] = value[:, columns.start : columns.stop - 1]
    return piece


def loss_and_gradient(
    worker: Any, data: DataProto, logits: Tensor
) -> tuple[Tensor, dict[str, float], Tensor]:
    """(loss, metrics, gradient with respect to the logits) of a worker."""
    leaf = logits.detach().clone().requires_grad_()
    loss, metrics = worker.loss_func(data, leaf)
    loss.backward()
    return loss.detach(), metrics, leaf.grad


def merged(metrics: list[dict[str, float]]) -> dict[str, float]:
    """What the tags of the keys say about several micro-batches."""
    reducers = {
        "sum": sum,
        "max": max,
        "min": min,
        "mean": lambda values: sum(values) / len(values),
    }
    keys = {key for item in metrics for key in item}
    return {
        key: reducers[key.rsplit("@")[1]]([item[key] for item in metrics if key in item])
        for key in keys
    }
