"""What the GPU benchmarks compare roll with: its own torch version, plain torch, and other
libraries if installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from gpu_harness import Way
from torch import Tensor

from roll.ops import log_probs as log_probs_module
from roll.ops import softmax_rows


def plain_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def linear_peers(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Log-probs, or losses, of the labels from hidden states: one tensor to call backward on."""

    def cce() -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(hidden, weight, labels, reduction="none")

    def liger() -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)

    def verl() -> Tensor:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(hidden, weight, labels, 1.0, "none")[0]

    def trl() -> Tensor:
        from trl.trainer.utils import selective_log_softmax

        return selective_log_softmax(F.linear(hidden, weight), labels)

    plain = lambda: plain_log_probs(F.linear(hidden, weight), labels)  # noqa: E731
    return usable(
        {"plain torch": plain, "TRL": trl, "cut-cross-entropy": cce, "Liger": liger, "verl": verl}
    )


def logits_peers(logits: Tensor, labels: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Log-probs and entropies from logits that exist, added up to one tensor."""

    def plain() -> Tensor:
        rows = torch.log_softmax(logits.float(), -1)
        return rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - (rows.exp() * rows).sum(-1)

    def trl() -> Tensor:
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax

        return selective_log_softmax(logits, labels) + entropy_from_logits(logits)

    return usable({"plain torch": plain, "TRL": trl})


def usable(peers: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Those that are installed and run; why another one does not is said once."""
    found = {}
    for name, way in peers.items():
        try:
            with torch.no_grad():
                way()
            found[name] = way
        except ImportError:
            continue
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            print(
                f"{name} is installed but does not run here: {type(error).__name__}: {str(error)[:200]}"
            )
    return found


def without_graph(way: Way) -> Way:
    def quiet() -> object:
        with torch.no_grad():
            return way()

    return quiet


@contextmanager
def torch_version() -> Iterator[None]:
    """Inside, roll's operators run without their kernels: the reference."""
    modules = (softmax_rows, log_probs_module, sys.modules["roll.ops.linear_log_probs"])
    original = softmax_rows.kernels_for
    for module in modules:
        module.kernels_for = lambda raw: None  # pyrefly: ignore[missing-attribute]
    try:
        yield
    finally:
        for module in modules:
            module.kernels_for = original  # pyrefly: ignore[missing-attribute]
