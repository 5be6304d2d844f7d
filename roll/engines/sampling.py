"""From logits to tokens: pure functions on rows of logits, (R, V), in float32 or better.

A token is drawn from the final distribution by one uniform number per row, which is a hash of the
row's own key and of the token's position in the response. So a sample does not depend on its
neighbours, on the batch it sits in or on how often it was interrupted, and no generator has a state
to keep, which torch's generators do.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from roll.engines.request import SamplingParams

# Of a large vocabulary, so many most likely tokens are sorted first to find where top-p ends.
TOP_P_CANDIDATES = 1024


def stream_key(seed: int, key: int | str) -> int:
    """63 bits that name the random stream of a sample; integer and text keys never meet."""
    text = f"{seed}/{type(key).__name__}/{key}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def uniforms(keys_R: Tensor, positions_RT: Tensor) -> Tensor:
    """A float64 in [0, 1) for each (stream key, position): SplitMix64 as tensor operations.

    Example: `uniforms(torch.tensor([7]), torch.arange(3)[None])` begins stream 7.
    """
    # The constants of SplitMix64 as int64 of the same bits; products wrap around, as intended.
    x = keys_R[:, None] + (positions_RT + 1) * (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros, where int64's own fills with the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def truncate(
    logits_RV: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """-inf on the tokens that may not be drawn: top-k, then top-p of what is left, then min-p.

    top-p keeps a token when the tokens above it have less than `top_p` of the mass, so at least one
    stays. Tokens that tie with the last one kept stay too, in top-k and in top-p: the set never
    depends on the order of the vocabulary.
    """
    num_tokens = logits_RV.shape[-1]
    limit_R1: Tensor | None = None
    top_RK: Tensor | None = None
    if 0 < top_k < num_tokens:
        top_RK = logits_RV.topk(top_k, dim=-1).values
        limit_R1 = top_RK[:, -1:]
    if top_p < 1:
        other_R1 = _top_p_limit(logits_RV, top_RK, top_p)
        limit_R1 = other_R1 if limit_R1 is None else torch.maximum(limit_R1, other_R1)
    if min_p > 0:
        other_R1 = logits_RV.amax(-1, keepdim=True) + math.log(min_p)
        limit_R1 = other_R1 if limit_R1 is None else torch.maximum(limit_R1, other_R1)
    if limit_R1 is None:
        return logits_RV
    return logits_RV.masked_fill(logits_RV < limit_R1, -math.inf)


def _top_p_limit(logits_RV: Tensor, top_RK: Tensor | None, top_p: float) -> Tensor:
    """The smallest logit that top-p keeps, (R, 1), among the descending `top_RK` or all tokens."""
    probs_RK: Tensor | None = None
    if top_RK is None and logits_RV.shape[-1] > 4 * TOP_P_CANDIDATES:
        top_RK = logits_RV.topk(TOP_P_CANDIDATES, dim=-1).values
        probs_RK = (top_RK - logits_RV.logsumexp(-1, keepdim=True)).exp()
        if not bool((probs_RK.sum(-1) >= top_p).all()):
            top_RK = probs_RK = None
    if top_RK is None:
        top_RK = logits_RV.sort(dim=-1, descending=True).values
    if probs_RK is None:
        probs_RK = top_RK.softmax(-1)
    above_RK = probs_RK.cumsum(-1) - probs_RK
    last_R1 = (above_RK < top_p).sum(-1, keepdim=True).clamp_(min=1) - 1
    return top_RK.gather(-1, last_R1)


def transform(logits_RV: Tensor, params: SamplingParams, seen_RV: Tensor | None = None) -> Tensor:
    """Logits of the distribution to sample from; `seen_RV` marks the tokens of prompt and response.

    The temperature of greedy sampling is 1: its tokens are the likeliest at any temperature.
    """
    penalty = params.repetition_penalty
    if penalty != 1:
        assert seen_RV is not None
        penalized_RV = torch.where(logits_RV > 0, logits_RV / penalty, logits_RV * penalty)
        logits_RV = torch.where(seen_RV, penalized_RV, logits_RV)
    if params.is_greedy:
        return logits_RV
    if params.temperature != 1:
        logits_RV = logits_RV / params.temperature
    return truncate(logits_RV, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def draw(logits_RV: Tensor, uniforms_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token of softmax(logits) per row, or the likeliest without uniforms: (tokens, log-probs),
    each (R,).

    It is the first token whose cumulative probability exceeds the row's uniform number. Tokens at
    -inf are never drawn.
    """
    log_probs_RV = torch.log_softmax(logits_RV, dim=-1)
    if uniforms_R is None:
        token_R1 = logits_RV.argmax(-1, keepdim=True)
    else:
        # In float64, so that sums over a large vocabulary do not swallow small probabilities.
        cdf_RV = log_probs_RV.exp().cumsum(-1, dtype=torch.float64)
        # Below the total even after rounding, so that the search ends at a token that can be.
        mass_R1 = uniforms_R[:, None] * cdf_RV[:, -1:] * (1 - 2.0**-52)
        token_R1 = torch.searchsorted(cdf_RV, mass_R1, right=True)
    # Logits that are not numbers have no sum, and the search ends behind the vocabulary.
    token_R1 = token_R1.clamp_(max=logits_RV.shape[-1] - 1)
    return token_R1[:, 0], log_probs_RV.gather(-1, token_R1)[:, 0]
