"""Rewards, KL, returns and advantages once more, as plain loops over Python floats, sharing no code
with the package.

Tensors come in as nested lists. Masked entries are never looked at.
"""

import math
from collections.abc import Hashable, Sequence

Rows = list[list[float]]
Mask = list[list[float]]


def cells(mask: Mask) -> list[tuple[int, int]]:
    return [(i, t) for i, row in enumerate(mask) for t, valid in enumerate(row) if valid]


def zeros(mask: Mask) -> Rows:
    return [[0.0] * len(row) for row in mask]


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation with ddof 1, which is 0 for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def normalize_rewards(
    rewards: list[float],
    groups: Sequence[Hashable],
    mean: str | None,
    std: str | None,
    seen: Sequence[float] = (),
) -> list[float]:
    """`seen` is everything that a running normalisation has seen, this batch included."""
    out = []
    for i, reward in enumerate(rewards):
        group = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        scopes = {"batch": rewards, "group": group, "running": list(seen)}
        value = reward
        if mean == "leave_one_out":
            others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
            value -= math.fsum(others) / len(others) if others else reward
        elif mean is not None:
            value -= mean_std(scopes[mean])[0]
        if std is not None:
            deviation = mean_std(scopes[std])[1]
            if len(scopes[std]) > 1 and deviation > 1e-6:
                value /= deviation + 1e-6
        out.append(value)
    return out


def approx_kl(log_probs: Rows, base: Rows, mask: Mask, kind: str) -> Rows:
    out = zeros(mask)
    for i, t in cells(mask):
        d = log_probs[i][t] - base[i][t]
        x = min(max(-d, -20.0), 20.0)
        out[i][t] = {"kl": d, "abs": abs(d), "mse": d * d / 2, "k3": min(math.expm1(x) - x, 10.0)}[
            kind
        ]
    return out


def token_rewards(
    rewards: list[float], mask: Mask, kl: Rows, beta: float, clip: float | None
) -> tuple[Rows, float, float]:
    """Token-level rewards, the mean over non-empty rows of their mean KL, and the share of clipped
    tokens."""
    out = zeros(mask)
    row_kls, clipped = [], 0
    for i, row in enumerate(mask):
        valid = [t for t in range(len(row)) if row[t]]
        for t in valid:
            out[i][t] = (rewards[i] if t == valid[-1] else 0.0) - beta * kl[i][t]
            if clip is not None:
                clipped += abs(out[i][t]) > clip
                out[i][t] = min(max(out[i][t], -clip), clip)
        if valid:
            row_kls.append(math.fsum(kl[i][t] for t in valid) / len(valid))
    return out, math.fsum(row_kls) / max(len(row_kls), 1), clipped / max(len(cells(mask)), 1)


def discounted_returns(rewards: Rows, mask: Mask, gamma: float) -> Rows:
    out = zeros(mask)
    for i, row in enumerate(mask):
        following = 0.0
        for t in reversed(range(len(row))):
            if row[t]:
                following = out[i][t] = rewards[i][t] + gamma * following
    return out


def gae(rewards: Rows, values: Rows, mask: Mask, gamma: float, lam: float) -> tuple[Rows, Rows]:
    advantages, returns = zeros(mask), zeros(mask)
    for i, row in enumerate(mask):
        next_value = next_advantage = 0.0
        for t in reversed(range(len(row))):
            if row[t]:
                delta = rewards[i][t] + gamma * next_value - values[i][t]
                next_advantage = advantages[i][t] = delta + gamma * lam * next_advantage
                next_value = values[i][t]
                returns[i][t] = next_advantage + next_value
    return advantages, returns


def runs(row: list[float]) -> list[list[int]]:
    """Positions of each contiguous run of ones."""
    found: list[list[int]] = []
    for t, valid in enumerate(row):
        if valid and t and row[t - 1]:
            found[-1].append(t)
        elif valid:
            found.append([t])
    return found


def turn_discounted_returns(rewards: Rows, mask: Mask, gamma: float) -> Rows:
    out = zeros(mask)
    for i, row in enumerate(mask):
        following = 0.0
        for run in reversed(runs(row)):
            following = math.fsum(rewards[i][t] for t in run) + gamma * following
            for t in run:
                out[i][t] = following
    return out


def segment_mean(x: Rows, mask: Mask, keep: Mask) -> Rows:
    out = zeros(mask)
    for i, row in enumerate(mask):
        for run in runs(row):
            kept = [x[i][t] for t in run if keep[i][t]]
            for t in run:
                out[i][t] = math.fsum(kept) / max(len(kept), 1)
    return out


def whiten(x: Rows, mask: Mask) -> Rows:
    out = zeros(mask)
    valid = [x[i][t] for i, t in cells(mask)]
    if len(valid) < 2:
        return [
            [x[i][t] if mask[i][t] else 0.0 for t in range(len(mask[i]))] for i in range(len(mask))
        ]
    mean, std = mean_std(valid)
    for i, t in cells(mask):
        out[i][t] = (x[i][t] - mean) / math.sqrt(std**2 + 1e-8)
    return out


def step_returns(
    scores: list[float], traj_ids: list[str], steps: list[int], gamma: float
) -> list[float]:
    """Discounted over the later steps of the same trajectory."""
    out = []
    for i in range(len(scores)):
        later = [
            j for j in range(len(scores)) if traj_ids[j] == traj_ids[i] and steps[j] >= steps[i]
        ]
        later.sort(key=lambda j: steps[j])
        out.append(math.fsum(scores[j] * gamma**k for k, j in enumerate(later)))
    return out
