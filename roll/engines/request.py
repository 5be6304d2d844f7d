"""What a generation engine is asked, what it answers, and its interface. Token ids in and out.

    request = GenerationRequest("q7", prompt_ids=(5, 8), sampling=SamplingParams(), num_samples=4)
    outputs = engine.generate([request])       # four GenerationOutputs

A request that was aborted goes on where it stopped with `request.resume(output)`; when the weights
have not changed, it then ends with the tokens that it would have had without the interruption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort", "error"]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: repetition penalty, temperature, top-k, top-p, min-p, in order.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token every time (greedy).
        top_p: keeps the most likely tokens whose probabilities add up to this; 1 keeps all.
        top_k: keeps this many of the most likely tokens; 0 and -1 keep all.
        min_p: drops tokens less likely than this fraction of the most likely one; 0 drops none.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
            response; 1 is off.
        max_new_tokens: longest response; tokens of `GenerationRequest.prefix_ids` count.
        stop_strings: texts that end a response, wherever token boundaries lie.
        stop_token_ids: ids that end a response, besides the model's own end tokens.
        include_stop_str_in_output: keep the tokens that a stop string is made of; else the response
            ends with the last token before it.
        seed: with the key of a sample, what its random numbers are derived from.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= -1, "at least 1, or 0 or -1 for all tokens"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
        }
        for name, (is_right, expected) in limits.items():
            if not is_right:
                raise ValueError(f"sampling: {name} is {getattr(self, name)}, expected {expected}")
        if "" in self.stop_strings:
            raise ValueError(
                "sampling: stop_strings has an empty text, which would end every response at once"
            )
        # Tuples, so that equal parameters are equal and hashable whatever they were made from.
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_config(cls, config: Any, *, seed: int = 0, prompt_length: int = 0) -> SamplingParams:
        """From `GeneratingArguments`, or the mapping that its `to_dict` makes.

        `do_sample: false` is temperature 0. `max_length` minus `prompt_length` is the limit where
        `max_new_tokens` is missing or 0. A `seed` among the values wins over the argument.
        """
        values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        if (values.get("num_beams") or 1) > 1:
            raise ValueError(
                f"generating_args.num_beams: found {values['num_beams']}, expected 1: engines "
                "sample, never search"
            )
        given: dict[str, Any] = {
            name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None
        }
        if not values.get("do_sample", True):
            given["temperature"] = 0.0
        if not given.get("max_new_tokens"):
            given["max_new_tokens"] = (values.get("max_length") or 0) - prompt_length
        given.setdefault("seed", seed)
        return cls(**given)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and how many answers to it are wanted.

    Attributes:
        request_id: what `abort` names it by, unique among the requests of a call.
        prefix_ids: response tokens that an aborted run of this request already made; the answers
            continue them.
        sample_keys: what the random stream of each sample is derived from, with `sampling.seed`. By
            default the id and the number of the sample.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int = 1
    prefix_ids: tuple[int, ...] = ()
    sample_keys: tuple[int | str, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(
                f"request {self.request_id}: num_samples is {self.num_samples}, expected at least 1"
            )
        if self.sample_keys is not None and len(self.sample_keys) != self.num_samples:
            raise ValueError(
                f"request {self.request_id}: {len(self.sample_keys)} sample_keys for "
                f"{self.num_samples} samples"
            )

    @property
    def keys(self) -> tuple[int | str, ...]:
        """The key of each sample."""
        if self.sample_keys:
            return self.sample_keys
        return tuple(f"{self.request_id}/{index}" for index in range(self.num_samples))

    def resume(self, output: GenerationOutput) -> GenerationRequest:
        """The rest of one of this request's samples, as a request of its own."""
        return replace(
            self,
            num_samples=1,
            prefix_ids=(*self.prefix_ids, *output.token_ids),
            sample_keys=(self.keys[output.sample_index],),
        )


@dataclass(frozen=True)
class GenerationOutput:
    """One answer.

    Attributes:
        token_ids: new tokens only, without prompt and prefix; the token that ended the response is
            among them.
        log_probs: of each new token under the distribution that it was drawn from: after penalty,
            temperature and truncation. Greedy tokens have their log-prob at temperature 1.
        finish_reason: "stop" (end token, stop id, stop string), "length", "abort" or "error".
        policy_version: of the weights that made these tokens; of the oldest, if there were several.
        error: why it failed, "what: details"; then there are no tokens.
        newest_version: of the newest weights, where the answer went on after they changed.
    """

    request_id: str
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int
    error: str | None = None
    newest_version: int | None = None


OnOutput = Callable[[GenerationOutput], None]


class Engine(Protocol):
    """Answers requests with a model.

    A sample depends on the weights, its prompt, its sampling parameters and its key; not on which
    other requests are answered at the same time, nor on their order.
    """

    policy_version: int
    """Version of the weights, stamped on outputs. Whoever updates the weights sets it."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_output: OnOutput | None = None
    ) -> list[GenerationOutput]:
        """All samples, in the order of the requests, then of their samples; blocks until the last.

        `on_output` is called with each sample as soon as it has ended. Bad requests come back as
        outputs with `finish_reason` "error"; they do not disturb the others.
        """
        ...

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests (None: all) of the calls that run now, from any thread. They return
        what they have."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with old weights."""
        ...


@dataclass(frozen=True)
class RetriedOutputs:
    """All samples of requests that each had two chances, in order, the failed ones among them."""

    all_outputs: list[GenerationOutput]
    num_retried: int

    @property
    def reasons(self) -> dict[str, int]:
        """How many samples failed twice for each reason (an error's text up to its colon)."""
        errors = [output.error for output in self.all_outputs if output.error is not None]
        return dict(Counter(error.split(":")[0] for error in errors))


def generate_with_retry(
    engine: Engine, requests: Sequence[GenerationRequest], *, on_output: OnOutput | None = None
) -> RetriedOutputs:
    """Generate; requests with a failed sample are asked once more, then given up.

    `on_output` hears of each sample once: when it worked, or when it failed for the second time.
    """
    tell = on_output or (lambda output: None)
    outputs = engine.generate(
        requests, on_output=lambda output: None if output.error else tell(output)
    )
    failed = {output.request_id for output in outputs if output.error is not None}
    again = [request for request in requests if request.request_id in failed]
    if again:
        retried = {(out.request_id, out.sample_index): out for out in engine.generate(again)}
        for index, output in enumerate(outputs):
            if output.error is not None:
                outputs[index] = retried[output.request_id, output.sample_index]
                tell(outputs[index])
    return RetriedOutputs(outputs, len(again))


# -- how responses end -----------------------------------------------------------------------------


def end_tokens(tokenizer: Any, generation_config: Any = None) -> frozenset[int]:
    """The ids that end a response: the tokenizer's end token, and what the model's generation
    config names."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *([named] if isinstance(named, int) else named or [])}
    return frozenset(ids - {None})


def text_of(tokenizer: Any) -> Decode:
    """How stop strings see tokens: as they are, special tokens included."""
    return lambda token_ids: tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


def cut_at_stop_string(
    token_ids: list[int], decode: Decode, stop_strings: Sequence[str], *, include: bool
) -> int | None:
    """How many tokens a response keeps that ends at the first stop string; None if it has none.

    With `include` it ends with the token that completes the stop string. Without, with the last
    token whose text lies before the stop string, so that no part of it is left.

    Example: tokens "a", "b<", "/x>", "c" and the stop string "</x>" keep 3 tokens, without the stop
    string 1.
    """
    text = decode(token_ids)
    ends = [text.find(stop) + len(stop) for stop in stop_strings if stop in text]
    if not ends:
        return None
    # The stop string that is complete first ends the response; of several, the longest.
    end = min(ends)
    start = min(end - len(stop) for stop in stop_strings if text[:end].endswith(stop))
    most_characters = end - 1 if include else start
    # The largest number of leading tokens whose text is at most that long.
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(token_ids[:middle])) <= most_characters:
            low = middle
        else:
            high = middle - 1
    return low + 1 if include else low
