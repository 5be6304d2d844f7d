"""Metrics from the device to the host, and many values of a metric to one number.

A metric says how it reduces by a tag at the end of its name: `actor/pg_loss@sum`,
`actor/ratio_max@max`. Without a tag it is averaged. (ROLL also guesses from endings such as `_max`
and `_sum`, which catches metrics that merely end so.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Scalar = torch.Tensor | float  # a tensor has no dimensions
NUM_VALID = "_roll/num_valid"  # how many entries the extremes and means of a report are about
REDUCERS: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "p50": lambda values: np.percentile(values, 50),
    "p99": lambda values: np.percentile(values, 99),
    "std": np.std,
    "sum": np.sum,
}
HISTORY_REDUCERS: dict[str, Callable[[np.ndarray], Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
}


def bring_to_host(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of several losses with floats for 0-d tensors, all of them in one transfer.

    Extremes and means of a report whose NUM_VALID is 0 do not exist and are left out; NUM_VALID is
    too.
    """
    places: list[tuple[dict[str, Any], str]] = []
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, int]]] = {}
    found = [dict(report) for report in reports]
    for report in found:
        for name, value in report.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                groups.setdefault((value.device, value.dtype), []).append((value, len(places)))
                places.append((report, name))
            elif isinstance(value, int | float):
                report[name] = float(value)
    if groups:
        device = next(iter(groups))[0]
        # One stack for each dtype: a conversion of each number would be a launch of each.
        stacks = [torch.stack([value.detach() for value, _ in group]) for group in groups.values()]
        numbers = torch.cat([stack.to(device, torch.float64) for stack in stacks]).tolist()
        order = [place for group in groups.values() for _, place in group]
        for place, number in zip(order, numbers, strict=True):
            report, name = places[place]
            report[name] = number
    for report in found:
        if report.pop(NUM_VALID, 1) == 0:
            for name in [name for name in report if name.endswith(("@max", "@min", "@mean"))]:
                del report[name]
    return found


def reducer_of(
    name: str, default: Callable[[np.ndarray], Any] = np.mean
) -> Callable[[np.ndarray], Any]:
    """The function behind the `@tag` of a metric's name, or `default` without one."""
    if "@" not in name:
        return default
    tag = name.rsplit("@", 1)[1].strip()
    if tag not in REDUCERS:
        raise ValueError(
            f"metric {name!r} has the unknown tag {tag!r}; known: {', '.join(REDUCERS)}"
        )
    return REDUCERS[tag]


def reduce_metrics(
    metrics: Mapping[str, Any], reduce_func: Callable[[Any], Any] = np.mean
) -> dict[str, Any]:
    """One float for every metric; the names keep their tags.

    Lists, tuples, arrays and tensors of any length at any depth count as the numbers in them, each
    once. An empty sequence is kept as it is: it has no value.
    """
    reduced = {}
    for name, value in metrics.items():
        reducer = reducer_of(name, reduce_func)
        numbers = list(_numbers(value, name))
        reduced[name] = float(reducer(np.asarray(numbers))) if numbers else value
    return reduced


def reduce_metrics_list(
    metrics_list: Sequence[Mapping[str, Any]], reduce_func: Callable[[Any], Any] = np.mean
) -> dict[str, Any]:
    """Reduce the metrics of several steps or workers; one that only some have counts where it
    is."""
    merged: dict[str, list[Any]] = {}
    for metrics in metrics_list:
        append_to_dict(merged, metrics)
    return reduce_metrics(merged, reduce_func)


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Append each value of `new_data` to the list of the same name in `data`, in place."""
    for key, value in new_data.items():
        data.setdefault(key, []).append(value)


def flatten_sum(values: Any) -> float:
    """Sum of all numbers in nested sequences, arrays and tensors."""
    return sum(_numbers(values, "values"))


def aggregate_metrics(
    history_metrics: Iterable[Mapping[str, Any]], metrics_agg_mode: Mapping[str, str]
) -> dict[str, float]:
    """Reduce the metrics of an episode's steps, each by its mode of HISTORY_REDUCERS (default
    mean)."""
    history: dict[str, list[Any]] = {}
    for metrics in history_metrics:
        append_to_dict(history, metrics)
    aggregated = {}
    for name, values in history.items():
        mode = metrics_agg_mode.get(name, "mean")
        if mode not in HISTORY_REDUCERS:
            raise ValueError(
                f"metric {name!r} has the unknown mode {mode!r}; known: "
                f"{', '.join(HISTORY_REDUCERS)}"
            )
        aggregated[name] = float(
            HISTORY_REDUCERS[mode](np.asarray([float(value) for value in values]))
        )
    return aggregated


def _numbers(value: Any, name: str) -> Iterator[float]:
    if isinstance(value, torch.Tensor):
        yield from value.detach().double().flatten().tolist()
    elif isinstance(value, list | tuple | np.ndarray) and not (
        isinstance(value, np.ndarray) and value.ndim == 0
    ):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int | float | np.number | np.bool_ | np.ndarray):
        yield float(value)
    else:
        raise TypeError(
            f"metric {name!r} holds a {type(value).__name__}: {value!r}; expected numbers"
        )
