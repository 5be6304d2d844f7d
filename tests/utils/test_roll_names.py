"""ROLL's other names in functionals: padded sequences, dicts, sequences and objects."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll.utils.functionals import (
    adjust_sequence_length,
    concatenate_input_and_output,
    divide_by_chunk_size,
    filter_func_args,
    gather_unpadded_input_ids,
    get_eos_mask,
    get_pad_mask,
    pad_to_length,
    separate_prompt_response,
    traverse_obj,
    union_two_dict,
)


def test_eos_mask_includes_the_first_end():
    ids = torch.tensor([[5, 6, 1, 7, 1], [5, 6, 7, 8, 9]])
    assert get_eos_mask(ids, eos_token=1).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert get_eos_mask(ids, eos_token=1, dtype=torch.bool).dtype == torch.bool


def test_pad_mask():
    ids = torch.tensor([[5, 6, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert get_pad_mask(ids, pad_token=0, eos_token=1).tolist() == [
        [1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert get_pad_mask(ids, pad_token=0, eos_token=0).tolist() == [
        [1, 1, 1, 1, 0],
        [1, 0, 0, 0, 0],
    ]
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        get_pad_mask(torch.tensor([[5, 0], [0, 5]]), pad_token=0, eos_token=1)


def test_pad_to_length():
    x = torch.tensor([[1, 2], [3, 4]])
    assert pad_to_length(x, 3, -1).tolist() == [[1, 2, -1], [3, 4, -1]]
    assert pad_to_length(x, 3, 0, dim=0).tolist() == [[1, 2], [3, 4], [0, 0]]
    assert pad_to_length(x, 1, 0).tolist() == [[1], [3]]
    assert pad_to_length(x, 3, 0).dtype == x.dtype
    assert pad_to_length(torch.ones(2, dtype=torch.bool), 3, False).tolist() == [True, True, False]


def test_adjust_sequence_length():
    assert adjust_sequence_length(torch.ones(2, 4), 6, 4).shape == (2, 6)
    assert adjust_sequence_length(torch.ones(2, 3), 6, 4).shape == (
        2,
        5,
    )  # next-token columns stay one shorter
    assert adjust_sequence_length(torch.ones(2, 3, 4), 2, 4).shape == (2, 3, 2)
    assert adjust_sequence_length(torch.ones(2, 4, 7), 5, 4).shape == (2, 5, 7)
    assert adjust_sequence_length(torch.ones(4), 6, 4).shape == (4,)
    assert adjust_sequence_length(torch.ones(4, 9), 6, 4).shape == (4, 9)


def test_prompts_and_responses():
    ids = concatenate_input_and_output(
        torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5], [6], [7], [8]]), 2
    )
    assert ids.tolist() == [[1, 2, 5], [1, 2, 6], [3, 4, 7], [3, 4, 8]]
    attention, response = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 0]])
    assert gather_unpadded_input_ids(torch.tensor([[7, 8, 9]]), attention) == [[7, 8]]
    prompt, answer = separate_prompt_response(
        torch.tensor([[7, 8, 9]]), attention, response, pad_id=0
    )
    assert prompt.tolist() == [[7, 0, 0]] and answer.tolist() == [[0, 8, 0]]


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
