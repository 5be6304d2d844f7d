"""Memory of a batch: copying its columns, and handing them to pickle without copying them.

Columns travel as plain bytes, which pickle protocol 5 passes out of band: Ray copies them once, straight into shared
memory. On arrival Ray lends that memory, read-only, to every reader. Torch knows no read-only tensors and would write
into it, so a tensor never lies there: small columns are copied at once, large ones stay lent (`LentColumns`) until
somebody reads `DataProto.batch`. Joining or sending on what has arrived needs no such copy.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

# From this size on numpy asks the kernel for huge pages, which makes a fresh block several times cheaper to fill than
# torch's own: one page fault for 2 MiB instead of one for every 4 KiB. A copy by one thread also keeps its pace when
# the cores are busy, while torch's waits for the slowest of its threads.
_HUGE_PAGE_BYTES = 4 << 20
_SCALARS = frozenset({bool, int, float, str, bytes, complex, type(None)})


@dataclass(frozen=True)
class LentTensor:
    """A tensor's elements in memory that belongs to somebody else. `own()` copies them into a tensor."""

    data: np.ndarray  # uint8, flat, read-only
    dtype: torch.dtype
    shape: tuple[int, ...]

    def own(self) -> torch.Tensor:
        return tensor_from_bytes(self.data, dtype_name(self.dtype), self.shape)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return column_from_bytes, (self.data, dtype_name(self.dtype), self.shape)


class LentColumns:
    """The columns of a batch of which some are lent; stands in for the TensorDict until that is asked for."""

    def __init__(self, columns: Mapping[str, Any], num_rows: int) -> None:
        self._columns, self._num_rows = columns, num_rows
        self._lock, self._owned = threading.Lock(), None

    def __len__(self) -> int:
        return self._num_rows

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._columns.items()

    def own(self) -> TensorDictBase:
        """The TensorDict, on memory of its own; the same one for all threads that ask."""
        with self._lock:
            if self._owned is None:
                columns = {
                    key: value.own() if isinstance(value, LentTensor) else value
                    for key, value in self.items()
                }
                self._owned = TensorDict(columns, batch_size=[self._num_rows])
            return self._owned


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that keeps no reference to the memory of `tensor`."""
    return _copy_rows([tensor]) if _is_large_on_host([tensor]) else tensor.clone()


def concat_tensors(tensors: Sequence[torch.Tensor | LentTensor]) -> torch.Tensor:
    """`torch.cat` over the rows. Different dtypes are promoted, as torch does."""
    if _is_large_on_host(tensors):
        return _copy_rows(tensors)
    return torch.cat(
        [tensor.own() if isinstance(tensor, LentTensor) else tensor for tensor in tensors]
    )


def _is_large_on_host(tensors: Sequence[torch.Tensor | LentTensor]) -> bool:
    """Whether `_copy_rows` applies, and pays."""
    first = tensors[0]
    return (
        all(
            isinstance(t, LentTensor) or (is_plain(t) and t.is_cpu and not t.requires_grad)
            for t in tensors
        )
        and all(t.dtype == first.dtype and t.shape[1:] == first.shape[1:] for t in tensors)
        and sum(map(_num_bytes, tensors)) >= _HUGE_PAGE_BYTES
    )


def _copy_rows(tensors: Sequence[torch.Tensor | LentTensor]) -> torch.Tensor:
    """The rows of all in one new block of memory."""
    first, block = tensors[0], np.empty(sum(map(_num_bytes, tensors)), dtype=np.uint8)
    joined = (
        torch.from_numpy(block)
        .view(first.dtype)
        .view(sum(t.shape[0] for t in tensors), *first.shape[1:])
    )
    row, byte = 0, 0
    for tensor in tensors:
        num_rows, num_bytes = tensor.shape[0], _num_bytes(tensor)
        if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
            joined[row : row + num_rows] = tensor
        else:
            block[byte : byte + num_bytes] = (
                tensor_bytes(tensor) if isinstance(tensor, torch.Tensor) else tensor.data
            )
        row, byte = row + num_rows, byte + num_bytes
    return joined


def _num_bytes(tensor: torch.Tensor | LentTensor) -> int:
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else tensor.data.nbytes


@dataclass(frozen=True)
class PickledTensor:
    """Stands for a tensor while it is pickled; unpickling gives the tensor itself, or, `as_column`, maybe a lent one.

    Only the elements of the tensor travel, not the storage that it may be a view of. What arrives is on the CPU and
    without gradient.
    """

    tensor: torch.Tensor
    as_column: bool = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        restore = column_from_bytes if self.as_column else tensor_from_bytes
        return restore, (
            tensor_bytes(self.tensor),
            dtype_name(self.tensor.dtype),
            tuple(self.tensor.shape),
        )


def plain_cpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The values alone: contiguous, on the CPU, without gradient or lazy conjugation. A copy only where needed."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The elements as a flat uint8 array, which exists for every dtype (numpy has no bfloat16)."""
    return plain_cpu_tensor(tensor).flatten().view(torch.uint8).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tensor_from_bytes(data: np.ndarray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `tensor_bytes`, on the memory of `data` if that is writable, else on a copy."""
    torch_dtype = getattr(torch, dtype)
    if data.size == 0:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    if not data.flags.writeable:
        data = data.copy()
    return torch.from_numpy(data).view(torch_dtype).view(*shape)


def column_from_bytes(
    data: np.ndarray, dtype: str, shape: Sequence[int]
) -> torch.Tensor | LentTensor:
    """As `tensor_from_bytes`, but large read-only memory is not copied yet.

    Small columns are: a queue of many small batches should not hold on to Ray's shared memory.
    """
    if data.flags.writeable or data.nbytes < _HUGE_PAGE_BYTES:
        return tensor_from_bytes(data, dtype, shape)
    return LentTensor(data, getattr(torch, dtype), tuple(shape))


def as_picklable(value: Any) -> Any:
    """What to pickle in place of a tensor. Sparse, nested and other special tensors go torch's own way."""
    return PickledTensor(value) if is_plain(value) else value


def as_picklable_column(value: Any) -> Any:
    """What to pickle in place of a column of a batch."""
    return PickledTensor(value, as_column=True) if is_plain(value) else value


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`tree` with `function` applied to every tensor in its dicts, lists and tuples.

    Nothing is changed in place. A part of the tree in which nothing changed comes back as the same object.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        changed = {}
        for key, value in tree.items():
            mapped = map_tensors(value, function)
            if mapped is not value:
                changed[key] = mapped
        if not changed:
            return tree
        result = copy.copy(tree)  # keeps subclasses such as defaultdict
        result.update(changed)
        return result
    if isinstance(tree, list | tuple):
        if _SCALARS.issuperset(map(type, tree)):  # long lists of token ids or of scores
            return tree
        mapped = [map_tensors(value, function) for value in tree]
        if all(new is old for new, old in zip(mapped, tree, strict=True)):
            return tree
        if isinstance(tree, tuple):
            return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
        return mapped
    return tree


def is_plain(value: Any) -> bool:
    """Whether this is a tensor that is nothing but dense numbers."""
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
