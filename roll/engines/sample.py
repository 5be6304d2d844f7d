"""What engines have in common: a sample while it is generated, what ends it, and the calls that ask
for samples."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from roll.engines.request import (
    Decode,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    OnOutput,
    cut_at_stop_string,
)


class Aborts:
    """Which requests of the call that runs now shall end; any thread may say so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: frozenset[str] = frozenset()
        self._aborted: frozenset[str] = frozenset()

    def start(self, request_ids: Collection[str]) -> None:
        """A call with these requests begins; without any, it ends."""
        with self._lock:
            self._running, self._aborted = frozenset(request_ids), frozenset()

    def abort(self, request_ids: Collection[str] | None) -> None:
        with self._lock:
            self._aborted |= (
                self._running if request_ids is None else self._running & frozenset(request_ids)
            )

    def __bool__(self) -> bool:
        return bool(self._aborted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._aborted


@dataclass(eq=False)
class Sample:
    """One answer on its way: what it has so far, and whether that is all."""

    request: GenerationRequest
    sample_index: int
    limit: int
    eos_token_ids: frozenset[int]
    decode: Decode | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_given(self) -> int:
        """Tokens that are there before the first one is generated."""
        return len(self.request.prompt_ids) + len(self.request.prefix_ids)

    def take(self, token_ids: list[int], log_probs: list[float]) -> None:
        """The next tokens; those after the row's end are ignored."""
        sampling = self.request.sampling
        for token_id, log_prob in zip(token_ids, log_probs, strict=True):
            if log_prob != log_prob:  # NaN
                return self.fail(
                    "logits are not numbers: the model's weights or its precision are broken"
                )
            self.token_ids.append(token_id)
            self.log_probs.append(log_prob)
            if token_id in self.eos_token_ids or token_id in sampling.stop_token_ids:
                self.finish_reason = "stop"
                return None
            if sampling.stop_strings and self._stops_at_text():
                self.finish_reason = "stop"
                return None
            if len(self.token_ids) == self.limit:
                self.finish_reason = "length"
                return None
        return None

    def fail(self, error: str) -> None:
        self.token_ids, self.log_probs = [], []
        self.finish_reason, self.error = "error", error

    def output(self, policy_version: int) -> GenerationOutput:
        assert self.finish_reason is not None
        return GenerationOutput(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            error=self.error,
        )

    def _stops_at_text(self) -> bool:
        """Whether the last token completes a stop string; the response is then cut as the request
        wants it."""
        assert self.decode is not None
        sampling = self.request.sampling
        response = [*self.request.prefix_ids, *self.token_ids]
        # A token has at least a byte. The margin is for characters that begin before the tail.
        tail = response[-max(len(stop.encode()) for stop in sampling.stop_strings) - 8 :]
        text = self.decode(tail)
        if not any(stop in text for stop in sampling.stop_strings):
            return False
        kept = cut_at_stop_string(
            response,
            self.decode,
            sampling.stop_strings,
            include=sampling.include_stop_str_in_output,
        )
        if kept is None:
            return False
        kept = max(kept - len(self.request.prefix_ids), 0)
        del self.token_ids[kept:], self.log_probs[kept:]
        return True


class SampleEngine(ABC):
    """What engines share: requests become samples, calls take turns, aborts get through, outputs
    come in order."""

    def __init__(self, *, eos_token_ids: Collection[int], decode: Decode | None) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decode = decode
        self.policy_version = 0
        self.aborts = Aborts()
        self._one_call = threading.Lock()

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_tokens(self) -> int | None:
        """What the model takes, prompt and response together."""

    @abstractmethod
    def run(self, samples: list[Sample], finish: Callable[[Sample], None]) -> None:
        """Generate until all samples have ended, and call `finish` with each that has. `aborts` is
        looked at often."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_output: OnOutput | None = None
    ) -> list[GenerationOutput]:
        """See `Engine.generate`. Calls of several threads take turns."""
        with self._one_call:
            version = self.policy_version
            samples = self._samples(requests)
            outputs: dict[Sample, GenerationOutput] = {}

            def finish(sample: Sample) -> None:
                outputs[sample] = sample.output(version)
                if on_output is not None:
                    on_output(outputs[sample])

            self.aborts.start([request.request_id for request in requests])
            try:
                for sample in samples:
                    if sample.finish_reason is not None:
                        finish(sample)
                self.run([sample for sample in samples if sample.finish_reason is None], finish)
            finally:
                self.aborts.start(())
            return [outputs[sample] for sample in samples]

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `Engine.abort`. Takes effect before the next token."""
        self.aborts.abort(request_ids)

    def _samples(self, requests: Sequence[GenerationRequest]) -> list[Sample]:
        """The samples of all requests, in order. Those of requests that cannot be answered have
        failed already."""
        if len({request.request_id for request in requests}) < len(requests):
            raise ValueError("two requests of one call have the same request_id")
        max_tokens, vocab_size = self.max_tokens, self.vocab_size
        samples = []
        for request in requests:
            limit = request.sampling.max_new_tokens - len(request.prefix_ids)
            if max_tokens is not None:
                limit = min(limit, max_tokens - len(request.prompt_ids) - len(request.prefix_ids))
            problem = _problem(request, max_tokens, vocab_size, self.decode)
            for index in range(request.num_samples):
                sample = Sample(request, index, limit, self.eos_token_ids, self.decode)
                if problem is not None:
                    sample.fail(problem)
                samples.append(sample)
        return samples


def _problem(
    request: GenerationRequest, max_tokens: int | None, vocab_size: int, decode: Decode | None
) -> str | None:
    """Why a model cannot take this request, "what: details"."""
    ids = (*request.prompt_ids, *request.prefix_ids)
    if not request.prompt_ids:
        return "empty prompt: a request needs at least one prompt token"
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        return f"unknown token: id {wrong}, the vocabulary has {vocab_size}"
    if max_tokens is not None and len(ids) >= max_tokens:
        return (
            f"prompt too long: {len(ids)} tokens leave no room for an answer, the model takes "
            f"{max_tokens}"
        )
    if len(request.prefix_ids) >= request.sampling.max_new_tokens:
        return f"nothing to generate: {len(request.prefix_ids)} prefix tokens reach max_new_tokens"
    if request.sampling.stop_strings and decode is None:
        return "no decoder: stop strings need an engine that was given `decode`"
    return None
