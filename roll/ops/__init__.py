"""Fused operators behind plain functions; nothing here needs more than torch."""

from roll.ops.linear_log_probs import linear_log_probs
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import (
    entropy_from_logits,
    log_probs_and_entropy,
    log_probs_from_logits,
    next_token_log_probs,
)

__all__ = [
    "LinearLogits",
    "entropy_from_logits",
    "linear_log_probs",
    "log_probs_and_entropy",
    "log_probs_from_logits",
    "next_token_log_probs",
]
