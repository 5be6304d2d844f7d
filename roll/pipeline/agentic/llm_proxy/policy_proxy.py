"""Answers of the policy under training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll.engines.request import GenerationOutput, GenerationRequest
from roll.exceptions import ConfigError
from roll.pipeline.agentic.llm_proxy.base_llm_proxy import BaseLLMProxy, TurnRequest, register_llm_proxy

if TYPE_CHECKING:
    from roll.distributed.executor.cluster import Cluster

_ABORT_AGAIN_S = 0.2


@register_llm_proxy("policy")
class PolicyProxy(BaseLLMProxy):
    """Hands all turns to the generating workers at once.

    A turn that was interrupted for a weight update goes on where it was, with the new weights; its policy version is
    that of its oldest tokens.
    """

    needs_messages = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._changed = threading.Condition()
        self._is_paused = self._is_generating = self._has_given_up = False

    def generate(self, requests: Sequence[TurnRequest]) -> list[GenerationOutput]:
        if self.actor_infer is None:
            raise ConfigError("llm_proxy.proxy_type: policy needs the role actor_infer")
        done: dict[str, GenerationOutput] = {}
        pending: list[GenerationRequest] = [turn.request for turn in requests]
        while pending:
            outputs = self._ask(self.actor_infer, pending)
            again = []
            for request, output in zip(pending, outputs, strict=True):
                done[output.request_id] = joined(done.get(output.request_id), output)
                if output.finish_reason == "abort":
                    again.append(request.resume(output))
            pending = again
        return [done[turn.request.request_id] for turn in requests]

    def _ask(self, actor_infer: Cluster, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused or self._has_given_up)
            if self._has_given_up:
                raise RuntimeError("the rollouts were closed")
            self._is_generating = True
        try:
            return actor_infer.generate_requests(requests)
        finally:
            with self._changed:
                self._is_generating = False
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For another thread: inside, no turn is being answered; those that were go on afterwards."""
        with self._changed:
            self._is_paused = True
        self._interrupt()
        yield
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def give_up(self) -> None:
        """For another thread: `generate` raises instead of answering, now and from now on."""
        with self._changed:
            self._has_given_up = True
            self._changed.notify_all()
        self._interrupt()

    def _interrupt(self) -> None:
        while self._is_generating:
            assert self.actor_infer is not None
            self.actor_infer.abort_requests()
            with self._changed:  # a call that is on its way to a worker is not aborted yet: again after a moment
                self._changed.wait_for(lambda: not self._is_generating, timeout=_ABORT_AGAIN_S)


def joined(before: GenerationOutput | None, after: GenerationOutput) -> GenerationOutput:
    """Two parts of one answer as one."""
    if before is None:
        return after
    return replace(
        after,
        token_ids=[*before.token_ids, *after.token_ids],
        log_probs=[*before.log_probs, *after.log_probs],
        policy_version=min(before.policy_version, after.policy_version),
    )
