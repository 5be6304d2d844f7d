"""A batch as a folder: `tensors.safetensors` for the tensor columns, `data.json` for all the rest. No pickle anywhere.

JSON knows neither NaN, tuples, keys that are not strings nor arrays. Such values are written as an object with one key
that starts with "$": {"$float": "nan"}, {"$tuple": [...]}, {"$dict": [[key, value], ...]}, {"$array": {...}},
{"$scalar": {...}} (numpy), {"$tensor": {...}}. The bytes of arrays and tensors are base64 and come back bit for bit.
"""

import base64
import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from roll.distributed.scheduler.batch_memory import (
    dtype_name,
    is_plain,
    plain_cpu_tensor,
    tensor_bytes,
    tensor_from_bytes,
)
from roll.exceptions import DataError

_FORMAT, _VERSION = "roll.DataProto", 1
_JSON_FILE, _TENSOR_FILE = "data.json", "tensors.safetensors"
_PLAIN_TYPES = frozenset({bool, int, str, type(None)})
_SAFETENSORS_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
    | {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)


def save(
    folder: str | os.PathLike[str],
    num_rows: int,
    columns: Mapping[str, torch.Tensor] | None,
    arrays: Mapping[str, np.ndarray],
    meta_info: dict[str, Any],
) -> None:
    """Write a batch. The folder gets its name when it is complete; a batch saved there before is replaced."""
    target = Path(folder)
    if (
        target.exists()
        and not (target / _JSON_FILE).is_file()
        and not (target.is_dir() and not any(target.iterdir()))
    ):
        raise DataError(f"{target} exists and is not a saved DataProto: choose another folder")
    tensors = _file_tensors(columns or {})
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "rows": num_rows,
        "columns": None if columns is None else list(columns),
        "non_tensor_batch": {
            key: [
                _encode(value, f"non_tensor_batch[{key!r}], row {row}")
                for row, value in enumerate(column)
            ]
            for key, column in arrays.items()
        },
        "meta_info": _encode(meta_info, "meta_info"),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        if tensors:
            save_file(tensors, staging / _TENSOR_FILE)
        with open(staging / _JSON_FILE, "w", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
        _publish(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def load(
    folder: str | os.PathLike[str],
) -> tuple[int, dict[str, torch.Tensor] | None, dict[str, list[Any]], dict[str, Any]]:
    """Read what `save` wrote: number of rows, tensor columns, non-tensor columns, meta_info."""
    json_path, tensor_path = Path(folder) / _JSON_FILE, Path(folder) / _TENSOR_FILE
    try:
        document = json.loads(json_path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{json_path} does not exist: {folder} is not a saved DataProto") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {json_path}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise DataError(f"{json_path} is not part of a saved DataProto")
    if document.get("version") != _VERSION:
        raise DataError(
            f"{json_path} has version {document.get('version')!r}; this program reads version {_VERSION}"
        )
    try:
        num_rows, names = int(document["rows"]), document["columns"]
        names = None if names is None else [str(name) for name in names]
        arrays = {
            key: [_decode(value) for value in column]
            for key, column in document["non_tensor_batch"].items()
        }
        meta_info = _decode(document["meta_info"])
        if not isinstance(meta_info, dict):
            raise TypeError(f"meta_info is a {type(meta_info).__name__}")
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:  # torch's views raise the last
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
            f"{tensor_path} has columns and rows {rows}; {json_path} expects {num_rows} rows of {names}"
        )
    wrong = {key: len(column) for key, column in arrays.items() if len(column) != num_rows}
    if wrong:
        raise DataError(
            f"{json_path} is damaged: columns with another number of rows than {num_rows}: {wrong}"
        )
    return (
        num_rows,
        None if names is None else {key: tensors[key] for key in names},
        arrays,
        meta_info,
    )


def _publish(staging: Path, target: Path) -> None:
    """Give the finished folder its name."""
    if not target.exists() or not any(target.iterdir()):
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


def _file_tensors(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The columns as safetensors takes them: contiguous, on the CPU, none on the memory of another."""
    tensors, storages = {}, set()
    for key, value in columns.items():
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            raise DataError(
                f"batch[{key!r}] is a {type(value).__name__}, which cannot be saved: expected dense tensors"
            )
        if value.dtype not in _SAFETENSORS_DTYPES:
            raise DataError(
                f"batch[{key!r}] is a tensor of {value.dtype}, which cannot be saved as safetensors"
            )
        tensor = plain_cpu_tensor(value)
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[key] = tensor
    return tensors


def _encode(value: Any, where: str) -> Any:
    """`value` in JSON's types; `where` names it in an error."""
    if type(value) in _PLAIN_TYPES:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is list:
        if _PLAIN_TYPES.issuperset(map(type, value)):  # long lists of token ids or texts
            return value
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):  # subclasses, such as defaultdict, come back as dict
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = value.items()
        return {
            "$dict": [
                [_encode(k, f"key {k!r} of {where}"), _encode(v, f"{where}[{k!r}]")]
                for k, v in pairs
            ]
        }
    if isinstance(value, np.generic) and value.dtype.kind not in "OV":
        return {"$scalar": {"dtype": value.dtype.str, "data": _to_text(value.tobytes())}}
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind != "V":
        shape = list(value.shape)
        if value.dtype == object:
            items = [_encode(item, f"{where}.flat[{i}]") for i, item in enumerate(value.flat)]
            return {"$array": {"dtype": "object", "shape": shape, "items": items}}
        return {
            "$array": {"dtype": value.dtype.str, "shape": shape, "data": _to_text(value.tobytes())}
        }
    if isinstance(value, torch.Tensor) and is_plain(value):
        data = _to_text(tensor_bytes(value).tobytes())
        return {
            "$tensor": {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data}
        }
    raise DataError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: expected None, "
        "bool, int, float, str, list, tuple, dict, numpy arrays and scalars, or tensors"
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
        case "$scalar":
            return _array(content["dtype"], (), content["data"])[()]
        case "$array" if content["dtype"] == "object":
            array = np.empty(len(content["items"]), dtype=object)
            for i, item in enumerate(content["items"]):
                array[i] = _decode(item)
            return array.reshape(content["shape"])
        case "$array":
            return _array(content["dtype"], tuple(content["shape"]), content["data"])
        case "$tensor":
            data = np.frombuffer(
                bytearray(base64.b64decode(content["data"], validate=True)), dtype=np.uint8
            )
            return tensor_from_bytes(data, content["dtype"], content["shape"])
    raise ValueError(f"unknown tag {tag!r}")


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _array(dtype: str, shape: tuple[int, ...], text: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind in "OV":  # its bytes would be taken for addresses of objects
        raise ValueError(f"an array of {dtype!r} cannot be made from bytes")
    # A bytearray, so that the array can be written to.
    return np.ndarray(shape, dtype=kind, buffer=bytearray(base64.b64decode(text, validate=True)))
