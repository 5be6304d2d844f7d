"""Reads the data files of a report as its page does: what the JavaScript of core.js does, in Python."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ODD = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def read_data(path: Path) -> dict[str, Any]:
    """The header of a data file, with its columns as arrays."""
    match = re.fullmatch(r'R\.put\("([\w/-]+)","([A-Za-z0-9+/=]*)"\);\n', path.read_text())
    assert match, f"{path} is no data file"
    return unpack(match[2])


def unpack(packed: str) -> dict[str, Any]:
    data = zlib.decompress(base64.b64decode(packed), -15)
    length = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + length])
    if "columns" in header:
        header["columns"] = _columns(header, data[4 + length :])
    return header


def _columns(header: dict[str, Any], data: bytes) -> dict[str, np.ndarray]:
    columns = {}
    for name, about in header["columns"].items():
        length, planes = about["length"], about["planes"]
        whole = np.zeros(length, np.uint32)
        for plane in range(planes):
            whole |= np.frombuffer(data, np.uint8, length, plane * length).astype(np.uint32) << (
                8 * plane
            )
        data = data[planes * length :]
        if about.get("whole"):
            columns[name] = whole
            continue
        if about["scale"] == 0:
            values = whole.view(np.float32).astype(float)
        else:
            signed = np.where(whole & 1, -((whole.astype(float) + 1) / 2), whole.astype(float) / 2)
            values = signed * about["scale"]
        for i, odd in about.get("odd", []):
            values[i] = ODD[odd]
        columns[name] = values
    for name, base in header.get("differences", {}).items():
        near = columns[base]
        columns[name] = np.where(np.isfinite(near), columns[name] + near, columns[name])
    return columns
