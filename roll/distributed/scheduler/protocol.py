"""`DataProto`: the batch that travels between the pipeline and the workers.

Rows live in two stores, `batch` (tensors) and `non_tensor_batch` (one Python object per row and
column); facts about the batch as a whole live in `meta_info`. All columns have the same number of
rows, and no name is in both stores.

    data = DataProto.from_dict(
        {"input_ids": torch.arange(8).view(4, 2)},          # batch["input_ids"]: (4, 2)
        non_tensors={"tag": ["a", "b", "a", "b"]},          # non_tensor_batch["tag"]: 4 objects
        meta_info={"global_step": 3},
    )
    first, second = data.chunk(2)                           # rows 0 1 and rows 2 3
    DataProto.concat([first, second])                       # rows 0 1 2 3

Who owns what: `slice`, `data[a:b]` and `select` share memory with their source, as tensor slices
do; `chunk`, `split`, `select_idxs`, `repeat`, `concat` of several and the batches of
`make_iterator` do not. All share the one `meta_info` dict of their source, except `concat` of
several, which makes a new one.

TensorDict holds the tensor columns; rows of objects, merging of metrics, a file format without
pickle and shared memory lent by Ray are not in it, and are here.
"""

import base64
import copy
import json
import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import TensorDict, TensorDictBase

from roll.exceptions import DataError, WorkerTimeoutError

# Rows as callers name them: positions, or a mask with one bool per row.
RowIndices = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
Keys = str | Sequence[str]
_RowSlice = slice  # the builtin; inside the class the name means the method

# -- tensors in memory of their own, or lent -------------------------------------------------------
#
# Columns travel as plain bytes, which pickle protocol 5 passes out of band: Ray copies them once,
# straight into shared memory. On arrival Ray lends that memory, read-only, to every reader. Torch
# knows no read-only tensors and would write into it, so a tensor never lies there: small columns
# are copied at once, large ones stay lent until somebody reads `DataProto.batch`. Joining or
# sending on what has arrived needs no such copy.

# From this size on numpy asks the kernel for huge pages, which makes a fresh block several times
# cheaper to fill than torch's own: one page fault for 2 MiB instead of one for every 4 KiB. A copy
# by one thread also keeps its pace when the cores are busy, while torch's waits for the slowest of
# its threads.
_HUGE_PAGE_BYTES = 4 << 20
_SCALARS = frozenset({bool, int, float, str, bytes, complex, type(None)})


@dataclass(frozen=True)
class LentTensor:
    """A tensor's elements in memory that belongs to somebody else; `own()` copies them."""

    data: np.ndarray  # uint8, flat, read-only
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def own(self) -> torch.Tensor:
        return _tensor_from_bytes(self.data, str(self.dtype), self.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensor_from_bytes, (self.data, str(self.dtype), self.shape, True)


class LentColumns:
    """Columns of which some are lent; stands in for the TensorDict until that is asked for."""

    def __init__(self, columns: Mapping[str, Any], num_rows: int) -> None:
        self._columns, self._num_rows = columns, num_rows
        self._lock, self._owned = threading.Lock(), None
        self.items = columns.items

    def __len__(self) -> int:
        return self._num_rows

    def own(self) -> TensorDictBase:
        """The TensorDict, on memory of its own; the same one for all threads that ask."""
        with self._lock:
            if self._owned is None:
                columns = {key: _owned(value) for key, value in self._columns.items()}
                self._owned = _tensor_dict(columns, self._num_rows)
            return self._owned


@dataclass(frozen=True)
class _Pickled:
    """Stands for a tensor while it is pickled; unpickling gives the tensor itself, or a lent one.

    Only the elements travel, not the storage that the tensor may be a view of. What arrives is on
    the CPU and without gradient.
    """

    tensor: torch.Tensor
    may_be_lent: bool

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor
        content = (_tensor_bytes(tensor), str(tensor.dtype), tuple(tensor.shape))
        return _tensor_from_bytes, (*content, self.may_be_lent)


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor of dense numbers; sparse and other ones go torch's own way."""
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized


def _picklable(value: Any) -> Any:
    return _Pickled(value, may_be_lent=False) if _is_plain(value) else value


def _plain_cpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The values alone: contiguous, on the CPU, without gradient or lazy conjugation."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The elements as a flat uint8 array, which exists for every dtype (numpy has no bfloat16)."""
    return _plain_cpu_tensor(tensor).flatten().view(torch.uint8).numpy()


def _tensor_from_bytes(
    data: np.ndarray, dtype: str, shape: Sequence[int], may_be_lent: bool = False
) -> Any:
    """The inverse of `_tensor_bytes`, on the memory of `data` if that is writable, else on a copy.

    With `may_be_lent`, large read-only memory is not copied yet. Small columns always are: a queue
    of many small batches should not hold on to Ray's shared memory.
    """
    torch_dtype = getattr(torch, dtype.removeprefix("torch."))
    if data.size == 0:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    if not data.flags.writeable:
        if may_be_lent and data.nbytes >= _HUGE_PAGE_BYTES:
            return LentTensor(data, torch_dtype, tuple(shape))
        data = data.copy()
    return torch.from_numpy(data).view(torch_dtype).view(*shape)


def _owned(column: Any) -> Any:
    return column.own() if isinstance(column, LentTensor) else column


def _join(columns: Sequence[Any]) -> Any:
    """The rows of all columns in new memory. Different dtypes are promoted, as torch does."""
    first, num_bytes = columns[0], 0
    for column in columns:
        copied = isinstance(column, LentTensor) or (
            _is_plain(column) and column.is_cpu and not column.requires_grad
        )
        if not copied or column.dtype != first.dtype or column.shape[1:] != first.shape[1:]:
            return torch.cat([_owned(column) for column in columns])
        num_bytes += column.nbytes
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.cat([_owned(column) for column in columns])
    block = np.empty(num_bytes, dtype=np.uint8)
    num_rows = sum(column.shape[0] for column in columns)
    joined = torch.from_numpy(block).view(first.dtype).view(num_rows, *first.shape[1:])
    row, byte = 0, 0
    for column in columns:
        if isinstance(column, LentTensor):
            block[byte : byte + column.nbytes] = column.data
        elif column.is_contiguous():
            block[byte : byte + column.nbytes] = _tensor_bytes(column)
        else:
            joined[row : row + column.shape[0]] = column
        row, byte = row + column.shape[0], byte + column.nbytes
    return joined


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`tree` with `function` applied to every tensor in its dicts, lists and tuples.

    Nothing is changed in place. A part in which nothing changed comes back as the same object.
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


def move_tensors_to_device(tree: Any, device: torch.device | str | int) -> Any:
    """`tree` with the tensors in its dicts, lists and tuples on `device`; itself if it has none."""
    return map_tensors(tree, lambda tensor: tensor.to(device))


# -- columns ---------------------------------------------------------------------------------------


def _tensor_dict(columns: Mapping[str, Any], num_rows: int) -> TensorDict:
    return TensorDict(dict(columns), batch_size=[num_rows])


def object_column(key: str, values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """A 1-D object array with one object per row; `key` names it in errors.

    Numbers become Python numbers; the rows of an array with more dimensions stay arrays, one for
    each row. A 1-D object array comes back as it is.
    """
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise ValueError(f"non-tensor column {key!r} is a single value; expected one per row")
        if values.ndim == 1:
            return values if values.dtype == object else values.astype(object)
    elif isinstance(values, str | bytes) or not isinstance(values, Sequence):
        kind = type(values).__name__
        raise TypeError(f"non-tensor column {key!r} is a {kind}; expected a list or array of rows")
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):  # numpy would look inside lists and arrays of equal length
        column[row] = value
    return column


def custom_np_concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One object column of the rows of all, whatever shapes the objects in the rows have."""
    return np.concatenate([object_column("", array) for array in arrays])


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows to columns: `[{"a": 1}, {"a": 2}]` gives `{"a": [1, 2]}`. All need the same keys."""
    if not list_of_dict:
        return {}
    keys = list(list_of_dict[0])
    for row, mapping in enumerate(list_of_dict):
        if set(mapping) != set(keys):
            raise ValueError(f"row {row} has keys {sorted(mapping)}; row 0 has {sorted(keys)}")
    return {key: [mapping[key] for mapping in list_of_dict] for key in keys}


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add to the first what only the second has, in place; columns of both must be equal."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(
            f"cannot unite {tensor_dict1.batch_size[0]} rows with {tensor_dict2.batch_size[0]} rows"
        )
    left, right = dict(tensor_dict1.items()), dict(tensor_dict2.items())
    return tensor_dict1.update(_new_items(left, right, "tensor column"))


def union_numpy_dict(
    dict1: dict[str, np.ndarray], dict2: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add to the first what only the second has, in place; columns of both must be equal."""
    dict1.update(_new_items(dict1, dict2, "non-tensor column"))
    return dict1


def _new_items(left: Mapping[str, Any], right: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What only `right` has. What both have must be equal; `kind` names the store in the error."""
    new = {}
    for key, value in right.items():
        if key not in left:
            new[key] = value
        elif not same_value(left[key], value):
            found = []
            for side in (left[key], value):
                text = repr(side)
                if isinstance(side, torch.Tensor):
                    text = f"{side.dtype} {tuple(side.shape)}"
                found.append(text if len(text) <= 60 else f"{text[:60]}...")
            raise ValueError(
                f"{kind} {key!r} is in both batches with different values: {' and '.join(found)}; "
                "drop or rename it in one of them"
            )
    return new


def same_value(left: Any, right: Any) -> bool:
    """Equality of tensors (with dtype and shape), arrays, containers and others; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        right = right.to(left.device)
        both_nan = (left != left) & (right != right)
        return torch.equal(left, right) or bool(((left == right) | both_nan).all())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype != object:
            return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
        return all(same_value(x, y) for x, y in zip(left.flat, right.flat, strict=True))
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        left, right = dict(left.items()), dict(right.items())
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return False
        return all(same_value(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if type(left) is not type(right) or len(left) != len(right):
            return False
        return all(same_value(x, y) for x, y in zip(left, right, strict=True))
    containers = torch.Tensor | np.ndarray | dict | list | tuple
    if isinstance(left, containers) or isinstance(right, containers):
        return False
    return bool(left == right) or bool(left != left and right != right)


# -- the batch -------------------------------------------------------------------------------------


class DataProto:
    """A batch of rows: tensor columns, object columns, and a free dict about the whole.

    Args:
        batch: a TensorDict with one batch dimension; None when there are no tensor columns.
        non_tensor_batch: column name to array; anything but a 1-D object array is turned into one
            object per row.
        meta_info: kept as the object that it is, never copied.
    """

    _batch: TensorDictBase | LentColumns | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: TensorDictBase | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.batch = batch
        self.non_tensor_batch = {
            key: object_column(key, value) for key, value in (non_tensor_batch or {}).items()
        }
        self.meta_info = {} if meta_info is None else meta_info
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> "DataProto":
        """A batch of these columns. The dicts stay the caller's; the tensors are not copied."""
        if num_batch_dims != 1:
            raise ValueError(f"num_batch_dims={num_batch_dims}: exactly one batch dimension exists")
        for key, value in tensors.items():
            if not isinstance(value, torch.Tensor | TensorDictBase):
                kind = type(value).__name__
                raise TypeError(f"tensor column {key!r} is a {kind}; expected a torch.Tensor")
            if value.ndim == 0:
                raise ValueError(f"tensor column {key!r} is a single number; expected (rows, ...)")
        rows = {key: len(value) for key, value in tensors.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"tensor columns have different numbers of rows: {rows}")
        batch = _tensor_dict(tensors, next(iter(rows.values()))) if rows else None
        return cls(batch, non_tensors, meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, torch.Tensor | np.ndarray], meta_info: dict[str, Any] | None = None
    ) -> "DataProto":
        """A batch of columns of both kinds: tensors, and numpy arrays for `non_tensor_batch`."""
        tensors, arrays = {}, {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                kind = type(value).__name__
                raise ValueError(f"column {key!r} is a {kind}; expected a tensor or numpy array")
        return cls.from_dict(tensors, arrays, meta_info)

    @property
    def batch(self) -> TensorDictBase | None:
        """The tensor columns, None if there are none. What Ray lends is copied on first reading."""
        if isinstance(self._batch, LentColumns):
            self._batch = self._batch.own()
        return self._batch

    @batch.setter
    def batch(self, batch: TensorDictBase | None) -> None:
        if batch is not None and not isinstance(batch, TensorDictBase):
            raise TypeError(
                f"batch is a {type(batch).__name__}; expected a TensorDict (from_dict takes a dict)"
            )
        if batch is not None and batch.batch_dims != 1:
            raise ValueError(f"batch has batch dimensions {tuple(batch.batch_size)}; expected one")
        self._batch = batch

    def check_consistency(self) -> None:
        """Raise if the stores do not form one batch: types, number of rows, names in both."""
        if not isinstance(self.meta_info, dict):
            raise TypeError(f"meta_info is a {type(self.meta_info).__name__}; expected a dict")
        tensors, num_rows = self._columns(), len(self)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(key, str):
                raise TypeError(f"a column name is a string; found {key!r}")
            if key in tensors:
                raise ValueError(f"column {key!r} is both in batch and in non_tensor_batch")
            if not isinstance(column, np.ndarray) or column.dtype != object:
                kind = type(column).__name__
                if isinstance(column, np.ndarray):
                    kind = f"{column.dtype} array"
                raise TypeError(
                    f"non-tensor column {key!r} is a {kind}; expected an object array "
                    f"(data[{key!r}] = array converts)"
                )
            if len(column) != num_rows:
                raise ValueError(
                    f"non-tensor column {key!r} has {len(column)} rows; the batch has {num_rows}"
                )

    def __len__(self) -> int:
        if self._batch is not None:
            return len(self._batch)
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __repr__(self) -> str:
        names = []
        for key, value in self._columns().items():
            names.append(f"{key}: {str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}")
        columns = ", ".join([*names, *self.non_tensor_batch]) or "no columns"
        meta_info = ", ".join(map(str, self.meta_info)) or "empty"
        return f"DataProto({len(self)} rows; {columns}; meta_info: {meta_info})"

    # Columns

    def __contains__(self, key: str) -> bool:
        return key in self.non_tensor_batch or key in self._columns()

    def __getitem__(self, item: Any) -> Any:
        """`data["name"]` is a column; `data[i]` (one row), `data[a:b]` and `data[indices]` rows."""
        if isinstance(item, str):
            if item in self.non_tensor_batch:
                return self.non_tensor_batch[item]
            tensors = self._tensors()
            if item not in tensors:
                raise self._missing([item])
            return tensors[item]
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            index, num_rows = int(item), len(self)
            if not -num_rows <= index < num_rows:  # also what ends `for row in data`
                raise IndexError(f"row {index} of a batch of {num_rows} rows")
            return self.slice(index % num_rows, index % num_rows + 1)
        return self.select_idxs(item)

    def __setitem__(self, key: str, value: torch.Tensor | np.ndarray) -> None:
        """Set a column: a tensor in `batch`, an array in `non_tensor_batch`; the other loses it."""
        if not isinstance(key, str):
            raise TypeError(f"a column name is a string; found {key!r}")
        if not isinstance(value, torch.Tensor | np.ndarray):
            kind = type(value).__name__
            raise TypeError(f"column {key!r} is a {kind}; expected a tensor or numpy array")
        has_rows = self.batch is not None or any(other != key for other in self.non_tensor_batch)
        if value.ndim == 0 or (has_rows and len(value) != len(self)):
            shape = tuple(value.shape)
            raise ValueError(f"column {key!r} has shape {shape}; the batch has {len(self)} rows")
        if isinstance(value, np.ndarray):
            self.non_tensor_batch[key] = object_column(key, value)
            if self.batch is not None and key in self._tensors():
                del self.batch[key]
            return
        batch = _tensor_dict({}, len(value)) if self.batch is None else self.batch
        batch[key] = value
        self.batch = batch
        self.non_tensor_batch.pop(key, None)

    def __delitem__(self, key: str) -> None:
        if key in self.non_tensor_batch:
            del self.non_tensor_batch[key]
        elif self.batch is not None and key in self._tensors():
            del self.batch[key]
        else:
            raise self._missing([key])

    def update(self, columns: Mapping[str, torch.Tensor | np.ndarray]) -> None:
        """Set several columns, each as `data[key] = value` does."""
        for key, value in columns.items():
            self[key] = value

    def select(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """These columns, sharing memory with the source unless `deepcopy`. None: all of that store.

        A column that is not there is a KeyError; a `meta_info` key that is not there is left out.
        """
        tensors, arrays, meta_info = self._tensors(), self.non_tensor_batch, self.meta_info
        if batch_keys is not None:
            tensors = {key: tensors[key] for key in self._checked_keys(batch_keys, "batch")}
        if non_tensor_batch_keys is not None:
            names = self._checked_keys(non_tensor_batch_keys, "non_tensor_batch")
            arrays = {key: arrays[key] for key in names}
        if meta_info_keys is not None:
            names = self.validate_input(meta_info_keys)
            meta_info = {key: meta_info[key] for key in names if key in meta_info}
        selected = self._with(tensors, arrays, len(self), meta_info)
        return selected.clone() if deepcopy else selected

    def pop(
        self,
        batch_keys: Keys | None = None,
        non_tensor_batch_keys: Keys | None = None,
        meta_info_keys: Keys | None = None,
    ) -> "DataProto":
        """Take these columns and `meta_info` entries out, as a DataProto of their own.

        If any of them is missing, that is a KeyError and nothing is taken.
        """
        tensor_names = self._checked_keys(batch_keys or [], "batch")
        array_names = self._checked_keys(non_tensor_batch_keys or [], "non_tensor_batch")
        meta_names = self.validate_input(meta_info_keys or [])
        absent = [key for key in meta_names if key not in self.meta_info]
        if absent:
            raise KeyError(
                f"no {absent} in meta_info, which has {sorted(map(str, self.meta_info))}"
            )
        num_rows, batch = len(self), self.batch
        tensors = {} if batch is None else {key: batch.pop(key) for key in tensor_names}
        return DataProto(
            _tensor_dict(tensors, num_rows) if tensors else None,
            {key: self.non_tensor_batch.pop(key) for key in array_names},
            {key: self.meta_info.pop(key) for key in meta_names},
        )

    def rename(self, old_keys: Keys, new_keys: Keys) -> "DataProto":
        """Rename tensor columns in place, all at once (two can swap names). Returns self."""
        old_names, new_names = self._checked_keys(old_keys, "batch"), self.validate_input(new_keys)
        if len(old_names) != len(new_names):
            raise ValueError(
                f"{len(old_names)} old names {old_names} but {len(new_names)} new names {new_names}"
            )
        kept = [key for key in (*self._tensors(), *self.non_tensor_batch) if key not in old_names]
        names = kept + new_names
        clash = sorted({key for key in new_names if names.count(key) > 1})
        if clash:
            raise ValueError(f"rename {old_names} to {new_names}: {clash} would name two columns")
        if self.batch is not None:
            columns = [self.batch.pop(key) for key in old_names]
            self.batch.update(dict(zip(new_names, columns, strict=True)))
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and the `meta_info` of `other`, in place; returns self.

        What both have must be equal (NaN equals NaN); else a ValueError names it and nothing is
        added.
        """
        if self._has_columns() and other._has_columns() and len(self) != len(other):
            raise ValueError(f"cannot unite {len(self)} rows with {len(other)} rows")
        for one, two in ((self, other), (other, self)):
            for key in one._tensors():
                if key in two.non_tensor_batch:
                    raise ValueError(
                        f"column {key!r} is a tensor in one batch and a non-tensor column in the "
                        "other"
                    )
        tensors = _new_items(self._tensors(), other._tensors(), "tensor column")
        arrays = _new_items(self.non_tensor_batch, other.non_tensor_batch, "non-tensor column")
        meta_info = _new_items(self.meta_info, other.meta_info, "meta_info")
        if other.batch is not None:
            batch = _tensor_dict({}, len(other)) if self.batch is None else self.batch
            self.batch = batch.update(tensors)
        self.non_tensor_batch.update(arrays)
        self.meta_info.update(meta_info)
        return self

    # Rows

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "DataProto":
        """Rows `start:end:step` as Python slices mean them, sharing memory and `meta_info`.

        `slice()` is a shallow copy: columns set on it do not appear in the source.
        """
        if step is not None and step < 0:  # which tensors do not support
            return self.select_idxs(range(len(self))[start:end:step])
        return self._rows(slice(start, end, step))

    def select_idxs(self, idxs: RowIndices) -> "DataProto":
        """The rows at these positions (negative ones from the end), or where a mask is true."""
        return self._rows(self._positions(idxs))

    def reorder(self, indices: RowIndices) -> None:
        """Permute the rows in place: row i becomes the former row `indices[i]`."""
        positions = self._positions(indices)
        if not np.array_equal(np.sort(positions), np.arange(len(self))):
            count = len(self)
            raise ValueError(f"reorder needs each of the {count} rows once; select_idxs takes any")
        reordered = self._rows(positions)
        self.batch, self.non_tensor_batch = reordered.batch, reordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row `repeat_times` times: a a b b if `interleave`, else a b a b."""
        if repeat_times < 0:
            raise ValueError(f"repeat_times={repeat_times} is negative")
        rows = np.arange(len(self))
        return self._rows(
            np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        )

    def chunk(self, chunks: int, *, clone: bool = True) -> list["DataProto"]:
        """`chunks` pieces in order, the first a row longer where needed (7 rows in 3: 3, 2, 2).

        The pieces lie in one copy of the tensors; with `clone=False` they are views of the tensors
        themselves. All share this batch's `meta_info` dict, so what is added to it later is seen by
        every piece. A batch without rows gives pieces without rows.
        """
        if chunks < 1:
            raise ValueError(f"chunks={chunks}: expected at least 1")
        if 0 < len(self) < chunks:
            raise ValueError(
                f"cannot cut {len(self)} rows into {chunks} pieces: every piece needs a row; "
                "pad_dataproto_to_divisor adds rows, unpad_dataproto drops them again"
            )
        size, longer = divmod(len(self), chunks)
        bounds = [i * size + min(i, longer) for i in range(chunks + 1)]
        source = self._copy_columns() if clone else self
        return [source._rows(slice(bounds[i], bounds[i + 1])) for i in range(chunks)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Pieces of `split_size` rows in order; the last may be shorter. Otherwise as `chunk`."""
        if split_size < 1:
            raise ValueError(f"split_size={split_size}: expected at least 1")
        source = self._copy_columns()
        return [source._rows(slice(i, i + split_size)) for i in range(0, len(self), split_size)]

    def group_by(self, keys: Keys) -> dict[str, "DataProto"]:
        """The rows for every value of a column, in order of first appearance.

        A group is named by `str(value)`; with several keys the parts are joined by "|".
        """
        names = self.validate_input(keys)
        if not names:
            raise ValueError("group_by needs at least one column")
        labels: list[list[str]] = []
        for key in names:
            column = self[key]
            values = column.tolist() if isinstance(column, torch.Tensor) else column
            labels.append([str(v.tolist() if isinstance(v, torch.Tensor) else v) for v in values])
        positions: dict[tuple[str, ...], list[int]] = {}
        for row, label in enumerate(zip(*labels, strict=True)):
            positions.setdefault(label, []).append(row)
        groups = {"|".join(label): self.select_idxs(rows) for label, rows in positions.items()}
        if len(groups) != len(positions):
            raise ValueError(f"values of {names} contain '|': two groups would have one name")
        return groups

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """`epochs` passes over the rows in batches of `mini_batch_size`, which must divide them.

        `dataloader_kwargs={"shuffle": True}` draws a new order for every epoch: the same ones for
        the same `seed`, fresh ones without. Torch's global random state is left alone.
        """
        options = dict(dataloader_kwargs or {})
        shuffle = bool(options.pop("shuffle", False))
        if options:
            raise ValueError(f"dataloader_kwargs {sorted(options)}: only 'shuffle' is supported")
        num_rows = len(self)
        if mini_batch_size < 1 or num_rows % mini_batch_size:
            raise ValueError(
                f"mini_batch_size={mini_batch_size} must be positive and divide the {num_rows} rows"
            )
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)

        def batches() -> Iterator["DataProto"]:
            for _ in range(epochs):
                order = torch.arange(num_rows)
                if shuffle:
                    order = torch.randperm(num_rows, generator=generator)
                for start in range(0, num_rows, mini_batch_size):
                    yield self.select_idxs(order[start : start + mini_batch_size])

        return batches()  # a function of its own, so that the checks above run when called

    # Whole batches

    @staticmethod
    def concat(
        data: Sequence["DataProto"], *, global_keys: Iterable[str] | None = None
    ) -> "DataProto":
        """The rows of all, in order. One element is returned as it is.

        All must have the same columns, except that elements without any column add no rows.
        `meta_info` is that of the first, but the entries named by `global_keys` (by default
        "metrics") are joined over all elements:

            {"metrics": {"loss": 1.0, "len": [3, 4]}} and {"metrics": {"loss": 2.0, "len": [5]}}
            -> {"metrics": {"loss": [1.0, 2.0], "len": [3, 4, 5]}}

        An entry that is not a dict everywhere becomes the list of its values.
        """
        if not data:
            raise ValueError("cannot concat an empty list: there is no batch to take columns from")
        if len(data) == 1:
            return data[0]
        meta_info = dict(data[0].meta_info)
        for key in ("metrics",) if global_keys is None else global_keys:
            values = [element.meta_info[key] for element in data if key in element.meta_info]
            if values:
                all_dicts = all(isinstance(value, dict) for value in values)
                meta_info[key] = _merge_dicts(values) if all_dicts else values

        filled = [element for element in data if element._has_columns()]
        if not filled:
            return DataProto(meta_info=meta_info)
        first = filled[0]
        for i, element in enumerate(data):
            if not element._has_columns():
                continue
            for store, expected, found in (
                ("batch", first._columns(), element._columns()),
                ("non_tensor_batch", first.non_tensor_batch, element.non_tensor_batch),
            ):
                if expected.keys() != found.keys():
                    raise ValueError(
                        f"cannot concat batches with different columns: {store} of element {i} "
                        f"lacks {sorted(expected.keys() - found.keys())} and adds "
                        f"{sorted(found.keys() - expected.keys())}"
                    )
        tensors = {}
        for key in first._columns():
            columns = [element._columns()[key] for element in filled]
            try:
                tensors[key] = _join(columns)
            except RuntimeError as error:
                kinds = [f"{column.dtype} {tuple(column.shape)}" for column in columns]
                raise ValueError(f"cannot concat column {key!r} of {kinds}: {error}") from error
        arrays = {
            key: custom_np_concatenate([element.non_tensor_batch[key] for element in filled])
            for key in first.non_tensor_batch
        }
        return first._with(tensors, arrays, sum(map(len, filled)), meta_info)

    @staticmethod
    def materialize_concat(
        data_refs: Sequence[Any],
        *,
        global_keys: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> "DataProto":
        """Wait for all references, then concat those that are to be collected.

        An element is a DataProto, a future, a Ray ObjectRef, or an `ObjectRefWrap` of one of them.
        The first failure is raised at once; `timeout` (seconds, for all together) raises
        WorkerTimeoutError.
        """
        values = [ref.obj_ref if isinstance(ref, ObjectRefWrap) else ref for ref in data_refs]
        values = [value.future() if hasattr(value, "future") else value for value in values]
        waiting = [value for value in values if isinstance(value, futures.Future)]
        done, not_done = futures.wait(waiting, timeout, futures.FIRST_EXCEPTION)
        for future in done:
            future.result()  # raises what the worker raised
        if not_done:
            late = [i for i, value in enumerate(values) if value in not_done]
            raise WorkerTimeoutError(
                f"waited {timeout} s for {len(values)} results; still missing: {late} (from 0)"
            )
        collected = []
        for ref, value in zip(data_refs, values, strict=True):
            if isinstance(ref, ObjectRefWrap) and not ref.collected:
                continue
            result = value.result() if isinstance(value, futures.Future) else value
            if not isinstance(result, DataProto):
                raise TypeError(f"a reference gave a {type(result).__name__}; expected a DataProto")
            collected.append(result)
        return DataProto.concat(collected, global_keys=global_keys)

    def to(self, device: torch.device | str | int) -> "DataProto":
        """Move the tensors of `batch` and those inside `meta_info`, in place; returns self.

        A `meta_info` with tensors to move is replaced: batches that share it keep theirs.
        """
        if self.batch is not None:
            self.batch = self.batch.to(device)
        self.meta_info = move_tensors_to_device(self.meta_info, device)
        return self

    def clone(self) -> "DataProto":
        """A copy that shares nothing with the original."""
        batch, arrays = self._copy_columns().batch, copy.deepcopy(self.non_tensor_batch)
        return DataProto(batch, arrays, copy.deepcopy(self.meta_info))

    def __copy__(self) -> "DataProto":
        """New containers around the same tensors and objects."""
        return self._with(self._tensors(), self.non_tensor_batch, len(self), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors arrive on the CPU, writable, with their own rows only. Numpy arrays inside rows
        or `meta_info` arrive as Ray hands them out: read-only."""
        tensors = {}
        for key, value in self._columns().items():
            tensors[key] = _Pickled(value, may_be_lent=True) if _is_plain(value) else value
        arrays = {}
        for key, column in self.non_tensor_batch.items():
            mapped = [map_tensors(value, _picklable) for value in column]
            unchanged = all(new is old for new, old in zip(mapped, column, strict=True))
            arrays[key] = column if unchanged else mapped
        num_rows = None if self._batch is None else len(self)
        return _restore, (num_rows, tensors, arrays, map_tensors(self.meta_info, _picklable))

    # Files

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the batch to a folder that `load` reads: safetensors and JSON, no pickle.

        The folder appears complete or not at all; an earlier save of the same name is replaced.
        Values other than None, bool, int, float, str, list, tuple, dict, numpy arrays and scalars,
        and tensors are a DataError.
        """
        target = Path(folder)
        is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
        if not is_free and not (target / _JSON_FILE).is_file():
            raise DataError(f"{target} exists and is not a saved DataProto: choose another folder")
        tensors, storages = {}, set()
        for key, value in self._tensors().items():
            if not isinstance(value, torch.Tensor) or not _is_plain(value):
                kind = type(value).__name__
                raise DataError(f"batch[{key!r}] is a {kind}; only dense tensors can be saved")
            if value.dtype not in _SAFETENSORS_DTYPES:
                raise DataError(f"batch[{key!r}]: safetensors cannot save {value.dtype}")
            tensor = _plain_cpu_tensor(value)
            # safetensors refuses two tensors on the same memory.
            if tensor.untyped_storage().data_ptr() in storages:
                tensor = tensor.clone()
            storages.add(tensor.untyped_storage().data_ptr())
            tensors[key] = tensor
        columns: dict[str, list[Any]] = {}
        for key, column in self.non_tensor_batch.items():
            where = f"non_tensor_batch[{key!r}], row"
            columns[key] = [_encode(value, f"{where} {row}") for row, value in enumerate(column)]
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "rows": len(self),
            "columns": None if self.batch is None else list(tensors),
            "non_tensor_batch": columns,
            "meta_info": _encode(self.meta_info, "meta_info"),
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.parent / f".{target.name}.{uuid.uuid4().hex}"
        staging.mkdir()
        try:
            if tensors:
                save_file(tensors, staging / _TENSOR_FILE)
            with open(staging / _JSON_FILE, "w", encoding="utf-8") as file:
                json.dump(document, file, allow_nan=False)
            if is_free:
                staging.replace(target)
                return
            previous = staging.with_name(f"{staging.name}.previous")
            target.replace(previous)
            try:
                staging.replace(target)
            except BaseException:
                previous.replace(target)
                raise
            shutil.rmtree(previous)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "DataProto":
        """The batch that `save` wrote, on the CPU. A missing or damaged folder is a DataError."""
        json_path, tensor_path = Path(folder) / _JSON_FILE, Path(folder) / _TENSOR_FILE
        try:
            document = json.loads(json_path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"{json_path} does not exist: not a saved DataProto") from error
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {json_path}: {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise DataError(f"{json_path} is not part of a saved DataProto")
        if document.get("version") != _VERSION:
            version = document.get("version")
            raise DataError(f"{json_path} has version {version!r}; this program reads {_VERSION}")
        try:
            num_rows, names = int(document["rows"]), document["columns"]
            names = None if names is None else [str(name) for name in names]
            arrays = {}
            for key, column in document["non_tensor_batch"].items():
                arrays[key] = [_decode(value) for value in column]
            meta_info = _decode(document["meta_info"])
            if not isinstance(meta_info, dict):
                raise TypeError(f"meta_info is a {type(meta_info).__name__}")
        # RuntimeError is what torch's views raise.
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise DataError(f"{json_path} is damaged: {type(error).__name__}: {error}") from error

        tensors: dict[str, torch.Tensor] = {}
        if names:
            try:
                tensors = load_file(tensor_path)
            except FileNotFoundError as error:
                raise DataError(
                    f"{tensor_path} does not exist, but {json_path} names columns {names}"
                ) from error
            except (OSError, SafetensorError) as error:
                raise DataError(f"cannot read {tensor_path}: {error}") from error
        rows = {key: tuple(value.shape[:1]) for key, value in tensors.items()}
        if rows != dict.fromkeys(names or (), (num_rows,)):
            raise DataError(
                f"{tensor_path} has columns and rows {rows}; {json_path} expects {num_rows} rows "
                f"of {names}"
            )
        wrong = {key: len(column) for key, column in arrays.items() if len(column) != num_rows}
        if wrong:
            raise DataError(f"{json_path} is damaged: expected {num_rows} rows, found {wrong}")
        if names is None:
            return _restore(None, {}, arrays, meta_info)
        return _restore(num_rows, {key: tensors[key] for key in names}, arrays, meta_info)

    # Inside

    @staticmethod
    def validate_input(keys: Keys) -> list[str]:
        """A list of names from a name or a list of them."""
        if isinstance(keys, str):
            return [keys]
        if isinstance(keys, list | tuple) and all(isinstance(key, str) for key in keys):
            return list(keys)
        raise TypeError(f"expected a column name or a list of them; found {keys!r}")

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def _columns(self) -> dict[str, Any]:
        """As `_tensors`, but what is lent stays so: for copying and sending."""
        return {} if self._batch is None else dict(self._batch.items())

    def _has_columns(self) -> bool:
        """Whether the number of rows is fixed. A TensorDict fixes it even without a column."""
        return self._batch is not None or bool(self.non_tensor_batch)

    def _with(
        self,
        tensors: Mapping[str, Any],
        arrays: Mapping[str, Any],
        num_rows: int,
        meta_info: dict[str, Any],
    ) -> "DataProto":
        """A batch of these columns; it has a TensorDict, even an empty one, if this batch has."""
        batch = None if self._batch is None else _tensor_dict(tensors, num_rows)
        return DataProto(batch, arrays, meta_info)

    def _rows(self, index: _RowSlice | np.ndarray) -> "DataProto":
        """The rows at `index`: a slice with a positive step, or non-negative positions."""
        if isinstance(index, slice):
            num_rows, tensor_index = len(range(*index.indices(len(self)))), index
        else:
            num_rows, tensor_index = len(index), torch.from_numpy(index)
        tensors = {key: value[tensor_index] for key, value in self._tensors().items()}
        arrays = {key: column[index] for key, column in self.non_tensor_batch.items()}
        return self._with(tensors, arrays, num_rows, self.meta_info)

    def _copy_columns(self) -> "DataProto":
        """The same rows in one new block for each column: many small ones are slow to allocate."""
        tensors = {}
        for key, value in self._tensors().items():
            tensors[key] = _join([value]) if _is_plain(value) else value.clone()
        arrays = {key: column.copy() for key, column in self.non_tensor_batch.items()}
        return self._with(tensors, arrays, len(self), self.meta_info)

    def _positions(self, idxs: Any) -> np.ndarray:
        """Non-negative int64 positions from positions or a mask, as list, array or tensor."""
        num_rows = len(self)
        if isinstance(idxs, torch.Tensor):
            idxs = idxs.detach().cpu().numpy()
        index = np.atleast_1d(np.asarray(idxs))
        if index.ndim != 1:
            raise IndexError(f"row indices have shape {index.shape}; expected one dimension")
        if index.dtype == bool:
            if len(index) != num_rows:
                raise IndexError(f"a mask of {len(index)} values for a batch of {num_rows} rows")
            return np.flatnonzero(index)
        if index.size == 0:
            return np.empty(0, dtype=np.int64)
        if not np.issubdtype(index.dtype, np.integer):
            raise TypeError(f"rows are selected by integers or a mask; found {index.dtype}")
        index = index.astype(np.int64)
        outside = index[(index < -num_rows) | (index >= num_rows)]
        if outside.size:
            raise IndexError(f"row {outside[0]} of a batch of {num_rows} rows")
        return np.where(index < 0, index + num_rows, index)

    def _checked_keys(self, keys: Keys, store: str) -> list[str]:
        names = list(dict.fromkeys(self.validate_input(keys)))
        available = self._tensors() if store == "batch" else self.non_tensor_batch
        missing = [key for key in names if key not in available]
        if missing:
            raise self._missing(missing, f" in {store}")
        return names

    def _missing(self, keys: list[str], where: str = "") -> KeyError:
        return KeyError(
            f"no column {', '.join(map(repr, keys))}{where}: batch has {sorted(self._tensors())}, "
            f"non_tensor_batch has {sorted(self.non_tensor_batch)}"
        )


def _restore(
    num_rows: int | None,
    tensors: dict[str, Any],
    arrays: Mapping[str, Any],
    meta_info: dict[str, Any],
) -> DataProto:
    """The batch that was pickled or saved; without a TensorDict if `num_rows` is None."""
    data = DataProto(None, arrays, meta_info)
    if num_rows is not None:
        lent = any(isinstance(value, LentTensor) for value in tensors.values())
        data._batch = LentColumns(tensors, num_rows) if lent else _tensor_dict(tensors, num_rows)
    return data


def _merge_dicts(dicts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Flat lists of all values: `{"a": 1}` and `{"a": [2, 3]}` give `{"a": [1, 2, 3]}`."""
    merged: dict[str, list[Any]] = {}
    for mapping in dicts:
        for key, value in mapping.items():
            values = merged.setdefault(key, [])
            is_array = isinstance(value, np.ndarray | torch.Tensor) and value.ndim > 0
            if isinstance(value, list | tuple) or is_array:
                values.extend(value)
            else:
                values.append(value)
    return merged


# -- helpers with ROLL's names ---------------------------------------------------------------------


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch with rows added until `size_divisor` divides their number, and how many were added.

    The added rows are the leading ones again: a b c to a multiple of 8 gives a b c a b c a b.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor={size_divisor}: expected at least 1")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """`data` without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot drop {pad_size} of {len(data)} rows")
    return data[: len(data) - pad_size] if pad_size else data


def collate_fn(rows: list[DataProto]) -> DataProto:
    """For a torch DataLoader over a DataProto: one batch of the rows, `meta_info` of the first."""
    return DataProto.concat(rows, global_keys=())


@dataclass
class ExperienceItem:
    """One answer to a prompt, and the step in which it was begun."""

    prompt_id: int
    domain: str = "default"
    sampling_start_step: int | None = None
    data: DataProto | None = None


def expand_requests(
    data: DataProto, num_return_sequences: int, is_num_return_sequences_expand: bool
) -> list[DataProto]:
    """Requests for `num_return_sequences` answers: one each if told to expand, else one for all.

    `data.meta_info["generation_config"]` is changed to say so, as in ROLL.
    """
    if "generation_config" not in data.meta_info:
        raise KeyError(f"meta_info has no 'generation_config' (it has {sorted(data.meta_info)})")
    copies = num_return_sequences if is_num_return_sequences_expand else 1
    data.meta_info["generation_config"]["num_return_sequences"] = num_return_sequences // copies
    return [copy.deepcopy(data) for _ in range(copies)]


def expand_responses(response: DataProto | Sequence[Any] | None) -> list[DataProto]:
    """Batches, in lists of any depth, as batches of one row each, in order."""
    if response is None:
        return []
    if isinstance(response, DataProto):
        return response.split(1) if len(response) > 1 else [response]
    return [item for part in response for item in expand_responses(part)]


# -- references to results that are still being computed -------------------------------------------


@dataclass(frozen=True)
class ObjectRefWrap:
    """One rank's reference in the result of a call that was not waited for.

    `collected` says whether its value is part of the result; the others are waited for only to see
    their failures.
    """

    obj_ref: Any
    collected: bool


def is_ref(value: Any) -> bool:
    """Whether `value` stands for a result that may not be there yet: a future, or Ray's reference.

    Ray is not imported for that: its references are known by their `future()` method.
    """
    return isinstance(value, futures.Future) or callable(getattr(type(value), "future", None))


# -- files -----------------------------------------------------------------------------------------
#
# `tensors.safetensors` has the tensor columns, `data.json` all the rest. JSON knows neither NaN,
# tuples, keys that are not strings nor arrays. Such values are written as an object with one key
# that starts with "$": {"$float": "nan"}, {"$tuple": [...]}, {"$dict": [[key, value], ...]},
# {"$array": {...}}, {"$scalar": {...}} (numpy), {"$tensor": {...}}. The bytes of arrays and tensors
# are base64 and come back bit for bit.

_FORMAT, _VERSION = "roll.DataProto", 1
_JSON_FILE, _TENSOR_FILE = "data.json", "tensors.safetensors"
_PLAIN_TYPES = frozenset({bool, int, str, type(None)})
_SAFETENSORS_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
)


def _encode(value: Any, where: str) -> Any:
    """`value` in JSON's types; `where` names it in an error."""
    if type(value) in _PLAIN_TYPES:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) in (list, tuple):
        if type(value) is list and _PLAIN_TYPES.issuperset(map(type, value)):
            return value  # long lists of token ids or texts
        items = [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict):  # subclasses, such as defaultdict, come back as dict
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            name = _encode(key, f"key {key!r} of {where}")
            pairs.append([name, _encode(item, f"{where}[{key!r}]")])
        return {"$dict": pairs}
    if isinstance(value, np.generic) and value.dtype.kind not in "OV":
        data = base64.b64encode(value.tobytes()).decode("ascii")
        return {"$scalar": {"dtype": value.dtype.str, "data": data}}
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind != "V":
        content: dict[str, Any] = {"dtype": value.dtype.str, "shape": list(value.shape)}
        if value.dtype == object:
            content["dtype"] = "object"
            content["items"] = [
                _encode(item, f"{where}.flat[{i}]") for i, item in enumerate(value.flat)
            ]
        else:
            content["data"] = base64.b64encode(value.tobytes()).decode("ascii")
        return {"$array": content}
    if isinstance(value, torch.Tensor) and _is_plain(value):
        dtype = str(value.dtype).removeprefix("torch.")
        data = base64.b64encode(_tensor_bytes(value).tobytes()).decode("ascii")
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}
    raise DataError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: "
        "expected None, bool, int, float, str, list, tuple, dict, numpy arrays and scalars, or "
        "tensors"
    )


def _decode(value: Any) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        if _PLAIN_TYPES.issuperset(map(type, value)):
            return value
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item) for key, item in value.items()}
    content: Any = value[tag]
    match tag:
        case "$float":
            return float(content)
        case "$tuple":
            return tuple(_decode(item) for item in content)
        case "$dict":
            return {_decode(key): _decode(item) for key, item in content}
        case "$array" if content["dtype"] == "object":
            items = object_column("", [_decode(item) for item in content["items"]])
            return items.reshape(content["shape"])
        case "$array" | "$scalar":
            if np.dtype(content["dtype"]).kind in "OV":  # bytes would become addresses of objects
                raise ValueError(f"an array of {content['dtype']!r} cannot be made from bytes")
            # A bytearray, so that the array can be written to.
            buffer = bytearray(base64.b64decode(content["data"], validate=True))
            array = np.ndarray(content.get("shape", ()), np.dtype(content["dtype"]), buffer)
            return array if tag == "$array" else array[()]
        case "$tensor":
            buffer = bytearray(base64.b64decode(content["data"], validate=True))
            data = np.frombuffer(buffer, dtype=np.uint8)
            return _tensor_from_bytes(data, content["dtype"], content["shape"])
    raise ValueError(f"unknown tag {tag!r}")
