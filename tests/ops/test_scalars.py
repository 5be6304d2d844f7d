import math

import pytest
import torch
from log_probs_reference import TensorWatch

from roll.ops.scalars import NamedScalars, all_to_floats, to_floats


def test_tensors_and_numbers_become_floats_in_order() -> None:
    values = to_floats(
        {
            "a": torch.tensor(2),
            "b": 3,
            "c": torch.tensor(0.1, requires_grad=True),
            "d": torch.tensor(True),
        }
    )
    assert list(values) == ["a", "b", "c", "d"]
    assert values == {"a": 2.0, "b": 3.0, "c": torch.tensor(0.1).item(), "d": 1.0}
    assert all(type(value) is float for value in values.values())


def test_large_counts_and_non_finite_values_survive() -> None:
    values = to_floats({"count": torch.tensor(2**24 + 1), "nan": torch.tensor(math.nan)})
    assert values["count"] == 2**24 + 1 and math.isnan(values["nan"])
    assert to_floats({}) == {}
    assert to_floats({"x": 1}) == {"x": 1.0}


def test_entries_of_one_vector_in_any_order() -> None:
    vector = torch.tensor([9.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert to_floats({"c": vector[3], "x": 7, "a": vector[1]}) == {"c": 3.0, "x": 7.0, "a": 1.0}
    assert to_floats({"one": vector[2]}) == {"one": 2.0}
    inner = torch.arange(10.0)[4:8].detach()  # a vector in the middle of its memory
    assert to_floats({"b": inner[1], "a": inner[0]}) == {"b": 5.0, "a": 4.0}
    counts = torch.tensor([4, 5])
    assert type(to_floats({"n": counts[0], "m": counts[1]})["m"]) is float


def of_vector() -> NamedScalars:
    return NamedScalars.of_vector(
        torch.tensor([4.0, 5.0, 6.0], dtype=torch.float64), {"a": 2, "b": 0}
    )


def test_named_scalars_are_a_dict() -> None:
    scalars = of_vector()
    assert (
        isinstance(scalars["a"], torch.Tensor)
        and scalars["a"].item() == 6
        and list(scalars) == ["a", "b"]
    )
    assert scalars.get("c") is None and "c" not in scalars and len(scalars) == 2
    with pytest.raises(KeyError, match="c"):
        scalars["c"]
    scalars["a"] = 1.0  # no longer an entry
    scalars["c"] = torch.tensor(3)
    assert to_floats(scalars) == {"b": 4.0, "a": 1.0, "c": 3.0} and len(scalars) == 3
    del scalars["b"], scalars["c"]
    assert dict(scalars) == {"a": 1.0} and repr(scalars) == "{'a': 1.0}"
    with pytest.raises(KeyError, match="b"):
        del scalars["b"]


def test_copies_of_named_scalars_do_not_change_each_other() -> None:
    first = of_vector()
    copy, both = NamedScalars(first), first | {"b": 9.0, "d": 8.0}
    del copy["a"]
    copy["x"] = 1.0
    assert to_floats(first) == {"a": 6.0, "b": 4.0}
    assert to_floats(copy) == {"b": 4.0, "x": 1.0}
    assert to_floats(both) == {"a": 6.0, "b": 9.0, "d": 8.0}
    assert to_floats(both.renamed({"a": "A", "d": "D", "nothing": "N"})) == {"A": 6.0, "D": 8.0}


def test_entries_by_name_and_as_tensors_come_in_one_transfer() -> None:
    scalars = of_vector()
    scalars["number"] = scalars["b"]
    with TensorWatch() as watch:
        assert all_to_floats([scalars, {"x": 1}]) == [
            {"a": 6.0, "b": 4.0, "number": 4.0},
            {"x": 1.0},
        ]
    assert "cat" not in watch.operations and "stack" not in watch.operations


def test_a_copy_without_graphs() -> None:
    weight = torch.ones((), requires_grad=True)
    scalars = of_vector() | {"loss": weight * 2, "n": 3}
    detached = scalars.detach()
    assert scalars["loss"].requires_grad and not detached["loss"].requires_grad
    assert to_floats(detached) == {"a": 6.0, "b": 4.0, "loss": 2.0, "n": 3.0}
