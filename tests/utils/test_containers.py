"""Helpers on dicts, sequences and objects."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll.utils.functionals import (
    divide_by_chunk_size,
    filter_func_args,
    traverse_obj,
    union_two_dict,
)


def test_union_two_dict():
    first = {"a": 1}
    assert union_two_dict(first, {"a": 1, "b": 2}) == {"a": 1, "b": 2} and first == {"a": 1}
    with pytest.raises(ValueError, match="disagree on 'a': 1 and 2"):
        union_two_dict(first, {"a": 2})


def test_divide_by_chunk_size():
    assert [part.tolist() for part in divide_by_chunk_size(np.arange(5), [2, 3])] == [
        [0, 1],
        [2, 3, 4],
    ]
    assert [part.tolist() for part in divide_by_chunk_size(torch.arange(3), [1, 2])] == [
        [0],
        [1, 2],
    ]
    for sizes in ([2, 2], [5, 0], [6, -1]):
        with pytest.raises(ValueError, match="5 rows"):
            divide_by_chunk_size(np.arange(5), sizes)


def test_traverse_obj_visits_everything_once_on_a_path():
    x = torch.ones(1)
    value = {"a": [x, (x,)], "b": SimpleNamespace(c=x)}
    value["self"] = value
    found = []

    def visitor(item, path):
        if isinstance(item, torch.Tensor):
            found.append(path)
            return True
        return False

    traverse_obj(value, visitor)
    assert found == [("a", 0), ("a", 1, 0), ("b", "attr:c")]


def test_filter_func_args():
    assert filter_func_args(lambda a, *, b: None, {"a": 1, "b": 2, "c": 3}) == {"a": 1, "b": 2}
