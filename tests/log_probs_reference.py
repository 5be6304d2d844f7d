"""The plain way to log-probs in float64, and a watch on the tensors that an operator makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def reference(
    logits: Tensor,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor | None, Tensor]:
    """(log_probs, entropy) of logits (..., V): log_softmax of the selected rows, zeros elsewhere.
    Differentiable."""
    chosen = torch.ones(logits.shape[:-1], dtype=torch.bool) if mask is None else mask != 0
    rows = torch.log_softmax(logits[chosen] / temperature, -1)
    zeros = torch.zeros(chosen.shape, dtype=rows.dtype)
    possible = rows > -torch.inf
    finite = torch.where(possible, rows, 0.0)
    entropy = zeros.masked_scatter(
        chosen, -(torch.where(possible, finite.exp(), 0.0) * finite).sum(-1)
    )
    if labels is None:
        return None, entropy
    return zeros.masked_scatter(
        chosen, rows.gather(-1, labels[chosen].unsqueeze(-1)).squeeze(-1)
    ), entropy


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    if expected.numel() == 0:
        return 0.0
    return float(
        (found.double() - expected.double()).abs().max()
        / expected.double().abs().max().clamp(min=1e-300)
    )


class TensorWatch(TorchDispatchMode):
    """Remembers every operation inside the context, backward included, and the sizes of the tensors
    that come out."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append(func.overloadpacket.__name__)
        self.sizes += [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

    @property
    def num_products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_") for name in self.operations)

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)
