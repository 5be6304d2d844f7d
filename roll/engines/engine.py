"""The interface of generation engines, and what all of them share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll.engines.request import GenerationOutput, GenerationRequest

OnOutput = Callable[[GenerationOutput], None]
Decode = Callable[[list[int]], str]


class Engine(Protocol):
    """Answers requests with a model.

    A sample depends on the weights, its prompt, its sampling parameters and its key; not on which other requests are
    answered at the same time, nor on their order.
    """

    policy_version: int
    """Version of the weights, stamped on outputs. Whoever updates the weights sets it."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_output: OnOutput | None = None
    ) -> list[GenerationOutput]:
        """All samples, in the order of the requests, then of their samples. Blocks until the last one has ended.

        `on_output` is called with each sample as soon as it has ended. Bad requests come back as outputs with
        `finish_reason` "error"; they do not disturb the others.
        """
        ...

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests (None: all) of the calls that run now, from any thread. They return what they have."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with old weights."""
        ...


@dataclass(frozen=True)
class RetriedOutputs:
    """What came of requests that each had two chances: all samples in order, those that failed twice among them."""

    all_outputs: list[GenerationOutput]
    num_retried: int

    @property
    def outputs(self) -> list[GenerationOutput]:
        """The samples that worked."""
        return [output for output in self.all_outputs if output.error is None]

    @property
    def dropped(self) -> list[GenerationOutput]:
        """The samples that failed twice."""
        return [output for output in self.all_outputs if output.error is not None]

    @property
    def reasons(self) -> dict[str, int]:
        """How many samples were dropped for each reason (an error's text up to its colon)."""
        return dict(Counter((output.error or "").split(":")[0] for output in self.dropped))


def generate_with_retry(
    engine: Engine, requests: Sequence[GenerationRequest], *, on_output: OnOutput | None = None
) -> RetriedOutputs:
    """Generate; requests with a failed sample are asked once more, and what fails again is given up.

    `on_output` hears of each sample once: when it worked, or when it failed for the second time.
    """
    tell = on_output or (lambda output: None)
    first = engine.generate(
        requests, on_output=lambda output: None if output.error else tell(output)
    )
    failed = {output.request_id for output in first if output.error is not None}
    again = [request for request in requests if request.request_id in failed]
    retried = (
        {(output.request_id, output.sample_index): output for output in engine.generate(again)}
        if again
        else {}
    )
    all_outputs = []
    for output in first:
        if output.error is not None:
            output = retried[output.request_id, output.sample_index]
            tell(output)
        all_outputs.append(output)
    return RetriedOutputs(all_outputs, len(again))


def end_tokens(tokenizer: Any, generation_config: Any = None) -> frozenset[int]:
    """The ids that end a response: the tokenizer's end token, and what the model's generation config names."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *([named] if isinstance(named, int) else named or [])}
    return frozenset(ids - {None})


def text_of(tokenizer: Any) -> Decode:
    """How stop strings see tokens: as they are, special tokens included."""
    return lambda token_ids: tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


def cut_at_stop_string(
    token_ids: list[int], decode: Decode, stop_strings: Sequence[str], *, include: bool
) -> int | None:
    """How many of the tokens a response keeps that ends at the first stop string; None: there is none in it.

    With `include` it ends with the token that completes the stop string. Without, with the last token whose text lies
    before the stop string, so that no part of it is left.

    Example: tokens "a", "b<", "/x>", "c" and the stop string "</x>" keep 3 tokens, without the stop string 1.
    """
    text = decode(token_ids)
    ends = [text.find(stop) + len(stop) for stop in stop_strings if stop in text]
    if not ends:
        return None
    # The stop string that is complete first ends the response; of several, the longest.
    end = min(ends)
    start = min(end - len(stop) for stop in stop_strings if text[:end].endswith(stop))
    if not include:
        return _tokens_within(token_ids, decode, start)
    return _tokens_within(token_ids, decode, end - 1) + 1


def _tokens_within(token_ids: list[int], decode: Decode, num_chars: int) -> int:
    """The largest number of leading tokens whose text is at most `num_chars` long."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(token_ids[:middle])) <= num_chars:
            low = middle
        else:
            high = middle - 1
    return low
