"""DataArguments: ROLL's defaults, exclusive columns, shares that add up."""

import pytest

from roll.configs import DataArguments
from roll.exceptions import ConfigError


def test_defaults_are_rolls():
    assert DataArguments().model_dump() == {
        "template": "native",
        "domain_interleave_probs": None,
        "preprocessing_num_workers": None,
        "cache_path": None,
        "file_name": None,
        "eval_file_name": None,
        "dataset_type": "json",
        "tag": "tag",
        "id": "id",
        "prompt": None,
        "response": "solution",
        "messages": None,
        "custom_data_kwargs_func": None,
    }


def test_prompt_and_messages_exclude_each_other():
    with pytest.raises(
        ConfigError,
        match=r'messages: found "m" .*, expected null, because prompt is "p"; keep one of them',
    ):
        DataArguments(prompt="p", messages="m")


def test_shares_add_up_to_one():
    assert DataArguments(domain_interleave_probs={"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.1, "e": 0.1})
    with pytest.raises(ConfigError, match=r"shares that add up to 1, not 0.9"):
        DataArguments(domain_interleave_probs={"a": 0.5, "b": 0.4})


def test_files_is_a_list_however_it_was_written():
    assert DataArguments().files == []
    assert DataArguments(file_name="a.jsonl").files == [
        "a.jsonl"
    ]  # not the letters of the name, as in ROLL's DPO
    assert DataArguments(file_name=["a.jsonl", "b.jsonl"]).files == ["a.jsonl", "b.jsonl"]
