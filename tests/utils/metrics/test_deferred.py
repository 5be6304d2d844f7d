import torch
from log_probs_reference import TensorWatch

from roll.ops.scalars import all_to_floats, to_floats
from roll.pipeline.loss_io import report
from roll.utils.metrics import deferred
from roll.utils.metrics.deferred import DeferredMetrics, read_together


def test_numbers_are_read_when_they_are_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(
        deferred, "all_to_floats", lambda groups: calls.append(len(groups)) or all_to_floats(groups)
    )
    metrics = DeferredMetrics(
        {"a@sum": torch.tensor(2.0), "b@max": torch.tensor(3), "c": 4.5}, torch.tensor([1, 0])
    )
    assert not calls
    assert (
        metrics["a@sum"] == 2.0
        and dict(metrics) == {"a@sum": 2.0, "b@max": 3.0, "c": 4.5}
        and len(metrics) == 3
    )
    assert "valid" not in metrics and repr(metrics) == repr(dict(metrics)) and sum(calls) == 1


def test_what_a_subclass_adds_is_kept():
    metrics = DeferredMetrics({"a@sum": torch.tensor(2.0)}, torch.tensor(1))
    metrics["mine"] = 1.0
    metrics.update({"yours": 2.0})
    del metrics["a@sum"]
    read_together([metrics])
    assert metrics == {"mine": 1.0, "yours": 2.0}


def test_extremes_and_means_of_nothing_are_not_there():
    scalars = {
        "a@sum": torch.tensor(0.0),
        "b@max": torch.tensor(-torch.inf),
        "c@mean": torch.tensor(torch.nan),
    }
    assert dict(DeferredMetrics(scalars, torch.zeros(2, 3))) == {"a@sum": 0.0}
    assert dict(DeferredMetrics({"b@min": torch.tensor(1.0)}, torch.tensor(2))) == {"b@min": 1.0}


def test_several_are_read_in_one_transfer(monkeypatch):
    calls = []
    monkeypatch.setattr(
        deferred, "all_to_floats", lambda groups: calls.append(len(groups)) or all_to_floats(groups)
    )
    vectors = [torch.arange(3.0, dtype=torch.float64) + 10 * number for number in range(3)]
    reports = [
        DeferredMetrics(
            {"a": vector[2], "b": vector[0], "n": torch.tensor(7)}, torch.tensor(number)
        )
        for number, vector in enumerate(vectors)
    ]
    read_together([*reports, {"plain": 1.0}])
    assert [dict(metrics) for metrics in reports] == [
        {"a": 2.0 + 10 * number, "b": 10.0 * number, "n": 7.0} for number in range(3)
    ]
    read_together(reports)
    assert calls[0] == 3 and not any(calls[1:])


def test_no_graph_is_kept():
    weight = torch.ones(3, requires_grad=True)
    metrics = DeferredMetrics({"loss": (weight * 2).sum()}, torch.tensor(1))
    assert not any(
        value.requires_grad
        for value in metrics._waiting.values()
        if isinstance(value, torch.Tensor)
    )


def test_entries_of_vectors_come_as_they_lie_there():
    vectors = [torch.arange(4.0), torch.arange(4.0) + 4]
    with TensorWatch() as watch:
        found = to_floats(
            {f"{i}{j}": vectors[i][j] for i in (1, 0) for j in (3, 0)} | {"x": torch.tensor(9.0)}
        )
    assert found == {"13": 7.0, "10": 4.0, "03": 3.0, "00": 0.0, "x": 9.0}
    assert watch.operations.count("cat") == 1


def test_on_a_cpu_there_is_nothing_to_wait_for():
    metrics = report(
        {"a@sum": torch.tensor(2.0), "b@max": torch.tensor(-torch.inf)}, torch.zeros(3)
    )
    assert type(metrics) is dict and metrics == {"a@sum": 2.0}
