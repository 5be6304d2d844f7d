"""Makes a causal language model return hidden states with the head's weight instead of logits.

A `transformers` model ends with `logits = self.lm_head(hidden)` and, in some families, a few
operations on `logits`. `use_linear_logits` replaces what calling the head does: it returns a
`HeadOutput`, a `LinearLogits` that also takes part in those operations. Multiplying or dividing by
a number, a tanh soft cap, a change of dtype and dropping padded vocabulary entries are recorded in
its fields (Cohere, Granite, Falcon-H1, Gemma 2 and later, Inkling); anything else builds the logits
tensor, warns once and continues with the right numbers. transformers has no switch for this.

The head stays the same module with the same parameters: checkpoints, weight tying, optimizers and
FSDP2 see no change. The weight must still be there when the loss reads it: under FSDP2 the head
belongs into the root group, and DeepSpeed ZeRO-3 needs plain logits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from roll.models.lora import base_model
from roll.ops.linear_logits import LinearLogits, flatten_linear_logits, unflatten_parts

# The forwards of these write into the logits tensor, which nothing but a tensor can follow.
_WRITE_INTO_LOGITS = frozenset({"chameleon", "xlstm"})


def use_linear_logits(model: nn.Module) -> bool:
    """Makes `model(...).logits` a `LinearLogits`, in place. False: it keeps plain logits.

    `model` is a causal language model of `transformers`, or a `PeftModel` around one. A head that
    is not a plain linear layer keeps returning logits, with a warning: a LoRA adapter on the head
    itself (training the whole head through `additional_target: lm_head` works), or a quantised
    head. So does a model whose forward writes into its logits. Calling this twice is the same as
    calling it once.
    """
    base = base_model(model)
    head: Any = base.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no output embedding: linear logits are for causal "
            "language models."
        )
    heads = [head]
    if isinstance(getattr(head, "modules_to_save", None), nn.ModuleDict):
        # peft's trained copies of the head; the adapter's state chooses one.
        heads = [head.original_module, *head.modules_to_save.values()]
    reason = ""
    if base.config.model_type in _WRITE_INTO_LOGITS:
        reason = "its forward writes into them"
    for one in heads:
        if not isinstance(one, nn.Linear) or type(one).forward is not nn.Linear.forward:
            reason = f"its head is a {type(one).__module__}.{type(one).__qualname__}"
    if reason:
        warnings.warn(
            f"{type(base).__name__} keeps building its logits tensor: {reason}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    for one in heads:
        # A bound method, so that copy.deepcopy binds the copy's head to the copy.
        one.forward = MethodType(_linear_logits_forward, one)
    return True


def _linear_logits_forward(self: nn.Linear, hidden: Tensor) -> HeadOutput:
    return HeadOutput(hidden, self.weight, self.bias)


def _on_the_tensor(name: str) -> Callable[..., Any]:
    def operator(self: HeadOutput, *args: Any) -> Any:
        return getattr(self._build(name), name)(*args)

    return operator


@dataclass(frozen=True, eq=False)
class HeadOutput(LinearLogits):
    """`LinearLogits` on its way through the rest of a model's forward, where it acts as logits.

    `built_dtype` is the dtype that the model asked for (`.float()`); it matters only for the tensor
    that is built, since the operators on `LinearLogits` work in float32 or better anyway.
    """

    built_dtype: torch.dtype | None = None

    def materialize(self) -> Tensor:
        logits = super().materialize()
        return logits if self.built_dtype is None else logits.to(self.built_dtype)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.tanh, Tensor.tanh) and len(args) == 1 and not kwargs:
            return args[0].tanh()
        kwargs, name = kwargs or {}, func.__name__
        if (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace"):
            raise _writing(name)
        is_head_output = lambda value: isinstance(value, HeadOutput)  # noqa: E731
        args, kwargs = pytree.tree_map(
            lambda value: value._build(name) if is_head_output(value) else value,
            (args, kwargs),
            is_leaf=is_head_output,
        )
        return func(*args, **kwargs)

    def __mul__(self, factor: Any) -> HeadOutput | Tensor:
        # With a cap c * tanh(s z / c), a factor f gives (f c) * tanh((f s) z / (f c)).
        if not isinstance(factor, (int, float)) or (self.soft_cap is not None and factor <= 0):
            return self._build("multiplication") * factor
        scale = self.scale * factor
        if math.isclose(scale, 1.0, rel_tol=1e-12):
            scale = 1.0  # (1 / c) * c, which ends a soft cap, is not always exactly 1
        soft_cap = None if self.soft_cap is None else self.soft_cap * factor
        return replace(self, scale=scale, soft_cap=soft_cap)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> HeadOutput | Tensor:
        if not isinstance(divisor, (int, float)):
            return self._build("division") / divisor
        return self * (1.0 / divisor)

    def tanh(self) -> HeadOutput | Tensor:
        if self.soft_cap is not None:
            return self._build("a second tanh").tanh()
        return replace(self, soft_cap=1.0)

    def __getitem__(self, index: Any) -> HeadOutput | Tensor:  # pyrefly: ignore[bad-override]
        """Positions are chosen among the hidden states; `[..., :n]` keeps n vocabulary entries."""
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
            last = index[1]
            is_slice = isinstance(last, slice) and last.start is None and last.step is None
            if is_slice and isinstance(last.stop, int) and last.stop > 0:
                return replace(self, vocab_size=min(last.stop, self.shape[-1]))
        try:
            return replace(self, hidden=super().__getitem__(index).hidden)
        except IndexError:  # it reaches into the vocabulary, or is wrong for the tensor as well
            return self._build("indexing")[index]

    def to(self, *args: Any, **kwargs: Any) -> HeadOutput | Tensor:
        if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
            return replace(self, built_dtype=args[0])
        return self._build("Tensor.to").to(*args, **kwargs)

    def float(self) -> HeadOutput:
        return replace(self, built_dtype=torch.float32)

    def contiguous(self) -> HeadOutput:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _writing("item assignment")

    __add__, __radd__ = _on_the_tensor("__add__"), _on_the_tensor("__radd__")
    __sub__, __rsub__ = _on_the_tensor("__sub__"), _on_the_tensor("__rsub__")
    __rtruediv__, __pow__ = _on_the_tensor("__rtruediv__"), _on_the_tensor("__pow__")
    __neg__, __abs__ = _on_the_tensor("__neg__"), _on_the_tensor("__abs__")
    __lt__, __le__ = _on_the_tensor("__lt__"), _on_the_tensor("__le__")
    __gt__, __ge__ = _on_the_tensor("__gt__"), _on_the_tensor("__ge__")

    def __getattr__(self, name: str) -> Any:
        # Only names that LinearLogits lacks arrive here; libraries probe objects by private ones.
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            raise _writing(name)
        return getattr(self._build(f"Tensor.{name}"), name)

    def _build(self, reason: str) -> Tensor:
        warnings.warn(
            f"The logits tensor {tuple(self.shape)} is built because the model's forward needs it "
            f"({reason}). Results are the same, memory is not: log-probs now start from logits "
            "instead of hidden states.",
            RuntimeWarning,
            stacklevel=3,
        )
        return self.materialize()


def _writing(operation: str) -> TypeError:
    return TypeError(
        f"the model's forward writes into its logits ({operation}), which it cannot while they are "
        "linear logits: do not call use_linear_logits on this model"
    )


def _flatten(value: HeadOutput) -> tuple[list[Any], Any]:
    children, context = flatten_linear_logits(value)
    return children, (context, value.built_dtype)


def _unflatten(children: Any, context: Any) -> HeadOutput:
    parts, built_dtype = context
    return HeadOutput(**unflatten_parts(children, parts), built_dtype=built_dtype)


# FSDP2 finds the tensors of a module's output, whose gradients it waits for, through this.
pytree.register_pytree_node(
    HeadOutput, _flatten, _unflatten, serialized_type_name="roll.models.HeadOutput"
)
