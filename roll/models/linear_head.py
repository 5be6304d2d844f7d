"""Makes a causal language model return its final hidden states with the head's weight instead of a logits tensor.

A `transformers` model ends with `logits = self.lm_head(hidden)` and, in some families, a few operations on `logits`.
`use_linear_logits` replaces what calling the head does: it returns a `HeadOutput`, a `LinearLogits` that also takes
part in those last operations. Multiplying or dividing by a number, a tanh soft cap, a change of dtype and dropping
padded vocabulary entries are recorded in its fields (Cohere, Granite, Falcon-H1, Gemma 2 and later, Inkling);
anything else builds the logits tensor, warns once and continues with the right numbers.

The head stays the same module with the same parameters, so names in checkpoints, weight tying, optimizers and FSDP2
see no change. What has to hold is that the weight is still there when the loss reads it: under FSDP2 the head belongs
into the root group (which stays gathered after the forward), and DeepSpeed ZeRO-3, which takes weights away after
each module, needs plain logits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
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


def _on_the_tensor(name: str) -> Callable[..., Any]:
    def operator(self: HeadOutput, *args: Any) -> Any:
        return getattr(self._build(name), name)(*args)

    return operator


@dataclass(frozen=True, eq=False)
class HeadOutput(LinearLogits):
    """`LinearLogits` on its way through the rest of a model's forward.

    Behaves as the logits tensor would: `logits / 30.0`, `torch.tanh(logits)` and `logits.float()` work, as does any
    other tensor operation, at the price of building the tensor. `built_dtype` is the dtype that the model asked for
    (`.float()`); it matters only for that tensor, the operators on `LinearLogits` work in float32 or better anyway.
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
        kwargs = kwargs or {}
        if (func.__name__.endswith("_") and not func.__name__.endswith("__")) or kwargs.get(
            "inplace"
        ):
            raise _writing(func.__name__)
        is_head_output = lambda value: isinstance(value, HeadOutput)  # noqa: E731
        args, kwargs = pytree.tree_map(
            lambda value: value._build(func.__name__) if is_head_output(value) else value,
            (args, kwargs),
            is_leaf=is_head_output,
        )
        return func(*args, **kwargs)

    def __mul__(self, factor: Any) -> HeadOutput | Tensor:
        # With a cap c * tanh(s z / c), a factor f gives (f c) * tanh((f s) z / (f c)): both fields grow by f.
        if not isinstance(factor, (int, float)) or (self.soft_cap is not None and factor <= 0):
            return self._build("multiplication") * factor
        scale = self.scale * factor
        if math.isclose(scale, 1.0, rel_tol=1e-12):
            scale = (
                1.0  # (1 / c) * c, which ends a soft cap, is not always exactly 1 in floating point
            )
        return replace(
            self, scale=scale, soft_cap=None if self.soft_cap is None else self.soft_cap * factor
        )

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
        """Positions are chosen among the hidden states; `[..., :n]` keeps the first n entries of the vocabulary."""
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) == 2 and entries[0] is Ellipsis and _is_prefix(entries[1]):
            return replace(self, vocab_size=min(entries[1].stop, self.shape[-1]))
        try:
            return replace(self, hidden=super().__getitem__(index).hidden)
        except (
            IndexError
        ):  # the index reaches into the vocabulary, or it is wrong for the tensor as well
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
        # Only names that LinearLogits lacks arrive here; private and dunder names are how libraries probe objects.
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            raise _writing(name)
        return getattr(self._build(f"Tensor.{name}"), name)

    def _build(self, reason: str) -> Tensor:
        warnings.warn(
            f"The logits tensor {tuple(self.shape)} is built because the model's forward needs it ({reason}). Results"
            " are the same, memory is not: log-probs now start from logits instead of hidden states.",
            RuntimeWarning,
            stacklevel=3,
        )
        return self.materialize()


def _writing(operation: str) -> TypeError:
    return TypeError(
        f"the model's forward writes into its logits ({operation}), which it cannot while they are linear logits: do"
        " not call use_linear_logits on this model"
    )


def _is_prefix(entry: Any) -> bool:
    """`:n` with n > 0."""
    is_stop = isinstance(entry, slice) and isinstance(entry.stop, int) and entry.stop > 0
    return is_stop and entry.start is None and entry.step is None


def _flatten(value: HeadOutput) -> tuple[list[Any], Any]:
    children, context = flatten_linear_logits(value)
    return children, (context, value.built_dtype)


def _unflatten(children: Any, context: Any) -> HeadOutput:
    parts, built_dtype = context
    return HeadOutput(**unflatten_parts(children, parts), built_dtype=built_dtype)


# FSDP2 finds the tensors of a module's output, whose gradients it waits for, through this registration.
pytree.register_pytree_node(
    HeadOutput, _flatten, _unflatten, serialized_type_name="roll.models.HeadOutput"
)


def _linear_logits_forward(self: nn.Linear, hidden: Tensor) -> HeadOutput:
    return HeadOutput(hidden, self.weight, self.bias)


def use_linear_logits(model: nn.Module) -> bool:
    """Makes `model(...).logits` a `LinearLogits`, in place. True if it does so now, False if it keeps plain logits.

    `model` is a causal language model of `transformers`, or a `PeftModel` around one. A head that is not a plain
    linear layer keeps returning logits, with a warning: a LoRA adapter on the head itself (its two extra products
    have no place in `LinearLogits`; training the whole head through `additional_target: lm_head` has), or a
    quantised head. So does a model whose forward writes into its logits. Calling this twice is the same as calling it
    once; `plain_logits` switches it off for a while.
    """
    heads = _heads(model)
    unusual = [
        head
        for head in heads
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward
    ]
    if unusual or base_model(model).config.model_type in _WRITE_INTO_LOGITS:
        kind = type(unusual[0]) if unusual else None
        reason = (
            f"its head is a {kind.__module__}.{kind.__qualname__}"
            if kind
            else "its forward writes into them"
        )
        warnings.warn(
            f"{type(base_model(model)).__name__} keeps building its logits tensor: {reason}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    for head in heads:
        # A bound method, so that copy.deepcopy binds the copy's head to the copy.
        head.forward = MethodType(_linear_logits_forward, head)
    return True


@contextmanager
def plain_logits(model: nn.Module) -> Generator[None, None, None]:
    """Inside, `model(...).logits` is an ordinary tensor, as `generate()` wants it; afterwards, all is as before."""
    replaced = [
        (head, head.__dict__.pop("forward")) for head in _heads(model) if "forward" in head.__dict__
    ]
    try:
        yield
    finally:
        for head, forward in replaced:
            head.forward = forward


def _heads(model: nn.Module) -> list[nn.Module]:
    """The modules that take a turn as output head: usually one; with peft's `modules_to_save`, the original and its
    trained copies, of which the adapter's state chooses one."""
    head = base_model(model).get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no output embedding: linear logits are for causal language models."
        )
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        return [head.original_module, *copies.values()]
    return [head]
