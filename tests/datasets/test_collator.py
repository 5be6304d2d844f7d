"""Batches: widths, sides, the interleaving of pairs, and pairs that cannot be trained on."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import bpe_tokenizer

from roll.datasets.collator import (
    DataCollatorWithPaddingForDPO,
    DataCollatorWithPaddingForPaddedKeys,
    collate_fn_to_dict_list,
    pad_token_id,
)
from roll.datasets.preference import encode_preferences
from roll.datasets.tables import Table

TOKENIZER = bpe_tokenizer()
PAD_ID = 7


@pytest.fixture
def tokenizer():
    tokenizer = bpe_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD_ID)
    return tokenizer


def pair(chosen, rejected, chosen_prompt, reject_prompt):
    return {
        "chosen_ids": chosen,
        "reject_ids": np.array(rejected, dtype=np.int32),
        "chosen_prompt_len": chosen_prompt,
        "reject_prompt_len": reject_prompt,
    }


PAIRS = [pair([11, 12, 13, 14, 15], [11, 12, 16], 2, 1), pair([21, 22, 23], [21, 22, 24, 25], 2, 2)]


def test_pairs_are_interleaved_and_padded_to_the_longest_row(tokenizer):
    batch = DataCollatorWithPaddingForDPO(tokenizer)(PAIRS)
    assert set(batch) == {"input_ids", "attention_mask", "position_ids", "prompt_id_lens"}
    assert all(column.dtype == torch.int64 for column in batch.values())
    assert batch["input_ids"].tolist() == [
        [11, 12, 13, 14, 15],
        [11, 12, 16, PAD_ID, PAD_ID],
        [21, 22, 23, PAD_ID, PAD_ID],
        [21, 22, 24, 25, PAD_ID],
    ]
    assert batch["attention_mask"].tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
    ]
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 2, 2],
        [0, 1, 2, 2, 2],
        [0, 1, 2, 3, 3],
    ]
    assert batch["prompt_id_lens"].tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 5),
        ({"max_length": 9}, 5),
        ({"max_length": 9, "pad_to_max": True}, 9),
        ({"pad_to_multiple_of": 4}, 8),
        ({"pad_to_multiple_of": 5}, 5),
        ({"pad_to_multiple_of": 8, "max_length": 6}, 6),
    ],
)
def test_widths(tokenizer, options, width):
    batch = DataCollatorWithPaddingForDPO(tokenizer, **options)(PAIRS)
    assert (
        batch["input_ids"].shape
        == batch["attention_mask"].shape
        == batch["position_ids"].shape
        == (4, width)
    )
    assert batch["attention_mask"].sum(-1).tolist() == [5, 3, 3, 4]


def test_rolls_feature_names_are_taken(tokenizer):
    feature = {
        "chosen_ids": [1, 2, 3],
        "c_mask": [1] * 3,
        "reject_ids": [1, 4],
        "r_mask": [1] * 2,
        "prompt_ids_lens": 1,
    }
    batch = DataCollatorWithPaddingForDPO(tokenizer, 8)([feature])
    assert batch["prompt_id_lens"].tolist() == [1, 1]
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 4, PAD_ID]]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (
            [PAIRS[0], pair([1, 2, 3], [1, 2], 2, 2)],
            "pair 1 of the batch: the rejected side has no answer tokens (2 tokens, of which 2 are",
        ),
        ([pair([1, 2, 3], [1, 2], 0, 1)], "pair 0 of the batch: the chosen side has no prompt"),
        (
            [pair([1, 2, 3, 4, 5, 6], [1, 2], 1, 1)],
            "pair 0 of the batch: the chosen side has 6 tokens, more than max_length=5",
        ),
        ([], "at least one pair"),
    ],
)
def test_pairs_that_cannot_be_trained_on_are_named(tokenizer, pairs, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        DataCollatorWithPaddingForDPO(tokenizer, max_length=5)(pairs)


@pytest.mark.parametrize(
    ("collator", "options", "expected"),
    [
        (DataCollatorWithPaddingForDPO, {"pad_to_max": True}, "needs max_length"),
        (DataCollatorWithPaddingForDPO, {"return_tensors": "np"}, "return_tensors='np' is not"),
        (DataCollatorWithPaddingForDPO, {"max_length": 0}, "max_length=0 must be at least 1"),
        (DataCollatorWithPaddingForPaddedKeys, {"padding": False}, "padding=False is not known"),
    ],
)
def test_options_that_cannot_be(tokenizer, collator, options, expected):
    with pytest.raises(ValueError, match=expected):
        collator(tokenizer, **options)


def test_a_tokenizer_without_a_pad_token():
    tokenizer = bpe_tokenizer()
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert pad_token_id(tokenizer) == 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.text("ad10 ", min_size=1, max_size=6), st.text("bc4", min_size=1, max_size=9)),
        min_size=1,
        max_size=6,
    )
)
def test_no_token_is_lost_or_moved(rows):
    table = Table(
        "t",
        [{"prompt": "x" + prompt, "chosen": text, "rejected": text + "!"} for prompt, text in rows],
    )
    dataset = encode_preferences(table, TOKENIZER, max_length=64, template="base")
    batch = DataCollatorWithPaddingForDPO(TOKENIZER)(list(dataset))
    assert batch["input_ids"].shape == (2 * len(rows), max(dataset.lengths))
    for row, (ids, mask) in enumerate(
        zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ):
        expected = dataset[row // 2]["reject_ids" if row % 2 else "chosen_ids"]
        assert ids[mask.bool()].tolist() == expected.tolist()
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert (ids[~mask.bool()] == TOKENIZER.pad_token_id).all()


def test_prompts_are_padded_on_the_left(tokenizer):
    features = [
        {"input_ids": [1, 2, 3], "labels": [4, 5, 6], "tag": "math", "tests": [1, 2]},
        {"input_ids": [8], "labels": [9], "tag": "code", "tests": [3, 4]},
    ]
    batch = DataCollatorWithPaddingForPaddedKeys(tokenizer)(features)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [PAD_ID, PAD_ID, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, 6], [-100, -100, 9]]
    assert batch["tag"].tolist() == ["math", "code"]
    assert batch["tests"].tolist() == [[1, 2], [3, 4]] and batch["tests"].dtype == object


def test_given_masks_are_kept_and_widths_can_be_fixed(tokenizer):
    features = [
        {"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]},
        {"input_ids": [8], "attention_mask": [1]},
    ]
    collator = DataCollatorWithPaddingForPaddedKeys(tokenizer, padding="max_length", max_length=4)
    batch = collator(features)
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    right = DataCollatorWithPaddingForPaddedKeys(tokenizer, padding_side="right")(features)
    assert right["input_ids"].tolist() == [[1, 2, 3], [8, PAD_ID, PAD_ID]]


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (
            [{"input_ids": [1]}, {"input_ids": [1, 2, 3]}],
            "example 1 of the batch has 3 tokens, more than max_length=2",
        ),
        (
            [{"input_ids": [1, 2], "labels": [3]}],
            "example 0 of the batch: labels has 1 values and input_ids has 2 tokens",
        ),
        ([], "at least one example"),
    ],
)
def test_prompts_that_do_not_fit(tokenizer, features, expected):
    with pytest.raises(ValueError, match=expected):
        DataCollatorWithPaddingForPaddedKeys(tokenizer, max_length=2)(features)


def test_columns_of_examples():
    columns = collate_fn_to_dict_list(
        [
            {"x": torch.tensor([[1, 2]]), "y": [1, 2], "z": None},
            {"x": torch.tensor([[3, 4]]), "y": [3, 4], "z": "b"},
        ]
    )
    assert columns["x"].tolist() == [[1, 2], [3, 4]]
    assert columns["y"].shape == (2,) and columns["y"][1] == [3, 4]
    assert columns["z"].tolist() == [None, "b"]
    arrays = collate_fn_to_dict_list([{"a": np.array([1, 2])}, {"a": np.array([3, 4])}])["a"]
    assert arrays.shape == (2,) and arrays[1].tolist() == [3, 4]
    assert collate_fn_to_dict_list([]) == {}
    with pytest.raises(ValueError, match="example 1 of the batch has no 'y', which example 0 has"):
        collate_fn_to_dict_list([{"y": 1}, {}])
    with pytest.raises(ValueError, match="example 1 of the batch has y, which example 0 has not"):
        collate_fn_to_dict_list([{}, {"y": 1}])


def test_a_tokenizer_needs_no_more_than_a_pad_token():
    class Bare:
        pad_token_id = 7

    features = [
        {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor(1)},
        {"input_ids": [3], "labels": 0},
    ]
    batch = DataCollatorWithPaddingForPaddedKeys(Bare())(features)
    assert batch["input_ids"].tolist() == [[1, 2], [7, 3]]
    assert batch["labels"].tolist() == [1, 0]  # of a classifier: one a row
    pair = {"chosen_ids": [1, 2], "reject_ids": [1, 2, 3], "prompt_ids_lens": 1}
    batch = DataCollatorWithPaddingForDPO(Bare())([pair])
    assert batch["input_ids"].tolist() == [[1, 2, 7], [1, 2, 3]]
