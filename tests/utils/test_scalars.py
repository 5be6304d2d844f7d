import math

import torch

from roll.utils.scalars import to_floats


def test_tensors_and_numbers_become_floats_in_order() -> None:
    values = to_floats(
        {"a": torch.tensor(2), "b": 3, "c": torch.tensor(0.1, requires_grad=True), "d": torch.tensor(True)}
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
