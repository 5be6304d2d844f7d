"""Metrics that stay on the device until somebody reads them, so that a loss does not make the host wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from roll.utils.scalars import to_floats

_VALID = "valid"
_NEED_VALUES = ("@max", "@min", "@mean")


class DeferredMetrics(MutableMapping[str, float]):
    """The metrics of a loss, as floats for whoever reads them: the first reading brings all in one transfer.

    `valid` is the mask that they are about, or the number of its ones: extremes and means of nothing do not exist, and
    such metrics are not there. `read_together` brings the metrics of several losses in one transfer.

        metrics = DeferredMetrics({"actor/loss@sum": loss}, mask)
        metrics["actor/loss@sum"]
    """

    def __init__(self, scalars: Mapping[str, Tensor | float], valid: Tensor) -> None:
        number = valid if valid.ndim == 0 else valid.sum()
        everything = {**scalars, _VALID: number}
        # Without their graphs, which would live as long as these.
        self._waiting: dict[str, Tensor | float] | None = {
            key: value.detach() if isinstance(value, Tensor) else value for key, value in everything.items()
        }
        self._floats: dict[str, float] = {}

    def _read(self) -> dict[str, float]:
        if self._waiting is not None:
            self._take(to_floats(self._waiting))
        return self._floats

    def _take(self, values: dict[str, float]) -> None:
        is_empty = values.pop(_VALID) == 0
        self._floats = {key: value for key, value in values.items() if not (is_empty and key.endswith(_NEED_VALUES))}
        self._waiting = None

    def __getitem__(self, key: str) -> float:
        return self._read()[key]

    def __setitem__(self, key: str, value: float) -> None:
        self._read()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(self._read())


def read_together(metrics: Iterable[Mapping[str, Any]]) -> None:
    """Reads those of them that still wait, in one transfer."""
    waiting = [each for each in metrics if isinstance(each, DeferredMetrics) and each._waiting is not None]
    scalars = {
        (number, key): value for number, each in enumerate(waiting) for key, value in (each._waiting or {}).items()
    }
    values: list[dict[str, float]] = [{} for _ in waiting]
    for (number, key), value in to_floats(scalars).items():
        values[number][key] = value
    for each, found in zip(waiting, values, strict=True):
        each._take(found)
