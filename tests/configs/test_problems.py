"""The words in which problems are told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs import DataArguments, ModelArguments, TrainingArguments
from roll.configs.option_groups import TrainInferCorrectionConfig
from roll.configs.problems import Problem, describe, did_you_mean, nearest_multiples, show, wrong
from roll.exceptions import ConfigError, RollError
from roll.pipeline.rlvr.rlvr_config import RLVRConfig


def message_of(build) -> str:
    with pytest.raises(ConfigError) as caught:
        build()
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"max_steps": "many"},
            'max_steps: found "many" (str), expected a whole number; the default is -1',
        ),
        (
            {"max_steps": 1.5},
            "max_steps: found 1.5 (float), expected a whole number; the default is -1",
        ),
        (
            {"max_steps": True},
            "max_steps: found True (bool), expected a whole number; the default is -1",
        ),
        (
            {"learning_rate": True},
            "learning_rate: found True (bool), expected a number; the default is 5e-05",
        ),
        (
            {"learning_rate": "fast"},
            'learning_rate: found "fast" (str), expected a number; the default is 5e-05',
        ),
        (
            {"learning_rate": float("nan")},
            "learning_rate: found nan (float), expected a finite number",
        ),
        (
            {"learning_rate": -1},
            "learning_rate: found -1 (int), expected a number of at least 0; the default is 5e-05",
        ),
        ({"learning_rate": None}, "learning_rate: found null, expected a number"),
        (
            {"adam_beta1": 1},
            "adam_beta1: found 1 (int), expected a number below 1; the default is 0.9",
        ),
        (
            {"num_train_epochs": 0},
            "num_train_epochs: found 0 (int), expected a number greater than 0",
        ),
        (
            {"fp16": "maybe"},
            'fp16: found "maybe" (str), expected true or false; the default is False',
        ),
        ({"output_dir": 3}, "output_dir: found 3 (int), expected text"),
        ({"lr_scheduler_type": "cosin"}, 'inverse_sqrt; did you mean "cosine"?'),
        (
            {"warmup_stps": 3},
            'TrainingArguments: warmup_stps: unknown key; did you mean "warmup_steps"?',
        ),
        ({"zzz": 3}, "zzz: unknown key; TrainingArguments has no key like it"),
    ],
)
def test_each_kind_of_wrong_value(values, expected):
    message = message_of(lambda: TrainingArguments(**values))
    assert expected in message
    assert "pydantic" not in message and "Input should" not in message


def test_alternatives_of_a_union_are_one_problem():
    assert message_of(lambda: DataArguments(file_name=3)).endswith(
        "file_name: found 3 (int), expected text or a list"
    )
    message = message_of(lambda: DataArguments(file_name=["a", 4]))
    assert "file_name.1: found 4 (int), expected text" in message


def test_keys_are_dotted_through_mappings_and_lists():
    assert "domain_interleave_probs.math: found -1 (int)" in message_of(
        lambda: DataArguments(domain_interleave_probs={"math": -1})
    )
    assert (
        'filters.1.agg_type: found "tok" (str), expected one of token, segment, geometric, sequence'
        in message_of(lambda: TrainInferCorrectionConfig(filters=[{}, {"agg_type": "tok"}]))
    )
    message = message_of(
        lambda: RLVRConfig(
            sequence_length=2048, rewards={"math": {"worker_cls": "a.B", "wold_size": 2}}
        )
    )
    assert message == 'RLVRConfig: rewards.math.wold_size: unknown key; did you mean "world_size"?'


def test_several_problems_are_told_together():
    message = message_of(lambda: TrainingArguments(learning_rate=-1, seed="x", fp1=True))
    assert message.startswith("TrainingArguments: 3 problems\n  learning_rate: ")
    assert len(message.splitlines()) == 4


def test_keys_without_effect_and_unsupported_keys_say_so():
    assert "dataset_dir: has no effect, in ROLL or here; remove it" in message_of(
        lambda: DataArguments(dataset_dir="x")
    )
    assert "vision_dp: not supported: a vision or audio model" in message_of(
        lambda: ModelArguments(vision_dp=True)
    )


def test_config_errors_are_value_errors_and_ours():
    with pytest.raises(ValueError):
        TrainingArguments(seed="x")
    with pytest.raises(RollError):
        TrainingArguments(seed="x")


def test_showing_values():
    assert show(None) == "null"
    assert show("a") == '"a" (str)'
    assert show({"a": 1}) == "{'a': 1} (mapping)"
    assert show("x" * 100) == '"' + "x" * 56 + "... (str)"


def test_problem_sentences():
    assert str(wrong("a.b", 3, "text")) == "a.b: found 3 (int), expected text"
    assert (
        str(wrong("a", 3, "text", "quote it").under("top"))
        == "top.a: found 3 (int), expected text; quote it"
    )
    assert str(Problem("", "bad").under("top")) == "top: bad"
    assert describe([Problem("a", "x"), Problem("b", "y")]) == "2 problems\n  a: x\n  b: y"
    assert did_you_mean("bta", ["beta", "gamma"]) == 'did you mean "beta"?'
    assert did_you_mean("zzz", ["beta", "gamma"]) == ""


def test_nearest_multiples_by_hand():
    assert nearest_multiples(100, 16) == (96, 112)
    assert nearest_multiples(5, 16) == (16, 32)  # nothing below is positive


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10_000), st.integers(2, 500))
def test_nearest_multiples_divide_and_enclose(value, divisor):
    low, high = nearest_multiples(value, divisor)
    assert low % divisor == 0 and high == low + divisor and low > 0
    assert value < divisor or low <= value < high
