"""Small helpers on dicts, sequences and arbitrary objects."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar


class Rows(Protocol):
    """A numpy array, a tensor, a TensorDict, a list: anything with a length and slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Any: ...


RowsT = TypeVar("RowsT", bound=Rows)


def union_two_dict(dict1: Mapping[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Both dicts in a new one; ValueError if they disagree on a key."""
    for key in dict1.keys() & dict2.keys():
        if dict1[key] != dict2[key]:
            raise ValueError(f"the dicts disagree on {key!r}: {dict1[key]!r} and {dict2[key]!r}")
    return {**dict1, **dict2}


def divide_by_chunk_size(data: RowsT, chunk_sizes: Sequence[int]) -> list[RowsT]:
    """Cut `data` along its first axis into pieces of the given sizes."""
    if any(size < 1 for size in chunk_sizes) or sum(chunk_sizes) != len(data):
        raise ValueError(
            f"chunk sizes {list(chunk_sizes)} must be positive and sum to the {len(data)} rows of data"
        )
    return [
        data[end - size : end]
        for end, size in zip(accumulate(chunk_sizes), chunk_sizes, strict=True)
    ]


def traverse_obj(
    value: Any, visitor: Callable[[Any, tuple[Any, ...]], bool], path: tuple[Any, ...] = ()
) -> None:
    """Call `visitor(value, path)` on a value and on all that dicts, lists, tuples and attributes below it hold.

    A visitor that returns True stops the walk below its value. Nothing is visited twice on one path, so cycles end.
    """
    _traverse(value, visitor, path, frozenset())


def _traverse(
    value: Any,
    visitor: Callable[[Any, tuple[Any, ...]], bool],
    path: tuple[Any, ...],
    above: frozenset[int],
) -> None:
    if id(value) in above or visitor(value, path):
        return
    above |= {id(value)}
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    else:
        children = [
            (f"attr:{name}", child) for name, child in getattr(value, "__dict__", {}).items()
        ]
    for step, child in children:
        _traverse(child, visitor, (*path, step), above)


def filter_func_args(func: Callable[..., Any], forward_args: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `forward_args` that `func` has a parameter for."""
    parameters = inspect.signature(func).parameters
    return {name: value for name, value in forward_args.items() if name in parameters}
