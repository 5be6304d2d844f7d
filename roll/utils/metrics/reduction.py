"""Many values of a metric, from micro-batches, ranks or steps, to one number.

A metric says how it reduces by a tag at the end of its name: `actor/pg_loss@sum`, `actor/ratio_max@max`. Without a tag
it is averaged. (ROLL also guesses from endings such as `_max` and `_sum`, which catches metrics that merely end so.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

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


def reducer_of(
    name: str, default: Callable[[np.ndarray], Any] = np.mean
) -> Callable[[np.ndarray], Any]:
    """The function behind the `@tag` of a metric's name, or `default` if it has none; ValueError for an unknown tag."""
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
    """One float for every metric; the names keep their tags. Values are numbers, or sequences of them nested at will.

    Lists, tuples, arrays and tensors of any length at any depth count as the numbers in them, each once. An empty
    sequence is kept as it is: it has no value. The argument is not changed.
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
    """Reduce the same metrics of several steps or workers. A metric that only some of them have counts where it is."""
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
    """Reduce the metrics of an episode's steps, each by its own mode: sum, mean (default), min, max, last, first."""
    history: dict[str, list[Any]] = {}
    for metrics in history_metrics:
        append_to_dict(history, metrics)
    aggregated = {}
    for name, values in history.items():
        mode = metrics_agg_mode.get(name, "mean")
        if mode not in HISTORY_REDUCERS:
            raise ValueError(
                f"metric {name!r} has the unknown mode {mode!r}; known: {', '.join(HISTORY_REDUCERS)}"
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
