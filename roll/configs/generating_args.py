"""How text is sampled."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from roll.configs.config_model import (
    AtLeastOne,
    AtLeastZero,
    ConfigModel,
    NoEffect,
    NonNegative,
    NotBuilt,
    Number,
    Positive,
    Whole,
    plain_values,
)


class GeneratingArguments(ConfigModel):
    """Sampling parameters of a role that generates."""

    do_sample: bool = True
    """Sample; false takes the most likely token every time."""

    temperature: NonNegative = 0.95
    """Divides the logits before sampling; 0 takes the most likely token."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = 0.7
    """Sample from the most likely tokens whose probabilities add up to this; 1 keeps all of them."""

    top_k: Annotated[Whole, Field(ge=-1)] = 50
    """Sample from this many of the most likely tokens; 0 or -1 keeps all of them."""

    min_p: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this fraction of the most likely one; 0 keeps all of them."""

    num_beams: Annotated[AtLeastOne, NotBuilt("beam search", 1)] = 1
    """Width of a beam search; 1 is none."""

    max_length: AtLeastOne = 8192
    """Longest prompt plus response, in tokens; used only where `max_new_tokens` is 0."""

    max_new_tokens: AtLeastZero = 8192
    """Longest response, in tokens. RLVR sets it to `sequence_length - prompt_length`."""

    repetition_penalty: Positive = 1.0
    """Penalty on tokens that occurred before; 1 is none."""

    length_penalty: Annotated[Number, NoEffect("there is no beam search")] = 1.0
    """Exponent on the length of a beam; positive values favour longer ones."""

    num_return_sequences: AtLeastOne = 1
    """Responses per prompt. RLVR sets it to `num_return_sequences_in_group`, the agentic pipeline to 1."""

    stop_strings: list[str] | None = None
    """Texts that end a response."""

    include_stop_str_in_output: bool | None = None
    """Keep the text of `stop_strings` that ended a response, as null does; false drops the tokens it is made of."""

    logprobs: Annotated[
        AtLeastZero | None, NoEffect("samples have the log-probabilities of their own tokens")
    ] = 0
    """Most likely tokens per position whose log-probabilities are returned."""

    def to_dict(self) -> dict[str, Any]:
        """What a generator takes: one limit on the length, and no key that leaves the choice to the engine."""
        values = plain_values(self)
        del values["max_length" if self.max_new_tokens > 0 else "max_new_tokens"]
        if self.include_stop_str_in_output is None:
            del values["include_stop_str_in_output"]
        return values
