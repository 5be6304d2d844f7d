"""The numbers that a step reports: by name, and from the device to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Scalar = Tensor | float  # a tensor has no dimensions
Value = TypeVar("Value")
MAX_VECTOR = 256  # entries that cost no more to bring than one


class NamedScalars(MutableMapping[str, Scalar]):
    """Numbers by name, used like a dict. Those that a kernel left in a vector become tensors of their own only if
    somebody asks for one: to take fifteen of them apart takes longer than many a kernel."""

    def __init__(self, scalars: Mapping[str, Scalar] | None = None) -> None:
        self.vector: Tensor | None = None
        self.places: Mapping[str, int] = {}  # never changed, only replaced: copies share it
        if isinstance(scalars, NamedScalars):
            self.vector, self.places, scalars = scalars.vector, scalars.places, scalars.others
        self.others: dict[str, Scalar] = dict(scalars or {})

    @classmethod
    def of_vector(cls, vector: Tensor, places: Mapping[str, int]) -> NamedScalars:
        """The entries vector[places[name]], of a vector without a graph."""
        scalars = cls()
        scalars.vector, scalars.places = vector, places
        return scalars

    def __getitem__(self, name: str) -> Scalar:
        if name in self.others:
            return self.others[name]
        place = self.places[name]
        assert self.vector is not None
        return self.vector[place]

    def __setitem__(self, name: str, value: Scalar) -> None:
        if name in self.places:
            del self[name]
        self.others[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self.others:
            del self.others[name]
        elif name in self.places:
            self.places = {other: place for other, place in self.places.items() if other != name}
        else:
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from self.places
        yield from self.others

    def __contains__(self, name: object) -> bool:
        return name in self.others or name in self.places

    def __len__(self) -> int:
        return len(self.places) + len(self.others)

    def __or__(self, other: Mapping[str, Scalar]) -> NamedScalars:
        result = NamedScalars(self)
        result.update(other)
        return result

    def __repr__(self) -> str:
        return repr(dict(self))

    def renamed(self, names: Mapping[str, str]) -> NamedScalars:
        """Those that `names` has a new name for, by it."""
        result = NamedScalars()
        result.vector, result.places = self.vector, _renamed(self.places, names)
        result.others = _renamed(self.others, names)
        return result

    def detach(self) -> NamedScalars:
        """A copy without graphs."""
        result = NamedScalars(self)
        for name, value in result.others.items():
            if isinstance(value, Tensor) and value.requires_grad:
                result.others[name] = value.detach()
        return result


def _renamed(values: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    return {names[name]: value for name, value in values.items() if name in names}


def to_floats(scalars: Mapping[str, Scalar]) -> dict[str, float]:
    """Python floats, with one transfer for all tensors instead of one for each."""
    return all_to_floats([scalars])[0]


def all_to_floats(groups: Sequence[Mapping[str, Scalar]]) -> list[dict[str, float]]:
    """The same for several groups, with one transfer for all of them."""
    parts = [
        scalars if isinstance(scalars, NamedScalars) else NamedScalars(scalars)
        for scalars in groups
    ]
    tensors = [
        value for part in parts for value in part.others.values() if isinstance(value, Tensor)
    ]
    vectors = {id(part.vector): part.vector for part in parts if part.vector is not None}
    with torch.no_grad():
        entries = iter(_put_in_vectors(tensors, vectors))
        values = _bring(vectors)
    result = []
    for part in parts:
        floats = {name: values[id(part.vector)][place] for name, place in part.places.items()}
        for name, value in part.others.items():
            if isinstance(value, Tensor):
                vector, place = next(entries)
                floats[name] = values[vector][place]
            else:
                floats[name] = float(value)
        result.append(floats)
    return result


def _put_in_vectors(tensors: list[Tensor], vectors: dict[int, Tensor]) -> list[tuple[int, int]]:
    """Where each number is to be found: (id of the vector, place). An entry of a short vector stays where it is; the
    others are stacked. Vectors that were not among `vectors` are added to them."""
    entries = [(0, 0)] * len(tensors)
    loose: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        base = tensor._base
        is_entry = (
            base is not None
            and (id(base) in vectors or _is_short(base))
            and base.dtype == tensor.dtype
        )
        if base is None or not is_entry:
            loose.setdefault(tensor.dtype, []).append(number)
            continue
        vectors[id(base)] = base
        entries[number] = id(base), int(tensor.storage_offset() - base.storage_offset())
    # One stack for each dtype: a conversion of each number would be a launch of each.
    for numbers in loose.values():
        stack = torch.stack([tensors[number] for number in numbers])
        vectors[id(stack)] = stack
        for place, number in enumerate(numbers):
            entries[number] = id(stack), place
    return entries


def _bring(vectors: Mapping[int, Tensor]) -> dict[int, list[float]]:
    if len(vectors) <= 1:
        return {key: vector.double().tolist() for key, vector in vectors.items()}
    values = torch.cat([vector.double() for vector in vectors.values()]).tolist()
    found: dict[int, list[float]] = {}
    start = 0
    for key, vector in vectors.items():
        found[key] = values[start : start + vector.numel()]
        start += vector.numel()
    return found


def _is_short(vector: Tensor) -> bool:
    return vector.ndim == 1 and vector.numel() <= MAX_VECTOR and vector.is_contiguous()
