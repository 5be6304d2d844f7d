"""From one score per response to rewards that can be learned from: normalise, clip, place on a
token, leave out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.masking import check_finite, clip_fraction, masked_mean

# Below this a standard deviation is rounding noise and not worth dividing by.
STD_EPS = 1e-6
STD_SCOPES = ("batch", "group", "running")
MEAN_SCOPES = (*STD_SCOPES, "leave_one_out")


@dataclass
class RunningMoments:
    """Mean and standard deviation of all values seen so far, in float64 (Welford's update in Chan's
    parallel form)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of the squared deviations from `mean`."""

    @property
    def var(self) -> float:
        """Variance with ddof 1; 1 for fewer than two values."""
        return self.m2 / (self.count - 1) if self.count > 1 else 1.0

    @property
    def std(self) -> float:
        return math.sqrt(self.var)

    def update(self, values: Tensor) -> tuple[float, float]:
        """Take in all entries of `values`. Returns the mean and the standard deviation of `values`
        alone."""
        check_finite(values, name="values")
        values = values.detach().double()
        mean = values.mean().item() if values.numel() else 0.0
        batch = RunningMoments(values.numel(), mean, (values - mean).square().sum().item())
        self.merge(batch)
        return batch.mean, batch.std

    def merge(self, other: "RunningMoments") -> None:
        """Take in everything that `other` has seen, as if its values had been given to this one."""
        total = self.count + other.count
        if total == 0:
            return
        delta = other.mean - self.mean
        self.m2 += other.m2 + delta**2 * self.count * other.count / total
        self.mean += delta * other.count / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self.m2 = (
            int(state["count"]),
            float(state["mean"]),
            float(state["m2"]),
        )


def group_index(
    num_rows: int, *, ids: Tensor | np.ndarray | Sequence[Any] | None = None, size: int = 1
) -> Tensor:
    """Number the group of each row, 0 .. G-1. Equal `ids` form a group; without ids, `size`
    neighbouring rows do.

    Example: ids ["b", "a", "b"] -> [0, 1, 0]; four rows with size 2 -> [0, 0, 1, 1].
    """
    if ids is None:
        if size < 1 or num_rows % size:
            raise ValueError(
                f"group size {size} does not divide the {num_rows} rows of the batch; "
                f"rows that were dropped need a column of explicit group ids"
            )
        return torch.arange(num_rows) // size
    if len(ids) != num_rows:
        raise ValueError(f"{len(ids)} group ids for {num_rows} rows")
    labels = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)
    numbers: dict[Any, int] = {}
    return torch.tensor(
        [numbers.setdefault(label, len(numbers)) for label in labels], dtype=torch.int64
    )


def normalize_rewards(
    rewards: Tensor,
    *,
    mean: str | None = None,
    std: str | None = None,
    groups: Tensor | None = None,
    running: RunningMoments | None = None,
) -> Tensor:
    """(r - mean) / std for rewards of shape (B,), in float32 or better.

    `mean` and `std` name what the statistics are taken over, independently of each other: None
    leaves them out, `batch` is all rows, `group` the rows of the same group (`groups`, see
    `group_index`), `running` what `running` has seen: the caller updates it, before this call if
    this batch is to count. `mean` may also be `leave_one_out`: the group without the row itself
    (RLOO). The standard deviation has ddof 1; one of a single value or at most 1e-6 divides by
    nothing, any other by itself plus 1e-6. So a group of one, or of equal rewards, becomes exactly
    0 where the mean of the group is subtracted; where no mean is (None), it keeps its rewards as
    they are.
    """
    if mean is not None and mean not in MEAN_SCOPES:
        raise ValueError(f"unknown norm_mean_type {mean!r}; known: None, {', '.join(MEAN_SCOPES)}")
    if std is not None and std not in STD_SCOPES:
        raise ValueError(f"unknown norm_std_type {std!r}; known: None, {', '.join(STD_SCOPES)}")
    if rewards.ndim != 1:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}; expected one per row, (B,)")
    check_finite(rewards, name="rewards")
    # Statistics in float64: in float32 the rounding of a mean, divided by 1e-6, looks like a
    # reward.
    r = rewards.double()
    out = r
    if mean == "leave_one_out":
        centre, _, count = _moments(r, "group", groups, running)
        out = (r - centre) * count / (count - 1).clamp(min=1)
    elif mean is not None:
        out = r - _moments(r, mean, groups, running)[0]
    if std is not None:
        _, deviation, count = _moments(r, std, groups, running)
        out = out / torch.where((count < 2) | (deviation <= STD_EPS), 1.0, deviation + STD_EPS)
    return out.to(torch.promote_types(rewards.dtype, torch.float32))


def _moments(
    r: Tensor, scope: str, groups: Tensor | None, running: RunningMoments | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation (ddof 1, 0 for a single value) and count for each row, broadcastable
    to (B,)."""
    if scope == "running":
        if running is None:
            raise ValueError(
                "running normalisation needs the RunningMoments of this kind of reward"
            )
        mean, std, count = r.new_tensor([running.mean, running.std, running.count])
        return mean, std, count
    if scope == "group":
        if groups is None:
            raise ValueError("group normalisation needs the group of each row; see group_index")
        if groups.shape != r.shape:
            raise ValueError(
                f"group numbers have shape {tuple(groups.shape)} but rewards have {tuple(r.shape)}"
            )
        groups = groups.to(r.device)
    else:
        groups = torch.zeros(len(r), dtype=torch.int64, device=r.device)
    num_groups = int(groups.max()) + 1 if len(r) else 0
    count_G = torch.bincount(groups, minlength=num_groups).to(r.dtype)
    mean_G = r.new_zeros(num_groups).index_add(0, groups, r) / count_G.clamp(min=1)
    squares_G = r.new_zeros(num_groups).index_add(0, groups, (r - mean_G[groups]).square())
    std_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    return mean_G[groups], std_G[groups], count_G[groups]


def zero_std_group_frac(rewards: Tensor, groups: Tensor) -> float:
    """Share of groups whose rewards are all equal (a group of one included): nothing in them is
    better or worse."""
    if not len(rewards):
        return 0.0
    _, std, count = _moments(rewards.double(), "group", groups, None)
    # Every row weighs 1 / (size of its group), so that every group weighs 1.
    return ((std <= STD_EPS) / count).sum().item() / (1 / count).sum().item()


def check_clip(limit: float | None, name: str) -> None:
    """Raise ValueError for a clip limit that is negative or NaN."""
    if limit is not None and not limit >= 0:
        raise ValueError(f"{name}={limit} must not be negative; None turns clipping off")


def clip_symmetric(
    values: Tensor, limit: float | None, mask: Tensor | None = None
) -> tuple[Tensor, float]:
    """Clamp to [-limit, limit]. Returns the result and the share of (valid) entries that it
    changed; None: no limit."""
    if limit is None:
        return values, 0.0
    return values.clamp(-limit, limit), clip_fraction(values, -limit, limit, mask).item()


def place_at_last_token(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Put each row's reward on its last valid token: (B,) to (B, T), 0 elsewhere; an empty row gets
    nothing.

    Example: rewards [5, 7], mask [[0, 1, 1, 0], [0, 0, 0, 0]] -> [[0, 0, 5, 0], [0, 0, 0, 0]].
    """
    if rewards_B.shape != mask_BT.shape[:1]:
        raise ValueError(
            f"rewards have shape {tuple(rewards_B.shape)} but the mask has {len(mask_BT)} rows"
        )
    mask_BT = mask_BT.bool()
    # Counted from the right, the first valid token is the only one with a count of 1.
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(1, dtype=torch.int32).flip(1) == 1)
    dtype = torch.promote_types(rewards_B.dtype, torch.float32)
    return torch.where(is_last_BT, rewards_B.to(dtype).unsqueeze(1), 0.0)


def difficulty_mask(scores_B: Tensor, groups: Tensor, low: float, high: float) -> Tensor:
    """Keep the rows of groups whose mean score lies strictly between `low` and `high`; groups of
    one are kept."""
    mean_B, _, count_B = _moments(scores_B.double(), "group", groups, None)
    return ((mean_B > low) & (mean_B < high)) | (count_B < 2)


def max_length_mask(mask_BT: Tensor, max_length: int) -> Tensor:
    """Keep the rows that stopped before `max_length` response tokens: the others were cut off."""
    return mask_BT.bool().sum(-1) != max_length


def overlong_mask(scores_B: Tensor, mask_BT: Tensor, threshold: float) -> Tensor:
    """Keep correct rows (score 1), and wrong ones (score 0) shorter than `threshold` tokens; no
    other score is kept."""
    return (scores_B == 1) | ((scores_B == 0) & (mask_BT.bool().sum(-1) < threshold))


def row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the non-empty rows of each row's mean over its valid tokens; 0 if all rows are
    empty."""
    return masked_mean(masked_mean(values_BT, mask_BT, dim=-1), mask_BT.bool().any(-1))
