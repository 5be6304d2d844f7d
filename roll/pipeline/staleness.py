"""How old the samples of asynchronous runs may be: one rule for answers to prompts and for episodes.

Staleness is the step that trains on a sample minus the version of its oldest token. No step trains on a sample that is
staler than `PPOConfig.max_staleness`: what is older when a step takes its batch is dropped, counted, and replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

STALE = "stale"  # the reason that dropped samples are listed under


def is_stale(group: Iterable[Collection[int]], step: int, max_staleness: int) -> bool:
    """Whether a group is too old for `step`; it has the versions of the policies that made each of its samples."""
    return any(step - min(versions) > max_staleness for versions in group)


def staleness_metrics(
    samples: Sequence[Collection[int]], step: int, num_dropped: int
) -> dict[str, float]:
    """How old the samples of a step are, given the versions of each; `num_dropped` more were too old for it."""
    ages = [step - min(versions) for versions in samples]
    metrics = {f"rollout/dropped/{STALE}": float(num_dropped)}
    if ages:
        metrics |= {
            "rollout/staleness/mean": sum(ages) / len(ages),
            "rollout/staleness/max": float(max(ages)),
            "scheduler/off_policy_ratio": sum(age > 0 for age in ages) / len(ages),
            "rollout/mixed_version_samples": float(
                sum(len(set(versions)) > 1 for versions in samples)
            ),
        }
    return metrics
