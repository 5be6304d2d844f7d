"""The worker of a role that generates."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import chain, pairwise
from typing import Any

from roll.distributed.scheduler.decorator import Dispatch, Grid, RankArgs, register
from roll.distributed.scheduler.protocol import DataProto
from roll.engines.request import GenerationOutput, GenerationRequest, generate_with_retry
from roll.pipeline.model_worker import ModelWorker
from roll.utils.generation import prompt_requests, rows_of_outputs


def dispatch_requests(cluster: Grid, requests: list[GenerationRequest]) -> RankArgs:
    """A contiguous share of the requests for each rank; the first ranks have one more where they do not divide."""
    size, longer = divmod(len(requests), cluster.world_size)
    starts = [rank * size + min(rank, longer) for rank in range(cluster.world_size + 1)]
    return ([requests[start:stop] for start, stop in pairwise(starts)],), {}


def collect_outputs(cluster: Grid, output: list[Any]) -> list[Any]:
    """The outputs of all ranks, one after the other; references of a call that still runs stay a list of references."""
    return (
        list(chain.from_iterable(output))
        if all(isinstance(share, list) for share in output)
        else output
    )


# Functions instead of a mode, because a list of requests need not divide by the number of workers.
DISPATCH_REQUESTS = {"dispatch_fn": dispatch_requests, "collect_fn": collect_outputs}


class InferWorker(ModelWorker):
    """A policy that answers prompts, through the engine of its strategy."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def generate(self, data: DataProto) -> DataProto:
        """Answers to left-padded prompts as right-padded rows (see `rows_of_outputs`), a prompt's rows side by side.

        `meta_info["generation_config"]` has the options of generation. What is drawn depends on the run's seed, on
        `meta_info["global_step"]` and on the prompt. A prompt that fails is tried again; if it fails again, its rows
        have no response, and `drop_reason` says why. This worker answers nothing else meanwhile.
        """
        metrics: dict[str, Any] = {}
        seed = self.pipeline_config.seed * 1_000_003 + data.meta_info.get("global_step", 0)
        requests = prompt_requests(data, data.meta_info["generation_config"], seed=seed)
        with self.timed("generate", metrics):
            result = generate_with_retry(self.strategy.generation_engine, requests)
        metrics[f"{self.cluster_name}/generate/num_retried@sum"] = result.num_retried
        metrics |= {
            f"{self.cluster_name}/generate/dropped/{why}@sum": n
            for why, n in result.reasons.items()
        }
        rows = rows_of_outputs(
            requests,
            result.all_outputs,
            sequence_length=self.pipeline_config.sequence_length,
            pad_token_id=self.strategy.tokenizer.pad_token_id,
            pad_to_seq_len=data.meta_info.get("pad_to_seq_len", True),
            prompts=data,
        )
        rows.meta_info = {**rows.meta_info, "metrics": metrics}
        return rows

    @register(dispatch_mode=DISPATCH_REQUESTS, clear_cache=False)
    def answer_requests(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        """All samples of the requests, in order. Through a cluster, each worker answers a contiguous share.

        Failed samples have `finish_reason` "error" after a second attempt. This worker does nothing else meanwhile. In
        one process it runs in the caller's thread: a second thread with tensors would make both of them slow.
        """
        return generate_with_retry(self.strategy.generation_engine, requests).all_outputs

    @register(dispatch_mode=DISPATCH_REQUESTS, clear_cache=False)
    async def generate_requests(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        """As `answer_requests`, in a thread of its own, so that `abort_requests` gets through."""
        return await asyncio.to_thread(self.answer_requests, requests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, clear_cache=False)
    async def abort_requests(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests (None: all) of calls that run now; they return what they have."""
        self.strategy.generation_engine.abort(request_ids)
