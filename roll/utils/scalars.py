"""Bringing the numbers that a step reports from the device to the host."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
MAX_VECTOR = 256  # entries that cost no more to bring than one


def to_floats(scalars: Mapping[Key, Tensor | float]) -> dict[Key, float]:
    """Python floats of 0-d tensors (and numbers), with one transfer for all tensors instead of one for each."""
    tensors = {key: value for key, value in scalars.items() if isinstance(value, Tensor)}
    with torch.no_grad():
        floats = dict(zip(tensors, _read(list(tensors.values())), strict=True))
    return {key: floats[key] if key in floats else float(value) for key, value in scalars.items()}


def _read(tensors: list[Tensor]) -> list[float]:
    # Pieces of what is brought, with the places of their entries in the result: vectors whose entries are asked for, as
    # kernels leave them, are read as they lie there.
    vectors: dict[int, Tensor] = {}
    places: dict[int, list[tuple[int, int]]] = {}  # of a vector: (place in the result, entry)
    loose: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if (vector := _vector_of(tensor)) is None:
            loose.setdefault(tensor.dtype, []).append(i)
        else:
            vectors[id(vector)] = vector
            places.setdefault(id(vector), []).append((i, int(tensor.storage_offset() - vector.storage_offset())))
    # Stacked first and converted then: a conversion of each would be a launch of each.
    pieces = [*vectors.values(), *(torch.stack([tensors[i] for i in group]) for group in loose.values())]
    places_of_pieces = [*places.values(), *([(i, entry) for entry, i in enumerate(group)] for group in loose.values())]
    if not pieces:
        return []
    values = pieces[0].tolist() if len(pieces) == 1 else torch.cat([piece.double() for piece in pieces]).tolist()
    result = [0.0] * len(tensors)
    start = 0
    for piece, entries in zip(pieces, places_of_pieces, strict=True):
        for i, entry in entries:
            result[i] = float(values[start + entry])
        start += len(piece)
    return result


def _vector_of(tensor: Tensor) -> Tensor | None:
    """The short vector that a 0-d tensor is an entry of, if it is one."""
    vector = tensor._base
    if vector is None or vector.ndim != 1 or vector.dtype != tensor.dtype or len(vector) > MAX_VECTOR:
        return None
    return vector if vector.is_contiguous() else None
