"""Memory of a batch: allocating and copying its columns, and handing them to pickle without copying them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# From this size on numpy asks the kernel for huge pages, which makes a fresh block several times cheaper to fill than
# torch's own: one page fault for 2 MiB instead of one for every 4 KiB. A copy by one thread also keeps its pace when the
# cores are busy, while torch's waits for the slowest of its threads.
_HUGE_PAGE_BYTES = 4 << 20
_SCALARS = frozenset({bool, int, float, str, bytes, complex, type(None)})


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that keeps no reference to the memory of `tensor`."""
    return _copy_rows([tensor]) if _is_large_on_host([tensor]) else tensor.clone()


def concat_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` over the rows. Different dtypes are promoted, as torch does."""
    return _copy_rows(tensors) if _is_large_on_host(tensors) else torch.cat(tensors)


def _is_large_on_host(tensors: list[torch.Tensor]) -> bool:
    """Whether `_copy_rows` applies, and pays."""
    first = tensors[0]
    return (
        all(is_plain(t) and t.device.type == "cpu" and not t.requires_grad for t in tensors)
        and all(t.dtype == first.dtype and t.shape[1:] == first.shape[1:] for t in tensors)
        and sum(t.nbytes for t in tensors) >= _HUGE_PAGE_BYTES
    )


def _copy_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all in one new block of memory."""
    first, block = tensors[0], np.empty(sum(t.nbytes for t in tensors), dtype=np.uint8)
    shape = (sum(len(t) for t in tensors), *first.shape[1:])
    joined = torch.from_numpy(block).view(first.dtype).view(shape)
    row, byte = 0, 0
    for tensor in tensors:
        if tensor.is_contiguous():
            block[byte : byte + tensor.nbytes] = tensor_bytes(tensor)
        else:
            joined[row : row + len(tensor)] = tensor
        row, byte = row + len(tensor), byte + tensor.nbytes
    return joined


class PickledTensor:
    """Stands for a tensor while it is pickled; unpickling gives the tensor itself.

    The bytes travel as a numpy array, which pickle protocol 5 passes out of band: Ray copies them once, straight into
    shared memory. Only the elements of the tensor travel, not the storage that it may be a view of. What arrives is a
    CPU tensor without gradient, on memory of its own: Ray hands out read-only memory that other readers share, and
    torch, which knows no read-only tensors, would write into it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return tensor_from_bytes, (tensor_bytes(self.tensor), dtype_name(self.tensor), tuple(self.tensor.shape))


def plain_cpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The values alone: contiguous, on the CPU, without gradient or lazy conjugation. A copy only where needed."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The elements as a flat uint8 array, which exists for every dtype (numpy has no bfloat16)."""
    return plain_cpu_tensor(tensor).flatten().view(torch.uint8).numpy()


def dtype_name(tensor: torch.Tensor) -> str:
    """Such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def tensor_from_bytes(data: np.ndarray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `tensor_bytes`, on the memory of `data` if that is writable, else on a copy."""
    torch_dtype = getattr(torch, dtype)
    if data.size == 0:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    if not data.flags.writeable:
        data = data.copy()
    return torch.from_numpy(data).view(torch_dtype).view(*shape)


def as_picklable(tensor: torch.Tensor) -> torch.Tensor | PickledTensor:
    """What to pickle in place of `tensor`. Sparse, nested and other special tensors go torch's own way."""
    return PickledTensor(tensor) if is_plain(tensor) else tensor


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


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but dense numbers."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
