"""`device_mapping: list(range(0,8))` as ROLL's files write it, read without running anything."""

from __future__ import annotations

import ast
from typing import Any

HOW_TO_WRITE = (
    "expected a list of GPU numbers; write [0, 1], list(range(0,8)) or list(range(0,4)) + [6, 7]"
)
MAX_DEVICES = 65_536  # far beyond any cluster; keeps a mistyped range from filling the memory


def parse_device_mapping(value: Any) -> list[int]:
    """GPU numbers from a list, or from the text of a Python expression of lists, ranges and `+`.

    >>> parse_device_mapping("list(range(0,3)) + [6]")
    [0, 1, 2, 6]

    Raises:
        ValueError: saying what is wrong and what is accepted.
    """
    devices = _evaluate(_parse(value)) if isinstance(value, str) else value
    if not isinstance(devices, (list, tuple, range)):
        raise ValueError(HOW_TO_WRITE)
    if not devices:
        raise ValueError("expected at least one GPU number; leave the key out to run without GPUs")
    seen: set[int] = set()
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise ValueError(f"{HOW_TO_WRITE} ({device!r} is none)")
        if device in seen:
            raise ValueError(f"expected every GPU once; {device} is named twice")
        seen.add(device)
    return list(devices)


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise ValueError(HOW_TO_WRITE) from None


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_evaluate(left), _evaluate(right)]
            if all(isinstance(part, list) for part in parts):
                return parts[0] + parts[1]
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            values = _evaluate(inner)
            if isinstance(values, list):
                return values
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if 1 <= len(bounds) <= 3:
            numbers = [_evaluate(bound) for bound in bounds]
            if all(isinstance(number, int) for number in numbers) and numbers[2:] != [0]:
                span = range(*numbers)
                if len(span) > MAX_DEVICES:
                    raise ValueError(f"expected at most {MAX_DEVICES} GPUs, not {len(span)}")
                return list(span)
    raise ValueError(HOW_TO_WRITE)
