"""Reads the data files of a report as its page does."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any


def read_data(path: Path) -> dict[str, Any]:
    match = re.fullmatch(r'R\.put\("([\w/-]+)","([A-Za-z0-9+/=]*)"\);\n', path.read_text())
    assert match, f"{path} is no data file"
    return json.loads(zlib.decompress(base64.b64decode(match[2]), -15))
