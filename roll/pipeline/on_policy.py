"""Is the run on-policy? The first update of a step compares training with sampling; too large a gap stops the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.ppo_config import PPOConfig
from roll.exceptions import RollError
from roll.utils.metrics.reduction import reduce_metrics


class OffPolicyError(RollError, RuntimeError):
    """The policy that is trained is not the one that sampled, although nothing should have changed in between."""


def check_first_update(metrics: Mapping[str, Any], config: PPOConfig) -> None:
    """Stop if the ratio at the first update is too far from 1 (see `PPOConfig.ratio_tolerance`)."""
    reduced = reduce_metrics(
        {key: value for key, value in metrics.items() if key.startswith("actor/first_ratio")}
    )
    error, tolerance = reduced.get("actor/first_ratio_error@sum"), config.ratio_tolerance
    if error is None or tolerance is None or error <= tolerance:
        return
    sampling = config.actor_infer.generating_args
    assert sampling is not None
    causes = []
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        causes.append(
            f"tokens are cut off before sampling (top_p={sampling.top_p:g}, top_k={sampling.top_k}, "
            f"min_p={sampling.min_p:g}): set actor_infer.generating_args top_p=1, top_k=0, min_p=0"
        )
    if sampling.repetition_penalty != 1:
        causes.append(
            f"repetition_penalty={sampling.repetition_penalty:g} changes what is sampled: set it to 1"
        )
    if not config.log_probs_at_sampling_temperature and sampling.temperature != 1:
        causes.append(
            f"sampling at temperature {sampling.temperature:g} with log_probs_at_sampling_temperature=false"
        )
    if sampling.temperature == 0 or not sampling.do_sample:
        causes.append(
            "tokens are not sampled but the most likely ones: set temperature=1 and do_sample=true"
        )
    dtypes = {role.model_args.dtype for role in (config.actor_train, config.actor_infer)}
    if dtypes != {"fp32"}:
        causes.append(
            f"precision {' and '.join(sorted(dtypes))}: engine and trainer round differently"
        )
    if config.actor_infer.model_update_frequency > 1:
        causes.append(
            f"stale weights: actor_infer.model_update_frequency={config.actor_infer.model_update_frequency}"
        )
    causes.append(
        "dropout in the model, or attention kernels that differ between engine and trainer"
    )
    listed = "\n".join(f"  - {cause}" for cause in causes)
    raise OffPolicyError(
        f"the first update of this step should be on-policy, but the probabilities of the sampled tokens in training "
        f"and in sampling differ: the mean of |ratio - 1| is {error:.2g}, more than {tolerance:g} "
        f"(first_ratio_tolerance). Training would push on a policy that did not make these samples. Likely causes:\n"
        f"{listed}\nIf the gap is meant, turn on train_infer_correction, or set first_ratio_tolerance=0."
    )
