"""Bringing the numbers that a step reports from the device to the host."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MAX_VECTOR = 256  # entries that cost no more to bring than one


def to_floats(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Python floats of 0-d tensors (and numbers), with one transfer for all tensors instead of one for each."""
    return all_to_floats([scalars])[0]


def all_to_floats(groups: Sequence[Mapping[str, Tensor | float]]) -> list[dict[str, float]]:
    """The same for several groups, with one transfer for all of them."""
    with torch.no_grad():
        read = iter(_read([value for scalars in groups for value in scalars.values() if isinstance(value, Tensor)]))
    return [
        {key: next(read) if isinstance(value, Tensor) else float(value) for key, value in scalars.items()}
        for scalars in groups
    ]


def _read(tensors: list[Tensor]) -> list[float]:
    pieces = _pieces(tensors)
    if not pieces:
        return []
    vectors = [vector for vector, _ in pieces]
    values = vectors[0].tolist() if len(pieces) == 1 else torch.cat([vector.double() for vector in vectors]).tolist()
    result = [0.0] * len(tensors)
    start = 0
    for vector, places in pieces:
        for place, entry in places:
            result[place] = float(values[start + entry])
        start += vector.numel()
    return result


def _pieces(tensors: list[Tensor]) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """Vectors that hold the numbers, each with (place in `tensors`, its entry): where numbers are entries of a short
    vector, as kernels leave them, it is that vector as it lies there; the others are stacked."""
    found: dict[int, tuple[Tensor, list[tuple[int, int]]]] = {}
    loose: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        vector = tensor._base
        is_entry = vector is not None and (id(vector) in found or _is_short(vector)) and vector.dtype == tensor.dtype
        if vector is None or not is_entry:
            loose.setdefault(tensor.dtype, []).append(place)
            continue
        places = found.setdefault(id(vector), (vector, []))[1]
        places.append((place, int(tensor.storage_offset() - vector.storage_offset())))
    # One stack for each dtype: a conversion of each number would be a launch of each.
    stacks = [
        (torch.stack([tensors[place] for place in group]), [(place, entry) for entry, place in enumerate(group)])
        for group in loose.values()
    ]
    return [*found.values(), *stacks]


def _is_short(vector: Tensor) -> bool:
    return vector.ndim == 1 and vector.numel() <= MAX_VECTOR and vector.is_contiguous()
