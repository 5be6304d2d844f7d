"""Rollout collection: prompts are drawn, answered, scored and filtered until the batch of a step is full."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.datasets.encoding import Prompt
from roll.datasets.sampler import PromptSampler, domain_sizes
from roll.distributed.executor.cluster import Cluster
from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams
from roll.pipeline.rlvr.rlvr_config import RewardFilterConfig, RLVRConfig
from roll.pipeline.rlvr.samples import Group, Sample, ScoredSample, make_requests, sample_of
from roll.pipeline.rlvr.scoring import Scorer, Verdict
from roll.utils.rollout_log import DroppedSample

Generate = Callable[[list[GenerationRequest]], list[GenerationOutput]]


@dataclass
class Rollout:
    """What a step trains on, and what became of everything else."""

    groups: list[Group] = field(default_factory=list)
    dropped: list[DroppedSample] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutCollector:
    """Collects the rollout of a step: `rollout_batch_size` prompts with `num_return_sequences_in_group` samples each.

    A prompt whose group a filter of its domain rejects is replaced by another one, for at most `max_num_gen_batches`
    rounds. Samples without a score leave their group, which is smaller then; a group that loses all of them is gone.
    """

    def __init__(
        self,
        config: RLVRConfig,
        sampler: PromptSampler,
        engine: Cluster,
        score: Scorer,
        tokenizer: Any,
    ) -> None:
        assert config.actor_infer.generating_args is not None
        self.config = config
        self.sampler = sampler
        self.engine = engine
        self.score = score
        self.tokenizer = tokenizer
        self.sampling = SamplingParams.from_config(
            config.actor_infer.generating_args, seed=config.seed
        )
        self.filters = {
            domain: reward.query_filter_config for domain, reward in config.rewards.items()
        }

    def collect(self, step: int) -> Rollout:
        """The rollout of `step`. Depends on the weights, the position in the data and the seed alone."""
        wanted = domain_sizes(self.config.rollout_batch_size, self.sampler.shares)
        kept: dict[str, list[Group]] = {pool: [] for pool in wanted}
        tally = Tally(self.tokenizer)
        num_drawn = num_rounds = 0
        while num_rounds < self.config.max_num_gen_batches:
            num_rounds += 1
            missing = {pool: wanted[pool] - len(kept[pool]) for pool in wanted}
            prompts = [
                prompt
                for pool, number in missing.items()
                for prompt in self.sampler.take(pool, number)
            ]
            names = [f"{step}-{num_drawn + index}" for index in range(len(prompts))]
            num_drawn += len(prompts)
            for group in self._answered(prompts, names, tally):
                if tally.passes(group, self.filters[group.prompt.domain]):
                    kept[self.sampler.pool_of(group.prompt)].append(group)
            is_full = all(len(kept[pool]) == wanted[pool] for pool in wanted)
            # Without a filter a group is missing only because nothing of it could be scored: another round would cost
            # as much as the first, and a reward that always fails would never end.
            if is_full or all(rule.type == "no_filter" for rule in self.filters.values()):
                break
        groups = [group for pool in wanted for group in kept[pool]]
        metrics = self.metrics_of(groups, tally, num_drawn) | {
            "rollout/rounds": float(num_rounds),
            "rollout/missing_prompts": float(self.config.rollout_batch_size - len(groups)),
        }
        return Rollout(groups, tally.dropped, metrics)

    def metrics_of(self, groups: Sequence[Group], tally: Tally, num_drawn: int) -> dict[str, float]:
        counts = {
            "scheduler/collect_query_count": float(num_drawn),
            "scheduler/query_use_count": float(len(groups)),
            "scheduler/query_filter_count": float(tally.num_filtered),
            "rollout/epoch": self.sampler.epoch,
        }
        return counts | tally.metrics() | group_metrics(groups)

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["prompts"])

    def _answered(
        self, prompts: Sequence[Prompt], names: Sequence[str], tally: Tally
    ) -> list[Group]:
        """Generate and score; the groups in the order of the prompts, without samples that failed."""
        requests = make_requests(
            prompts, names, self.sampling, self.config.num_return_sequences_in_group
        )
        prompt_of = dict(zip(names, prompts, strict=True))
        outputs = self.engine.answer_requests(requests)
        return scored_groups(
            [(prompt_of[output.request_id], output) for output in outputs], self.score, tally
        )


class Tally:
    """Counts samples and remembers those that are dropped, with their reasons."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.dropped: list[DroppedSample] = []
        self.num_samples = 0
        self.num_truncated = 0
        self.num_filtered = 0

    def is_usable(self, sample: Sample, error: str | None) -> bool:
        """Count a sample that was generated; without tokens, or with an error, it is dropped."""
        self.num_samples += 1
        self.num_truncated += sample.finish_reason == "length"
        if sample.finish_reason != "error" and sample.token_ids:
            return True
        self.drop(sample, f"generation: {error or sample.finish_reason}")
        return False

    def drop(self, sample: Sample, reason: str, scored: ScoredSample | None = None) -> None:
        self.dropped.append(sample.dropped(reason, self.tokenizer, scored))

    def passes(self, group: Group, rule: RewardFilterConfig) -> bool:
        """Whether the filter of the group's domain keeps it; if not, its samples are dropped."""
        if is_kept(group.scores, rule):
            return True
        self.num_filtered += 1
        for scored in group.samples:
            self.drop(scored.sample, rule.type, scored)
        return False

    def metrics(self) -> dict[str, float]:
        """Dropped samples by reason: a reason's text up to its colon."""
        reasons = Counter(sample.reason.split(":")[0].strip() for sample in self.dropped)
        return {
            "rollout/samples": float(self.num_samples),
            "rollout/truncated_frac": self.num_truncated / max(self.num_samples, 1),
            "rollout/dropped_samples": float(len(self.dropped)),
            **{
                f"rollout/dropped/{reason.replace(' ', '_')}": float(count)
                for reason, count in reasons.items()
            },
        }


def scored_groups(
    answers: Sequence[tuple[Prompt, GenerationOutput]],
    score: Callable[[list[Sample]], list[Verdict]],
    tally: Tally,
) -> list[Group]:
    """The samples in groups, in the order of their first sample, each with its score; failures are dropped."""
    found = [(sample_of(prompt, output), output.error) for prompt, output in answers]
    samples = [sample for sample, error in found if tally.is_usable(sample, error)]
    return group_samples(samples, score(samples) if samples else [], tally)


def group_samples(
    samples: Sequence[Sample], verdicts: Sequence[Verdict], tally: Tally
) -> list[Group]:
    groups: dict[str, Group] = {}
    for sample, verdict in zip(samples, verdicts, strict=True):
        if isinstance(verdict, str):
            tally.drop(sample, verdict)
        else:
            groups.setdefault(sample.group, Group(sample.prompt, sample.group, [])).samples.append(
                verdict
            )
    return list(groups.values())


def is_kept(scores: Sequence[float], rule: RewardFilterConfig) -> bool:
    """ROLL's rules, bounds dropped: `mean_filter` keeps threshold_down < mean < threshold_up, `std_filter` keeps
    std > std_threshold (population standard deviation)."""
    if rule.type == "mean_filter":
        low, high = (
            rule.filter_args.get("threshold_down", -1),
            rule.filter_args.get("threshold_up", float("inf")),
        )
        return low < statistics.fmean(scores) < high
    if rule.type == "std_filter":
        return statistics.pstdev(scores) > rule.filter_args.get("std_threshold", -1)
    return True


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Scores by domain, and the share of groups whose samples all have the same score: nothing is learned from them."""
    if not groups:
        return {}
    by_domain: dict[str, list[float]] = {}
    for group in groups:
        by_domain.setdefault(group.prompt.domain, []).extend(group.scores)
    flat = [max(group.scores) - min(group.scores) <= 1e-6 for group in groups]
    metrics = {"rollout/no_signal_group_frac": sum(flat) / len(groups)}
    for domain, scores in by_domain.items():
        metrics |= {
            f"scheduler/{domain}/score/{name}": value for name, value in _summary(scores).items()
        }
    return metrics


def _summary(values: Sequence[float]) -> Mapping[str, float]:
    return {"mean": statistics.fmean(values), "max": max(values), "min": min(values)}
