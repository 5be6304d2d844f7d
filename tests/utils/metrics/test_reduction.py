"""Metrics of many sources to one number each."""

import numpy as np
import pytest
import torch
from log_probs_reference import TensorWatch

from roll.pipeline.loss_io import report
from roll.utils.metrics.reduction import (
    aggregate_metrics,
    append_to_dict,
    bring_to_host,
    flatten_sum,
    reduce_metrics,
    reduce_metrics_list,
)


def test_tags_decide():
    values = [1.0, 2.0, 6.0]
    metrics = {f"m@{tag}": values for tag in ("mean", "max", "min", "sum", "p50", "std", "p99")}
    reduced = reduce_metrics(metrics)
    assert reduced == pytest.approx(
        {
            "m@mean": 3,
            "m@max": 6,
            "m@min": 1,
            "m@sum": 9,
            "m@p50": 2,
            "m@std": np.std(values),
            "m@p99": 5.92,
        }
    )
    assert all(isinstance(value, float) for value in reduced.values())


def test_without_a_tag_the_default_applies():
    assert reduce_metrics({"a": [1, 3]}) == {"a": 2}
    assert reduce_metrics({"a": [1, 3], "b@min": [1, 3]}, reduce_func=np.sum) == {
        "a": 4,
        "b@min": 1,
    }


def test_l20_a_name_that_merely_ends_like_a_reducer_is_averaged():
    assert reduce_metrics({"env/checksum_sum": [1, 3], "env/k_max": [1, 3]}) == {
        "env/checksum_sum": 2,
        "env/k_max": 2,
    }


def test_l20_ragged_nested_lists_count_every_number_once():
    metrics = {
        "a": [[1.0, 2.0], [3.0]],
        "b@sum": [[1], [2, [3, 4]], 5],
        "c@max": ([1, 2], np.array([[3.0, 9.0]])),
    }
    assert reduce_metrics(metrics) == {"a": 2, "b@sum": 15, "c@max": 9}


def test_l19_numpy_scalars_and_tensors_count():
    values = [
        1,
        2.0,
        np.float32(3),
        np.int64(4),
        torch.tensor(5.0),
        torch.tensor([6.0, 7.0]),
        np.array(8.0),
        True,
    ]
    assert flatten_sum(values) == 37
    assert reduce_metrics({"a@sum": values}) == {"a@sum": 37}
    assert flatten_sum([]) == 0


def test_single_values_become_floats():
    assert reduce_metrics(
        {"a": 3, "b@max": np.float32(2), "c": torch.tensor(1.5, requires_grad=True)}
    ) == {"a": 3.0, "b@max": 2.0, "c": 1.5}


def test_empty_sequences_stay():
    assert reduce_metrics({"a": [], "b@max": [[]]}) == {"a": [], "b@max": [[]]}


def test_the_argument_is_not_changed():
    metrics = {"a": [1, 3]}
    reduce_metrics(metrics)
    assert metrics == {"a": [1, 3]}


def test_unknown_tags_and_values_are_named():
    with pytest.raises(
        ValueError, match=r"'a@median' has the unknown tag 'median'; known: mean, max"
    ):
        reduce_metrics({"a@median": [1]})
    with pytest.raises(TypeError, match="metric 'a' holds a str"):
        reduce_metrics({"a": ["x"]})


def test_micro_batches_add_up():
    merged: dict[str, list[float]] = {}
    for part in (
        {"loss@sum": 0.25, "ratio@max": 1.5},
        {"loss@sum": 0.5},
        {"loss@sum": 0.25, "ratio@max": 1.1},
    ):
        append_to_dict(merged, part)
    assert reduce_metrics(merged) == {"loss@sum": 1.0, "ratio@max": 1.5}


def test_reduce_metrics_list_takes_metrics_that_only_some_have():
    assert reduce_metrics_list([{"a": 1, "b@max": 1}, {"a": 3}, {"b@max": 5}]) == {
        "a": 2,
        "b@max": 5,
    }
    assert reduce_metrics_list([]) == {}


def test_aggregate_metrics():
    history = [{"steps": 1, "score": 0.5}, {"steps": 2, "score": np.float32(1.0)}, {"steps": 3}]
    for mode, expected in {"sum": 6, "mean": 2, "min": 1, "max": 3, "last": 3, "first": 1}.items():
        assert aggregate_metrics(history, {"steps": mode}) == {"steps": expected, "score": 0.75}
    with pytest.raises(ValueError, match="'steps' has the unknown mode 'median'"):
        aggregate_metrics(history, {"steps": "median"})


def test_tensors_of_several_reports_become_floats_in_one_go():
    weight = torch.tensor(0.1, requires_grad=True)
    count = 2**24 + 1  # float32 would lose the last one
    first = {"a": torch.tensor(count), "b": 3, "c": weight, "d": torch.tensor(True)}
    lists = {"lists": [1, 2], "x": torch.tensor(torch.nan), "y": torch.ones(2)}
    with TensorWatch() as watch:
        found = bring_to_host([first, lists, {}])
    assert found[0] == {"a": count, "b": 3.0, "c": weight.item(), "d": 1.0}
    assert list(found[0]) == list(first) and all(
        type(value) is float for value in found[0].values()
    )
    assert np.isnan(found[1]["x"]) and found[1]["lists"] == [1, 2] and found[1]["y"] is lists["y"]
    assert found[2] == {} and watch.operations.count("cat") == 1
    assert first["c"] is weight, "what was given is not changed"


def test_extremes_and_means_of_nothing_do_not_exist():
    metrics = {"a@sum": torch.tensor(0.0), "b@max": torch.tensor(-torch.inf)}
    metrics |= {"c@mean": torch.tensor(torch.nan), "d@min": torch.tensor(torch.inf)}
    assert report(metrics, torch.zeros(2, 3)) == {"a@sum": 0.0}
    assert set(report(metrics, torch.tensor([0, 1]))) == set(metrics)
    assert report({"loss": torch.ones((), requires_grad=True)}, torch.ones(1)) == {"loss": 1.0}
