"""Logits that are not built: hidden states together with the head that would turn them into
logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

RowIndex = int | slice | Tensor | list[int]


@dataclass(frozen=True, eq=False)
class LinearLogits:
    """What a head returns in place of logits: `cap(scale * (hidden @ weight.T + bias))`, not
    computed yet.

    With V = 151,936 the logits of 8,192 tokens take 2.3 GiB in bfloat16 and their float32
    log-softmax 4.6 GiB more; the hidden states of a 7B model take 0.05 GiB. `next_token_log_probs`
    accepts this object wherever it accepts logits, and gradients reach `hidden`, `weight` and
    `bias`. It is a pytree node, so it passes through the hooks of FSDP2, and a dataclass, so it
    passes through those of DDP.

    hidden:      (..., H), usually (B, S, H)
    weight:      (V, H), the head's weight as `torch.nn.Linear` keeps it
    bias:        (V,) or None
    scale:       multiplies the logits (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`)
    soft_cap:    cap(x) = soft_cap * tanh(x / soft_cap) (Gemma's `final_logit_softcapping`), or None
    vocab_size:  rows of `weight` beyond it pad the vocabulary to a round size: they never enter the
                 softmax, and their gradient is zero; None for none
    weight_sum, bias_sum: where the operators of `roll.ops` add the gradients of weight and bias
                 instead of handing them to autograd; None to hand them over
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    vocab_size: int | None = None
    weight_sum: Tensor | None = None
    bias_sum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits: (..., vocabulary without padding)."""
        columns = self.weight.shape[0] if self.vocab_size is None else self.vocab_size
        return torch.Size((*self.hidden.shape[:-1], columns))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def __getitem__(self, index: RowIndex | tuple[RowIndex, ...]) -> LinearLogits:
        """The same head on some positions: `output[2:4]`, `output[mask]`. Never the vocabulary."""
        parts = index if isinstance(index, tuple) else (index,)
        used = 0
        for part in parts:
            if part is None or part is Ellipsis:
                raise IndexError(
                    f"LinearLogits takes no {part} in an index: it slices positions, so name "
                    "their axes"
                )
            used += part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
        if used > self.hidden.ndim - 1:
            raise IndexError(
                f"index {index!r} reaches into the vocabulary of LinearLogits with shape "
                f"{tuple(self.shape)}; only its first {self.hidden.ndim - 1} axes can be indexed, "
                "or call .materialize() first"
            )
        return replace(self, hidden=self.hidden[index])

    def materialize(self) -> Tensor:
        """The logits themselves, (..., vocab_size), differentiable: for small shapes and for
        tests."""
        columns = self.shape[-1]
        bias = None if self.bias is None else self.bias[:columns]
        logits = F.linear(self.hidden, self.weight[:columns], bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is None:
            return logits
        return self.soft_cap * torch.tanh(logits / self.soft_cap)


TENSORS = ("hidden", "weight", "bias", "weight_sum", "bias_sum")
NUMBERS = ("scale", "soft_cap", "vocab_size")


def flatten_linear_logits(node: LinearLogits) -> tuple[list[Any], list[Any]]:
    """Its tensors, and the rest."""
    return [getattr(node, name) for name in TENSORS], [getattr(node, name) for name in NUMBERS]


def unflatten_parts(tensors: Any, numbers: Any) -> dict[str, Any]:
    """What `flatten_linear_logits` took apart, as keyword arguments."""
    return dict(zip((*TENSORS, *NUMBERS), (*tensors, *numbers), strict=True))


pytree.register_pytree_node(
    LinearLogits,
    flatten_linear_logits,
    lambda tensors, numbers: LinearLogits(**unflatten_parts(tensors, numbers)),
    serialized_type_name=f"{LinearLogits.__module__}.{LinearLogits.__qualname__}",
)
