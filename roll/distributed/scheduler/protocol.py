"""`DataProto`: the batch that travels between the pipeline and the workers.

Rows live in two stores, `batch` (tensors) and `non_tensor_batch` (one Python object per row and column); facts about
the batch as a whole live in `meta_info`. All columns have the same number of rows, and no name is in both stores.

    data = DataProto.from_dict(
        {"input_ids": torch.arange(8).view(4, 2)},          # batch["input_ids"]: (4, 2)
        non_tensors={"tag": ["a", "b", "a", "b"]},          # non_tensor_batch["tag"]: 4 objects
        meta_info={"global_step": 3},
    )
    first, second = data.chunk(2)                           # rows 0 1 and rows 2 3
    DataProto.concat([first, second])                       # rows 0 1 2 3

Who owns what: `slice`, `data[a:b]` and `select` share memory with their source, as tensor slices do; `chunk`, `split`,
`select_idxs`, `repeat`, `concat` of several and the batches of `make_iterator` do not. All share the one `meta_info`
dict of their source, except `concat` of several, which makes a new one.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from os import PathLike
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from roll.distributed.scheduler import batch_files
from roll.distributed.scheduler.batch_columns import (
    check_same_keys,
    check_same_values,
    clone_column,
    concat_column,
    custom_np_concatenate,
    epoch_orders,
    list_of_dict_to_dict_of_list,
    make_tensor_dict,
    map_rows,
    merge_dicts,
    move_tensors_to_device,
    new_items,
    object_column,
    row_labels,
    row_positions,
    tensor_dict_from,
    union_numpy_dict,
    union_tensor_dict,
)
from roll.distributed.scheduler.batch_memory import (
    LentColumns,
    LentTensor,
    as_picklable,
    as_picklable_column,
    map_tensors,
)
from roll.distributed.scheduler.object_refs import ObjectRefWrap, is_ref, wait_for_refs

__all__ = [
    "DataProto",
    "ObjectRefWrap",
    "RowIndices",
    "collate_fn",
    "custom_np_concatenate",
    "is_ref",
    "list_of_dict_to_dict_of_list",
    "move_tensors_to_device",
    "pad_dataproto_to_divisor",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

# Rows as callers name them: positions, or a mask with one bool per row.
RowIndices = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
Keys = str | Sequence[str]
_RowSlice = slice  # the builtin; inside the class the name means the method


class DataProto:
    """A batch of rows: tensor columns, object columns, and a free dict about the whole.

    Args:
        batch: a TensorDict with one batch dimension; None when there are no tensor columns.
        non_tensor_batch: column name to array; anything but a 1-D object array is turned into one object per row.
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
            raise ValueError(
                f"num_batch_dims={num_batch_dims}: a DataProto has exactly one batch dimension"
            )
        return cls(tensor_dict_from(tensors) if tensors else None, non_tensors, meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, torch.Tensor | np.ndarray], meta_info: dict[str, Any] | None = None
    ) -> "DataProto":
        """A batch of columns of both kinds: tensors go to `batch`, numpy arrays to `non_tensor_batch`."""
        for key, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise ValueError(
                    f"column {key!r} is a {type(value).__name__}; expected a torch.Tensor or numpy array"
                )
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info)

    @property
    def batch(self) -> TensorDictBase | None:
        """The tensor columns; None if there are none. What Ray has lent is copied when this is first read."""
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
            raise ValueError(
                f"batch has the batch dimensions {tuple(batch.batch_size)}; expected one"
            )
        self._batch = batch

    def check_consistency(self) -> None:
        """Raise if the stores do not form one batch: types, number of rows, names in both stores."""
        if not isinstance(self.meta_info, dict):
            raise TypeError(f"meta_info is a {type(self.meta_info).__name__}; expected a dict")
        tensors, num_rows = self._columns(), len(self)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(key, str):
                raise TypeError(f"a column name is a string; found {key!r}")
            if key in tensors:
                raise ValueError(f"column {key!r} is both in batch and in non_tensor_batch")
            if not isinstance(column, np.ndarray) or column.dtype != object:
                kind = (
                    f"{column.dtype} array"
                    if isinstance(column, np.ndarray)
                    else type(column).__name__
                )
                raise TypeError(
                    f"non-tensor column {key!r} is a {kind}; expected an object array (data[{key!r}] = array converts)"
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
        tensors = [
            f"{key}: {str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
            for key, value in self._columns().items()
        ]
        columns = ", ".join([*tensors, *self.non_tensor_batch]) or "no columns"
        return f"DataProto({len(self)} rows; {columns}; meta_info: {', '.join(map(str, self.meta_info)) or 'empty'})"

    # Columns

    def __contains__(self, key: str) -> bool:
        return key in self.non_tensor_batch or key in self._columns()

    def __getitem__(self, item: Any) -> Any:
        """`data["name"]` is a column. `data[i]` (one row), `data[a:b]` and `data[indices]` are DataProtos."""
        if isinstance(item, str):
            if item not in self:
                raise self._missing([item])
            return (
                self.non_tensor_batch[item]
                if item in self.non_tensor_batch
                else self._tensors()[item]
            )
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            index, num_rows = int(item), len(self)
            if not -num_rows <= index < num_rows:  # also what ends `for row in data`
                raise IndexError(f"row {index} of a batch of {num_rows} rows")
            return self.slice(index % num_rows, index % num_rows + 1)
        return self.select_idxs(item)

    def __setitem__(self, key: str, value: torch.Tensor | np.ndarray) -> None:
        """Set a column: a tensor in `batch`, a numpy array in `non_tensor_batch`. The other store loses the name."""
        if not isinstance(key, str):
            raise TypeError(f"a column name is a string; found {key!r}")
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise TypeError(
                f"column {key!r} is a {type(value).__name__}; expected a torch.Tensor or a numpy array"
            )
        has_rows = self.batch is not None or any(other != key for other in self.non_tensor_batch)
        if value.ndim == 0 or (has_rows and len(value) != len(self)):
            raise ValueError(
                f"column {key!r} has shape {tuple(value.shape)}; the batch has {len(self)} rows"
            )
        if isinstance(value, np.ndarray):
            self.non_tensor_batch[key] = object_column(key, value)
            if self.batch is not None and key in self._tensors():
                del self.batch[key]
            return
        batch = make_tensor_dict({}, len(value)) if self.batch is None else self.batch
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
        """These columns, sharing memory with the source unless `deepcopy`. None keeps all of that store, [] none.

        A column that is not there is a KeyError; a `meta_info` key that is not there is left out.
        """
        tensors, arrays, meta_info = self._tensors(), self.non_tensor_batch, self.meta_info
        if batch_keys is not None:
            tensors = {key: tensors[key] for key in self._checked_keys(batch_keys, "batch")}
        if non_tensor_batch_keys is not None:
            arrays = {
                key: arrays[key]
                for key in self._checked_keys(non_tensor_batch_keys, "non_tensor_batch")
            }
        if meta_info_keys is not None:
            meta_info = {
                key: meta_info[key]
                for key in self.validate_input(meta_info_keys)
                if key in meta_info
            }
        batch = None if self.batch is None else make_tensor_dict(tensors, len(self))
        selected = DataProto(batch, arrays, meta_info)
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
            make_tensor_dict(tensors, num_rows) if tensors else None,
            {key: self.non_tensor_batch.pop(key) for key in array_names},
            {key: self.meta_info.pop(key) for key in meta_names},
        )

    def rename(self, old_keys: Keys, new_keys: Keys) -> "DataProto":
        """Rename tensor columns in place, all at once (so two columns can swap names). Returns self."""
        old_names, new_names = self._checked_keys(old_keys, "batch"), self.validate_input(new_keys)
        if len(old_names) != len(new_names):
            raise ValueError(
                f"{len(old_names)} old names {old_names} but {len(new_names)} new names {new_names}"
            )
        names = [
            key for key in (*self._tensors(), *self.non_tensor_batch) if key not in old_names
        ] + new_names
        clash = sorted({key for key in new_names if names.count(key) > 1})
        if clash:
            raise ValueError(
                f"cannot rename {old_names} to {new_names}: {clash} would name two columns"
            )
        if self.batch is not None:
            columns = [self.batch.pop(key) for key in old_names]
            self.batch.update(dict(zip(new_names, columns, strict=True)))
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and the `meta_info` of `other`, in place; returns self.

        What both have must be equal (NaN equals NaN); otherwise a ValueError names it and nothing is added.
        """
        if self._has_columns() and other._has_columns() and len(self) != len(other):
            raise ValueError(
                f"cannot unite a batch of {len(self)} rows with one of {len(other)} rows"
            )
        for one, two in ((self, other), (other, self)):
            for key in one._tensors():
                if key in two.non_tensor_batch:
                    raise ValueError(
                        f"column {key!r} is a tensor in one batch and a non-tensor column in the other"
                    )
        check_same_values(self._tensors(), other._tensors(), "tensor column")
        check_same_values(self.non_tensor_batch, other.non_tensor_batch, "non-tensor column")
        check_same_values(self.meta_info, other.meta_info, "meta_info")

        if other.batch is not None:
            batch = make_tensor_dict({}, len(other)) if self.batch is None else self.batch
            self.batch = batch.update(new_items(other._tensors(), self._tensors()))
        self.non_tensor_batch.update(new_items(other.non_tensor_batch, self.non_tensor_batch))
        self.meta_info.update(new_items(other.meta_info, self.meta_info))
        return self

    # Rows

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "DataProto":
        """Rows `start:end:step` as Python slices mean them, sharing memory and `meta_info` with the source.

        `slice()` is a shallow copy: columns set on it do not appear in the source.
        """
        if step is not None and step < 0:  # which tensors do not support
            return self.select_idxs(range(len(self))[start:end:step])
        return self._rows(slice(start, end, step))

    def select_idxs(self, idxs: RowIndices) -> "DataProto":
        """The rows at these positions (negative ones count from the end), or where this mask is true."""
        return self._rows(row_positions(idxs, len(self)))

    def reorder(self, indices: RowIndices) -> None:
        """Permute the rows in place: row i becomes the former row `indices[i]`."""
        positions = row_positions(indices, len(self))
        if not np.array_equal(np.sort(positions), np.arange(len(self))):
            raise ValueError(
                f"reorder needs each of the {len(self)} rows exactly once; select_idxs takes any rows"
            )
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
        """`chunks` pieces in order, the first ones a row longer where it does not divide (7 rows in 3: 3, 2, 2).

        The pieces lie in one copy of the tensors; with `clone=False` they are views of the tensors themselves. All
        share this batch's `meta_info` dict, so what is added to it later is seen by every piece. A batch without rows
        gives pieces without rows.
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
        """Pieces of `split_size` rows in order; the last one may be shorter. Otherwise as `chunk`."""
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
        positions: dict[tuple[str, ...], list[int]] = {}
        for row, labels in enumerate(zip(*(row_labels(self[key]) for key in names), strict=True)):
            positions.setdefault(labels, []).append(row)
        groups = {"|".join(labels): self.select_idxs(rows) for labels, rows in positions.items()}
        if len(groups) != len(positions):
            raise ValueError(
                f"values of {names} contain '|', so that different groups would get the same name"
            )
        return groups

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """`epochs` passes over the rows in batches of `mini_batch_size`, which must divide the number of rows.

        `dataloader_kwargs={"shuffle": True}` draws a new order for every epoch: the same ones for the same `seed`,
        fresh ones without. Torch's global random state is neither read nor changed.
        """
        options = dict(dataloader_kwargs or {})
        shuffle = bool(options.pop("shuffle", False))
        if options:
            raise ValueError(
                f"dataloader_kwargs {sorted(options)} are not supported; only 'shuffle' is"
            )
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(
                f"mini_batch_size={mini_batch_size} must be positive and divide the {len(self)} rows"
            )
        orders = epoch_orders(len(self), epochs, shuffle, seed)
        starts = range(0, len(self), mini_batch_size)
        return (
            self.select_idxs(order[start : start + mini_batch_size])
            for order in orders
            for start in starts
        )

    def _rows(self, index: _RowSlice | np.ndarray) -> "DataProto":
        """The rows at `index`: a slice with a positive step, or non-negative positions."""
        num_rows = len(range(*index.indices(len(self)))) if isinstance(index, slice) else len(index)
        tensor_index = index if isinstance(index, slice) else torch.from_numpy(index)
        tensors = {key: value[tensor_index] for key, value in self._tensors().items()}
        arrays = {key: column[index] for key, column in self.non_tensor_batch.items()}
        return DataProto(
            None if self.batch is None else make_tensor_dict(tensors, num_rows),
            arrays,
            self.meta_info,
        )

    def _copy_columns(self) -> "DataProto":
        """The same rows in memory of their own, one block for each column: many small ones are slow to allocate."""
        tensors = {key: clone_column(value) for key, value in self._tensors().items()}
        arrays = {key: column.copy() for key, column in self.non_tensor_batch.items()}
        return DataProto(
            None if self.batch is None else make_tensor_dict(tensors, len(self)),
            arrays,
            self.meta_info,
        )

    # Whole batches

    @staticmethod
    def concat(
        data: Sequence["DataProto"], *, global_keys: Iterable[str] | None = None
    ) -> "DataProto":
        """The rows of all, in order. One element is returned as it is.

        All must have the same columns, except that elements without any column add no rows. `meta_info` is that of
        the first, but the entries named by `global_keys` (by default "metrics") are joined over all elements:

            {"metrics": {"loss": 1.0, "len": [3, 4]}} and {"metrics": {"loss": 2.0, "len": [5], "kl": 0.1}}
            -> {"metrics": {"loss": [1.0, 2.0], "len": [3, 4, 5], "kl": [0.1]}}

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
                meta_info[key] = (
                    merge_dicts(values) if all(isinstance(v, dict) for v in values) else values
                )

        filled = [element for element in data if element._has_columns()]
        if not filled:
            return DataProto(meta_info=meta_info)
        first = filled[0]
        for i, element in enumerate(data):
            if element._has_columns():
                check_same_keys(first._columns(), element._columns(), f"batch of element {i}")
                check_same_keys(
                    first.non_tensor_batch,
                    element.non_tensor_batch,
                    f"non_tensor_batch of element {i}",
                )
        batch = None
        if first._batch is not None:
            tensors = [element._columns() for element in filled]
            columns = {key: concat_column(key, [t[key] for t in tensors]) for key in tensors[0]}
            batch = make_tensor_dict(columns, sum(len(element) for element in filled))
        arrays = {
            key: custom_np_concatenate([element.non_tensor_batch[key] for element in filled])
            for key in first.non_tensor_batch
        }
        return DataProto(batch, arrays, meta_info)

    @staticmethod
    def materialize_concat(
        data_refs: Sequence[Any],
        *,
        global_keys: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> "DataProto":
        """Wait for all references, then concat those that are to be collected.

        An element is a DataProto, a future, a Ray ObjectRef, or an `ObjectRefWrap` of one of them. The first failure
        is raised at once; `timeout` (seconds, for all together) raises WorkerTimeoutError.
        """
        values = wait_for_refs(
            [ref.obj_ref if isinstance(ref, ObjectRefWrap) else ref for ref in data_refs], timeout
        )
        is_collected = [not isinstance(ref, ObjectRefWrap) or ref.collected for ref in data_refs]
        collected = list(compress(values, is_collected))
        for value in collected:
            if not isinstance(value, DataProto):
                raise TypeError(f"a reference gave a {type(value).__name__}; expected a DataProto")
        return DataProto.concat(collected, global_keys=global_keys)

    def to(self, device: torch.device | str | int) -> "DataProto":
        """Move the tensors of `batch` and those inside `meta_info`, in place; returns self.

        A `meta_info` with tensors to move is replaced, so that batches which share it keep theirs where they are.
        """
        if self.batch is not None:
            self.batch = self.batch.to(device)
        self.meta_info = move_tensors_to_device(self.meta_info, device)
        return self

    def clone(self) -> "DataProto":
        """A copy that shares nothing with the original."""
        batch, arrays, meta_info = self._copy_columns().batch, self.non_tensor_batch, self.meta_info
        return DataProto(batch, copy.deepcopy(arrays), copy.deepcopy(meta_info))

    def __copy__(self) -> "DataProto":
        """New containers around the same tensors and objects: columns and `meta_info` can be set on either alone."""
        batch = None if self.batch is None else make_tensor_dict(self._tensors(), len(self))
        return DataProto(batch, self.non_tensor_batch, dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors arrive on the CPU, writable, with their own rows only: see `batch_memory`. Numpy arrays inside rows
        or `meta_info` arrive as Ray hands them out: read-only."""
        tensors = {key: as_picklable_column(value) for key, value in self._columns().items()}
        arrays = {
            key: map_rows(column, as_picklable) for key, column in self.non_tensor_batch.items()
        }
        num_rows = None if self._batch is None else len(self)
        return _restore, (num_rows, tensors, arrays, map_tensors(self.meta_info, as_picklable))

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the batch to a folder that `load` reads: tensors as safetensors, the rest as JSON, no pickle.

        The folder appears complete or not at all; an earlier save of the same name is replaced. Values other than
        None, bool, int, float, str, list, tuple, dict, numpy arrays and scalars, and tensors are a DataError.
        """
        tensors = None if self.batch is None else self._tensors()
        batch_files.save(folder, len(self), tensors, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load(folder: str | PathLike[str]) -> "DataProto":
        """Read a batch that `save` wrote. Tensors are on the CPU. A missing or damaged folder is a DataError."""
        num_rows, tensors, arrays, meta_info = batch_files.load(folder)
        return _restore(None if tensors is None else num_rows, tensors or {}, arrays, meta_info)

    # Names

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
        """Whether the number of rows is fixed. A TensorDict fixes it even before it has a column."""
        return self._batch is not None or bool(self.non_tensor_batch)

    def _checked_keys(self, keys: Keys, store: str) -> list[str]:
        names = list(dict.fromkeys(self.validate_input(keys)))
        available = self._tensors() if store == "batch" else self.non_tensor_batch
        missing = [key for key in names if key not in available]
        if missing:
            raise self._missing(missing, store)
        return names

    def _missing(self, keys: list[str], store: str | None = None) -> KeyError:
        return KeyError(
            f"no column {', '.join(map(repr, keys))}{f' in {store}' if store else ''}: batch has "
            f"{sorted(self._tensors())}, non_tensor_batch has {sorted(self.non_tensor_batch)}"
        )


def _restore(
    num_rows: int | None,
    tensors: dict[str, Any],
    arrays: Mapping[str, Any],
    meta_info: dict[str, Any],
) -> DataProto:
    data = DataProto(None, arrays, meta_info)
    if num_rows is not None:
        lent = any(isinstance(value, LentTensor) for value in tensors.values())
        data._batch = (
            LentColumns(tensors, num_rows) if lent else make_tensor_dict(tensors, num_rows)
        )
    return data


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """`data` with rows added at the end until `size_divisor` divides their number, and how many were added.

    The added rows are the leading ones again, cyclically: a b c to a multiple of 8 gives a b c a b c a b.
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
    """For a torch DataLoader over a DataProto: one batch of the rows, with the `meta_info` of the first."""
    return DataProto.concat(rows, global_keys=())
