"""Numbers and texts of many samples as one short string that a page opened from disk can load.

Such a page can load scripts and nothing else, so data travels as text: raw deflate, then base64. Numbers are rounded
to a step (a log-prob to 1e-4, which is four digits of a probability ratio) and written as byte planes: all lowest
bytes, then all second bytes, and so on. The high planes are nearly constant and cost next to nothing.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_LARGEST = 2**29  # of a rounded number; its zigzag form still fits 32 bits


class Packer:
    """Collects columns, then gives one string: `{"header": ..., planes ...}` deflated, in base64.

    The header describes each column: its length, the step `scale` (0: float32 numbers), the number of `planes`,
    and the `odd` entries that are not finite.
    """

    def __init__(self) -> None:
        self._columns: dict[str, dict[str, Any]] = {}
        self._bytes: list[bytes] = []

    def add_numbers(self, name: str, values: np.ndarray, finest: float = 1e-4) -> None:
        """A column of float64, rounded to multiples of `finest`; to four digits if all are below 100 of these."""
        finite = np.isfinite(values)
        odd = [[int(i), _odd_name(values[i])] for i in np.flatnonzero(~finite)]
        values = np.where(finite, values, 0.0)
        largest = float(np.abs(values).max(initial=0.0))
        scale = finest
        if 0 < largest < 100 * finest:
            scale = 10.0 ** (math.floor(math.log10(max(largest, 1e-30))) - 3)
        if largest / scale > _LARGEST:
            planes = values.astype("<f4").view(np.uint8).reshape(-1, 4)
            self._add(name, planes, scale=0, odd=odd)
            return
        rounded = np.round(values / scale).astype(np.int64)
        self._add(name, _byte_planes(_zigzag(rounded)), scale=scale, odd=odd)

    def add_whole(self, name: str, values: Sequence[int] | np.ndarray) -> None:
        """A column of ints >= 0."""
        self._add(name, _byte_planes(np.asarray(values, dtype=np.int64)), scale=1, whole=1)

    def pack(self, **header: Any) -> str:
        """The string; `header` is any JSON value that the reader of the columns needs."""
        return pack_bytes(_header_bytes({**header, "columns": self._columns}), *self._bytes)

    def _add(self, name: str, planes: np.ndarray, **fields: Any) -> None:
        fields = {key: value for key, value in fields.items() if value != []}
        self._columns[name] = {"length": len(planes), "planes": planes.shape[1], **fields}
        self._bytes += [plane.tobytes() for plane in planes.T]


def pack_bytes(*parts: bytes) -> str:
    """The parts back to back in raw deflate, each with a code table of its own, then base64."""
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15, 9)
    packed = b"".join(compressor.compress(part) + compressor.flush(zlib.Z_BLOCK) for part in parts)
    return base64.b64encode(packed + compressor.flush()).decode("ascii")


def pack_json(value: Any) -> str:
    """A JSON value alone; NaN and infinities become their names."""
    return pack_bytes(_header_bytes(value))


def _header_bytes(value: Any) -> bytes:
    text = json.dumps(finite_json(value), separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return len(text).to_bytes(4, "little") + text


def finite_json(value: Any) -> Any:
    """`value` with what JSON cannot hold replaced: non-finite floats by their names, unknown objects by their text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _odd_name(value)
    if isinstance(value, dict):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return str(value)


def significant(value: float | None, digits: int = 6) -> float | None:
    """Rounded to that many significant digits."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else value


def _odd_name(value: float) -> str:
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _zigzag(values: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, 2 ... to 0, 1, 2, 3, 4: small numbers of either sign have empty high bytes."""
    return np.where(values < 0, -2 * values - 1, 2 * values)


def _byte_planes(values: np.ndarray) -> np.ndarray:
    """(N, planes) bytes, lowest first, without planes that are all zero."""
    planes = values.astype("<u4").view(np.uint8).reshape(-1, 4)
    used = 4
    while used and not planes[:, used - 1].any():
        used -= 1
    return planes[:, :used]
