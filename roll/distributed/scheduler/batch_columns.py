"""Functions on the columns of a batch: making, comparing, joining and labelling them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from roll.distributed.scheduler.batch_memory import clone_tensor, concat_tensors, map_tensors

# What a TensorDict holds: tensors; nested TensorDicts and other tensor-like containers work too.
Column = Any


def make_tensor_dict(columns: Mapping[str, Column], num_rows: int) -> TensorDict:
    """A TensorDict with one batch dimension, also when there are no columns."""
    return TensorDict(dict(columns), batch_size=[num_rows])


def tensor_dict_from(tensors: Mapping[str, torch.Tensor]) -> TensorDict:
    """A TensorDict of at least one column, whose first dimension is the rows."""
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor | TensorDictBase):
            raise TypeError(
                f"tensor column {key!r} is a {type(value).__name__}; expected a torch.Tensor"
            )
        if value.ndim == 0:
            raise ValueError(
                f"tensor column {key!r} is a single number; expected one row per sample, as shape (rows, ...)"
            )
    rows = {key: len(value) for key, value in tensors.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"tensor columns have different numbers of rows: {rows}")
    return make_tensor_dict(tensors, next(iter(rows.values())))


def object_column(key: str, values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """A 1-D object array with one object per row.

    Numbers become Python numbers; the rows of an array with more dimensions stay arrays, one for each row. A 1-D object
    array comes back as it is.
    """
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise ValueError(
                f"non-tensor column {key!r} is a single value; expected one object per row"
            )
        if values.ndim == 1:
            return values if values.dtype == object else values.astype(object)
    elif isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(
            f"non-tensor column {key!r} is a {type(values).__name__}; expected a list or array with one object per row"
        )
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):  # numpy would look inside lists and arrays of equal length
        column[row] = value
    return column


def row_positions(idxs: Any, num_rows: int) -> np.ndarray:
    """Non-negative int64 positions from what callers index rows with: positions or a mask, as list, array or tensor."""
    if isinstance(idxs, torch.Tensor):
        idxs = idxs.detach().cpu().numpy()
    index = np.atleast_1d(np.asarray(idxs))
    if index.ndim != 1:
        raise IndexError(f"row indices have shape {index.shape}; expected one dimension")
    if index.size == 0 and index.dtype != bool:
        return np.empty(0, dtype=np.int64)
    if index.dtype == bool:
        if len(index) != num_rows:
            raise IndexError(f"a mask of {len(index)} values for a batch of {num_rows} rows")
        return np.flatnonzero(index)
    if not np.issubdtype(index.dtype, np.integer):
        raise TypeError(f"rows are selected by integers or by a mask of bools; found {index.dtype}")
    index = index.astype(np.int64)
    outside = index[(index < -num_rows) | (index >= num_rows)]
    if outside.size:
        raise IndexError(f"row {outside[0]} of a batch of {num_rows} rows")
    return np.where(index < 0, index + num_rows, index)


def epoch_orders(
    num_rows: int, epochs: int, shuffle: bool, seed: int | None
) -> Iterator[torch.Tensor]:
    """The order of the rows for every epoch, drawn without touching torch's global random state."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    for _ in range(epochs):
        yield torch.randperm(num_rows, generator=generator) if shuffle else torch.arange(num_rows)


def row_labels(column: torch.Tensor | np.ndarray) -> list[str]:
    """`str(value)` of every row; tensors as their Python numbers."""
    values = column.tolist() if isinstance(column, torch.Tensor) else column
    return [str(value.tolist() if isinstance(value, torch.Tensor) else value) for value in values]


def map_rows(column: np.ndarray, function: Any) -> np.ndarray:
    """`map_tensors` over the objects of a column; the same array if nothing changed."""
    mapped = [map_tensors(value, function) for value in column]
    if all(new is old for new, old in zip(mapped, column, strict=True)):
        return column
    return object_column("", mapped)


def clone_column(column: Column) -> Column:
    """A copy of a tensor, or of what else a TensorDict may hold."""
    return clone_tensor(column) if isinstance(column, torch.Tensor) else column.clone()


def concat_column(key: str, columns: list[Column]) -> Column:
    """The rows of all; an error names the column."""
    try:
        return concat_tensors(columns)
    except RuntimeError as error:
        kinds = [f"{column.dtype} {tuple(column.shape)}" for column in columns]
        raise ValueError(f"cannot concat column {key!r} of {kinds}: {error}") from error


def custom_np_concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One object column of the rows of all, whatever shapes the objects in the rows have."""
    return np.concatenate([object_column("", array) for array in arrays])


def merge_dicts(dicts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """All values by key, as flat lists: `{"a": 1}, {"a": [2, 3], "b": 4}` gives `{"a": [1, 2, 3], "b": [4]}`.

    Lists, tuples, arrays and tensors with a first dimension are flattened by one level, so that ragged ones are kept.
    """
    merged: dict[str, list[Any]] = {}
    for mapping in dicts:
        for key, value in mapping.items():
            values = merged.setdefault(key, [])
            if isinstance(value, list | tuple) or (
                isinstance(value, np.ndarray | torch.Tensor) and value.ndim > 0
            ):
                values.extend(value)
            else:
                values.append(value)
    return merged


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows to columns: `[{"a": 1}, {"a": 2}]` gives `{"a": [1, 2]}`. All rows need the same keys."""
    if not list_of_dict:
        return {}
    keys = list(list_of_dict[0])
    for row, mapping in enumerate(list_of_dict):
        if set(mapping) != set(keys):
            raise ValueError(f"row {row} has keys {sorted(mapping)}; row 0 has {sorted(keys)}")
    return {key: [mapping[key] for mapping in list_of_dict] for key in keys}


def move_tensors_to_device(tree: Any, device: torch.device | str | int) -> Any:
    """`tree` with the tensors inside its dicts, lists and tuples on `device`; `tree` itself if it has none."""
    return map_tensors(tree, lambda tensor: tensor.to(device))


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add to the first what only the second has, in place; returns the first. Columns of both must be equal."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(
            f"cannot unite tensors of {tuple(tensor_dict1.batch_size)} rows with {tuple(tensor_dict2.batch_size)}"
        )
    left, right = dict(tensor_dict1.items()), dict(tensor_dict2.items())
    check_same_values(left, right, "tensor column")
    return tensor_dict1.update(new_items(right, left))


def union_numpy_dict(
    dict1: dict[str, np.ndarray], dict2: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add to the first what only the second has, in place; returns the first. Columns of both must be equal."""
    check_same_values(dict1, dict2, "non-tensor column")
    dict1.update(new_items(dict2, dict1))
    return dict1


def new_items(source: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """The items of one mapping whose keys are not in the other."""
    return {key: value for key, value in source.items() if key not in target}


def check_same_keys(expected: Mapping[str, Any], found: Mapping[str, Any], name: str) -> None:
    """Raise unless both have the same columns; `name` is that of the second."""
    if expected.keys() != found.keys():
        raise ValueError(
            f"cannot concat batches with different columns: {name} lacks {sorted(expected.keys() - found.keys())} "
            f"and adds {sorted(found.keys() - expected.keys())}"
        )


def check_same_values(left: Mapping[str, Any], right: Mapping[str, Any], kind: str) -> None:
    """Raise unless the two mappings agree wherever both have a key; `kind` names the store in the message."""
    for key, value in right.items():
        if key not in left or same_value(left[key], value):
            continue
        raise ValueError(
            f"{kind} {key!r} is in both batches with different values: {_describe(left[key])} and {_describe(value)}; "
            "drop or rename it in one of them"
        )


def same_value(left: Any, right: Any) -> bool:
    """Equality of tensors (dtype and shape included), arrays, nested containers and other objects. NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        right = right.to(left.device)
        return torch.equal(left, right) or bool(
            ((left == right) | ((left != left) & (right != right))).all()
        )
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype != object:
            return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
        return all(same_value(x, y) for x, y in zip(left.flat, right.flat, strict=True))
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        left, right = dict(left.items()), dict(right.items())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            same_value(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same_value(x, y) for x, y in zip(left, right, strict=True))
        )
    if any(
        isinstance(value, torch.Tensor | np.ndarray | dict | list | tuple)
        for value in (left, right)
    ):
        return False
    return bool(left == right) or bool(left != left and right != right)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
