"""Scores of samples from the reward workers of their domains. A sample that cannot be scored is dropped, never a 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.pipeline.rlvr.samples import Sample, ScoredSample, make_batch

# Either what a sample is worth, or why nobody can say.
Verdict = ScoredSample | str


def close_rewards(cluster: Cluster) -> None:
    """End the processes of reward workers that have some; those of a reward model, for example, have none."""
    if hasattr(cluster.worker_cls, "close"):
        cluster.execute_all_sync("close")


class Scorer:
    """Sends samples to the reward cluster of their domain; all domains work at the same time."""

    def __init__(self, clusters: Mapping[str, Cluster], tokenizer: Any) -> None:
        self.clusters = clusters
        self.pad_token_id: int = tokenizer.pad_token_id

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict for each sample, in order."""
        by_domain: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            by_domain.setdefault(sample.prompt.domain, []).append(index)
        pending = {}
        for domain, rows in by_domain.items():
            cluster = self.clusters[domain]
            batch = make_batch([samples[row] for row in rows], self.pad_token_id)
            padded, num_extra = pad_dataproto_to_divisor(
                batch, cluster.dp_size if len(batch) < cluster.dp_size else 1
            )
            compute = cluster.compute_rewards
            if len(by_domain) > 1:  # a reward model has no need to step aside
                compute = getattr(cluster, "compute_rewards_aside", compute)
            pending[domain] = (compute(padded, blocking=False), num_extra)
        verdicts: list[Verdict] = [""] * len(samples)
        for domain, (refs, num_extra) in pending.items():
            result = DataProto.materialize_concat(refs, timeout=self.clusters[domain].rpc_timeout)
            result = unpad_dataproto(result, num_extra)
            for row, verdict in zip(
                by_domain[domain],
                self._verdicts([samples[i] for i in by_domain[domain]], result),
                strict=True,
            ):
                verdicts[row] = verdict
        return verdicts

    @staticmethod
    def _verdicts(samples: Sequence[Sample], result: DataProto) -> list[Verdict]:
        rewards = result["response_level_rewards"].double().tolist()
        # Workers that only know rewards, such as a reward model, say nothing else.
        scores = result["scores"].double().tolist() if "scores" in result else rewards
        parts = result["reward_parts"] if "reward_parts" in result else [{}] * len(samples)
        reasons = result["drop_reason"] if "drop_reason" in result else [None] * len(samples)
        verdicts: list[Verdict] = []
        for sample, score, reward, part, reason in zip(
            samples, scores, rewards, parts, reasons, strict=True
        ):
            is_number = math.isfinite(score) and math.isfinite(reward)
            if reason or not is_number:
                verdicts.append(str(reason or "nan"))
            else:
                verdicts.append(ScoredSample(sample, score, reward, dict(part or {})))
        return verdicts
