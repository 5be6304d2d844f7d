"""Keeps the weights of one role equal to those of another: after training, before generation.

    updates = ModelUpdateGroup(actor_train, actor_infer, bucket_megabytes=1024)
    metrics = updates.model_update(global_step)

Roles of one process share the storage of their weights, so there is nothing to send; where they cannot (an engine with
a layout of its own, another precision), the target copies them. Otherwise rank 0 of the source broadcasts. The
checksums of a sample of tensors are compared on every target rank each time.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from roll.distributed.executor.cluster import Cluster
from roll.distributed.strategy.weight_sync import SyncPlan, TensorSpec, compare_checksums, plan_sync


class ModelUpdateGroup:
    """Weights of `src_cluster` -> `tgt_cluster`, every `frequency` steps."""

    def __init__(
        self,
        src_cluster: Cluster,
        tgt_cluster: Cluster,
        *,
        frequency: int = 1,
        bucket_megabytes: int = 1024,
        timeout: float = 600.0,
    ) -> None:
        self.src_cluster = src_cluster
        self.tgt_cluster = tgt_cluster
        self.frequency = frequency
        self.plan: SyncPlan
        self.is_local = all(
            cluster.backend_name == "local" and cluster.world_size == 1
            for cluster in (src_cluster, tgt_cluster)
        )
        self.is_shared = self._share_storage()
        specs: list[TensorSpec] = src_cluster.execute_all_sync("weight_specs")[0]
        if not self.is_shared:
            dtypes = {
                spec.name: spec.dtype for spec in tgt_cluster.execute_all_sync("weight_specs")[0]
            }
            specs = [
                TensorSpec(spec.name, spec.shape, dtypes.get(spec.name, spec.dtype))
                for spec in specs
            ]
        self.plan = plan_sync(specs, bucket_megabytes * 2**20)
        if not self.is_local:
            self._connect(timedelta(seconds=timeout))

    def model_update(self, global_step: int) -> dict[str, Any]:
        """Bring the target up to date; metrics say how long it took and what the sampled weights sum up to."""
        if global_step % self.frequency:
            return {}
        started = time.monotonic()
        if self.is_shared:  # one model, so there is nothing to compare
            sent = self.src_cluster.execute_rank_zero_sync(
                "weight_checksums", self.plan.sampled_names
            )
            received = []
        elif self.is_local:
            source = self.src_cluster.workers[0]
            sent, held = self.tgt_cluster.execute_rank_zero_sync(
                "copy_weights_of", source, self.plan
            )
            received = [held]
        else:
            targets = self.tgt_cluster.execute_all_async("start_model_update")
            sources = self.src_cluster.execute_all_async("start_model_update")
            sent = self.src_cluster.gather(sources, "start_model_update")[0]
            received = self.tgt_cluster.gather(targets, "start_model_update")
        compare_checksums(sent, received)
        self.tgt_cluster.process_weights_after_loading()
        self.tgt_cluster.execute_all_sync("set_policy_version", global_step)
        return {
            f"time/{self.src_cluster.cluster_name}/model_update/total": time.monotonic() - started,
            # 32 bits of it: a float holds them exactly, so that trackers and people can compare runs.
            "system/weight_checksum": float(sum(sent.values()) % 2**32),
        }

    def _share_storage(self) -> bool:
        """Let a target in this process use the source's weights themselves, if both are single workers here."""
        return self.is_local and self.tgt_cluster.workers[0].share_weights_of(
            self.src_cluster.workers[0]
        )

    def _connect(self, timeout: timedelta) -> None:
        host, port = self.src_cluster.execute_rank_zero_sync("free_address")
        size = 1 + self.tgt_cluster.world_size
        address = {"host": host, "port": port, "size": size, "timeout": timeout, "plan": self.plan}
        # Both sides wait for each other, so both must be under way before either is waited for.
        targets = self.tgt_cluster.execute_all_async("setup_model_update", first_rank=1, **address)
        sources = self.src_cluster.execute_all_async("setup_model_update", first_rank=0, **address)
        self.src_cluster.gather(sources, "setup_model_update")
        self.tgt_cluster.gather(targets, "setup_model_update")
