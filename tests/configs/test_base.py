"""What holds for every config class, and the words in which problems are told."""

import copy
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.configs import DataArguments, GeneratingArguments, ModelArguments, TrainingArguments
from roll.configs.base import (
    ConfigModel,
    Problem,
    Unread,
    did_you_mean,
    nearest_multiples,
    plain_values,
    show,
    wrong,
)
from roll.configs.ppo_config import PPOConfig, TrainInferCorrectionConfig
from roll.configs.roll_keys import WITHOUT_EFFECT, NotBuilt, keys_without_effect
from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError, RollError
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.rlvr.rlvr_config import RewardConfig, RLVRConfig
from roll.pipeline.sft.sft_config import SFTConfig

PIPELINES = [DPOConfig, RLVRConfig, AgenticConfig, SFTConfig]


def all_classes(root: type[ConfigModel] = ConfigModel) -> list[type[ConfigModel]]:
    found = []
    for cls in root.__subclasses__():
        if cls.__module__.startswith("roll."):
            found += [cls, *all_classes(cls)]
    return found


def message_of(build) -> str:
    with pytest.raises(ConfigError) as caught:
        build()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RollError)
    return str(caught.value)


# classes


def test_every_field_has_one_sentence_of_description():
    for cls in all_classes():
        for name, field in cls.model_fields.items():
            text = field.description or ""
            assert text.endswith((".", ")")) and "\n" not in text, (cls, name)


@pytest.mark.parametrize("cls", PIPELINES)
def test_configs_are_frozen_and_can_be_copied_pickled_and_written_down(cls):
    role = WorkerConfig(strategy_args={"strategy_name": "hf_train"})
    config = cls(sequence_length=2048, seed=3, output_dir="/somewhere", actor_train=role)
    with pytest.raises(ValidationError, match=r"frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match=r"frozen"):
        config.actor_train.training_args.learning_rate = 1.0
    again = pickle.loads(pickle.dumps(config))
    assert again == config and type(again.actor_train) is WorkerConfig
    assert copy.deepcopy(config) == config
    assert cls(**config.to_dict()) == config
    assert cls(**cls(**config.to_dict()).to_dict()) == config


@pytest.mark.parametrize("cls", PIPELINES)
def test_making_a_config_touches_neither_environment_nor_disk_nor_arguments(
    cls, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    roles = {
        "actor_train": {"system_envs": {"A": "1"}},
        "system_envs": {"B": "2"},
        "checkpoint_config": {"type": "x"},
    }
    given = copy.deepcopy(roles)
    config = cls(sequence_length=2048, track_with="tensorboard", rpc_timeout=5, **roles)
    assert config.actor_train.system_envs == {"A": "1", "B": "2"}
    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []
    assert roles == given


def test_settle_knows_the_fields():
    with pytest.raises(AssertionError, match=r"has no fields"):
        WorkerConfig().settle(no_such_field=1)


# keys without effect


def test_the_table_names_classes_that_exist_and_says_why():
    names = {cls.__name__ for cls in all_classes()}
    assert WITHOUT_EFFECT.keys() <= names
    reasons = [reason for keys in WITHOUT_EFFECT.values() for reason in keys.values()]
    assert all(isinstance(reason, NotBuilt) or reason.strip() for reason in reasons)


def test_code_that_gives_a_key_without_effect_works_and_the_key_is_gone():
    config = PPOConfig(sequence_length=8, l2=0.5, actor_train={"offload_nccl": True})
    assert config == PPOConfig(sequence_length=8)
    assert "l2" not in plain_values(config)
    assert DataArguments(dataset_dir="x") == DataArguments()
    assert Unread(router_name="x", anything={}) == Unread()


def test_a_class_has_the_keys_of_its_bases_unless_a_field_of_it_works():
    assert "tag_included" in keys_without_effect(WorkerConfig)
    assert "tag_included" not in keys_without_effect(RewardConfig)
    assert "offload_nccl" in keys_without_effect(RewardConfig)
    assert DPOConfig(sequence_length=8, val_sequence_length=4).val_sequence_length == 8


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: GeneratingArguments(num_beams=3),
            "num_beams: found 3 (int); not built yet: beam search; remove it or set it to 1",
        ),
        (
            lambda: WorkerConfig(model_args={"ulysses_size": 2}),
            "model_args.ulysses_size: found 2 (int); not built yet: sequence parallelism",
        ),
        (
            lambda: ModelArguments(moe_aux_loss_coef=0.1),
            "not built yet: the router's loss; remove it or set it to null",
        ),
        (
            lambda: ModelArguments(vision_dp=True),
            "vision_dp: not supported: a vision or audio model",
        ),
    ],
)
def test_what_is_not_built_is_refused_unless_it_is_off(build, message):
    assert message in message_of(build)
    assert GeneratingArguments(num_beams=1) == GeneratingArguments()


# words


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"max_steps": "many"},
            'max_steps: found "many" (str), expected a valid integer; the default is -1',
        ),
        ({"max_steps": 1.5}, "max_steps: found 1.5 (float), expected a valid integer"),
        (
            {"max_steps": True},
            "max_steps: found True (bool), expected a valid integer; the default is -1",
        ),
        (
            {"learning_rate": True},
            "learning_rate: found True (bool), expected a valid number; the default is 5e-05",
        ),
        ({"learning_rate": "fast"}, 'learning_rate: found "fast" (str), expected a valid number'),
        ({"learning_rate": float("nan")}, "found nan (float), expected a finite number"),
        (
            {"learning_rate": -1},
            "learning_rate: found -1 (int), expected greater than or equal to 0; the default is",
        ),
        ({"learning_rate": None}, "learning_rate: found null, expected a valid number"),
        ({"adam_beta1": 1}, "adam_beta1: found 1 (int), expected less than 1; the default is 0.9"),
        ({"num_train_epochs": 0}, "num_train_epochs: found 0 (int), expected greater than 0"),
        ({"fp16": "maybe"}, 'fp16: found "maybe" (str), expected true or false'),
        ({"output_dir": 3}, "output_dir: found 3 (int), expected a valid string"),
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


def test_keys_are_dotted_through_mappings_lists_and_unions():
    cases = {
        "file_name: found 3 (int), expected a valid string or a valid list": lambda: DataArguments(
            file_name=3
        ),
        "file_name.1: found 4 (int), expected a valid string": lambda: DataArguments(
            file_name=["a", 4]
        ),
        "domain_interleave_probs.math: found -1 (int)": lambda: DataArguments(
            domain_interleave_probs={"math": -1}
        ),
        'filters.1.agg_type: found "tok" (str), expected one of token, segment, geometric, sequence': (
            lambda: TrainInferCorrectionConfig(filters=[{}, {"agg_type": "tok"}])
        ),
        'WorkerConfig: use_sequence_pack: unknown key; did you mean "use_sequence_packing"?': (
            lambda: WorkerConfig(use_sequence_pack=True)
        ),
        "(mapping); not built yet: replay of expert routing; remove it or set it to": lambda: (
            WorkerConfig(router_replay={"mode": "R3"})
        ),
        'RLVRConfig: rewards.math.wold_size: unknown key; did you mean "world_size"?': (
            lambda: RLVRConfig(sequence_length=9, rewards={"math": {"wold_size": 2}})
        ),
    }
    for expected, build in cases.items():
        assert expected in message_of(build)


def test_several_problems_are_told_together():
    message = message_of(lambda: TrainingArguments(learning_rate=-1, seed="x", fp1=True))
    first, *lines = message.splitlines()
    assert first == "TrainingArguments: 3 problems"
    assert sorted(line.split(":")[0] for line in lines) == ["  fp1", "  learning_rate", "  seed"]
    message = message_of(lambda: GeneratingArguments(num_beams=2, temperature=-1))
    assert "2 problems" in message and "num_beams" in message and "temperature" in message


def test_sentences_by_hand():
    assert show(None) == "null"
    assert show("a") == '"a" (str)'
    assert show({"a": 1}) == "{'a': 1} (mapping)"
    assert show("x" * 100) == '"' + "x" * 56 + "... (str)"
    assert str(wrong("a.b", 3, "text")) == "a.b: found 3 (int), expected text"
    problem = wrong("a", 3, "text", "quote it").under("top")
    assert str(problem) == "top.a: found 3 (int), expected text; quote it"
    assert str(Problem("", "bad").under("top")) == "top: bad"
    assert did_you_mean("bta", ["beta", "gamma"]) == 'did you mean "beta"?'
    assert did_you_mean("zzz", ["beta", "gamma"]) == ""
    assert nearest_multiples(100, 16) == (96, 112)
    assert nearest_multiples(5, 16) == (16, 32)  # nothing below is positive


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10_000), st.integers(2, 500))
def test_nearest_multiples_divide_and_enclose(value, divisor):
    low, high = nearest_multiples(value, divisor)
    assert low % divisor == 0 and high == low + divisor and low > 0
    assert value < divisor or low <= value < high
