"""Metrics that stay on the device until somebody reads them, so that a loss does not make the host wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from roll.ops.scalars import NamedScalars, Scalar, all_to_floats

_VALID = "valid"
_NEED_VALUES = ("@max", "@min", "@mean")


class DeferredMetrics(MutableMapping[str, float]):
    """Metrics that wait on the device: the first reading brings all of them in one transfer, and `read_together` those
    of several losses in one. `valid`: see `roll.pipeline.loss_io.report`."""

    def __init__(self, scalars: Mapping[str, Scalar], valid: Tensor) -> None:
        # Without graphs, which would live as long as these.
        self._waiting: NamedScalars | None = NamedScalars(scalars).detach()
        self._waiting[_VALID] = valid if valid.ndim == 0 else valid.sum()
        self._floats: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        read_together([self])
        return self._floats

    def _take(self, values: dict[str, float]) -> None:
        if values.pop(_VALID) == 0:
            values = {key: value for key, value in values.items() if not key.endswith(_NEED_VALUES)}
        self._floats, self._waiting = values, None

    def __getitem__(self, key: str) -> float:
        return self.read()[key]

    def __setitem__(self, key: str, value: float) -> None:
        self.read()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __repr__(self) -> str:
        return repr(self.read())


def read_together(metrics: Iterable[Mapping[str, Any]]) -> None:
    """Reads those of them that still wait, in one transfer."""
    waiting = [
        (each, each._waiting)
        for each in metrics
        if isinstance(each, DeferredMetrics) and each._waiting
    ]
    for (each, _), values in zip(
        waiting, all_to_floats([scalars for _, scalars in waiting]), strict=True
    ):
        each._take(values)
