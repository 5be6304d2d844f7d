"""Validation: every prompt of the validation set answered with its own sampling, scored, and reported by tag."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from roll.datasets.encoding import PromptDataset
from roll.engines.request import SamplingParams
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.rollout import Generate, Tally, scored_groups
from roll.pipeline.rlvr.samples import Group, make_requests
from roll.pipeline.rlvr.scoring import Scorer


@dataclass(frozen=True)
class ValSampling:
    """How the validation samples."""

    params: SamplingParams
    num_samples: int

    @classmethod
    def of(cls, config: RLVRConfig) -> ValSampling:
        """`validation.generating_args`, with `val_greedy` and `val_n_sample` on top."""
        assert config.validation is not None and config.validation.generating_args is not None
        args = config.validation.generating_args
        num_samples = config.val_n_sample if config.val_n_sample > 1 else args.num_return_sequences
        if config.val_greedy:
            args = args.model_copy(update={"temperature": 0.0})
        params = SamplingParams.from_config(args, seed=config.seed)
        return cls(params, 1 if params.is_greedy else num_samples)


def validate(
    dataset: PromptDataset, sampling: ValSampling, generate: Generate, score: Scorer, tally: Tally
) -> list[Group]:
    """All prompts answered and scored. The random numbers are the same at every validation."""
    prompts = list(dataset)
    names = [f"val-{prompt.index}" for prompt in prompts]
    prompt_of = dict(zip(names, prompts, strict=True))
    outputs = generate(make_requests(prompts, names, sampling.params, sampling.num_samples))
    return scored_groups(
        [(prompt_of[output.request_id], output) for output in outputs], score, tally
    )


def val_metrics(groups: Sequence[Group], tally: Tally) -> dict[str, float]:
    """`val_correct/{tag}/mean` is the share of scores that are 1 (as ROLL counts), `val/score/{tag}/mean` the mean
    score, and `val/pass_at_k/{tag}` the chance that at least one of k samples is right; tag `all` is everything."""
    metrics = {
        "val/samples": float(sum(len(group.samples) for group in groups)),
        "val/dropped_samples": float(len(tally.dropped)),
        "val/truncated_frac": tally.num_truncated / max(tally.num_samples, 1),
    }
    by_tag: dict[str, list[Group]] = {"all": list(groups)}
    for group in groups:
        if group.prompt.tag:
            by_tag.setdefault(group.prompt.tag, []).append(group)
    for tag, members in by_tag.items():
        scores = [value for group in members for value in group.scores]
        if not scores:
            continue
        metrics[f"val_correct/{tag}/mean"] = statistics.fmean(value == 1 for value in scores)
        metrics[f"val/score/{tag}/mean"] = statistics.fmean(scores)
        most = max(len(group.samples) for group in members)
        for k in (2**power for power in range(1, 11) if 2**power <= most):
            chances = [
                pass_at_k(len(group.samples), sum(value == 1 for value in group.scores), k)
                for group in members
                if len(group.samples) >= k
            ]
            metrics[f"val/pass_at_{k}/{tag}"] = statistics.fmean(chances)
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that k of these samples, drawn without replacement, hold a correct one: an unbiased estimate of the
    chance that k new samples do. Example: 1 of 4 correct, k = 2 -> 1 - C(3,2)/C(4,2) = 0.5."""
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
