"""Properties that hold for every config class."""

import copy
import os
import pickle

import pytest
from pydantic import ValidationError

from roll.configs.base_config import PPOConfig
from roll.configs.config_model import ConfigModel, NoEffect, is_without_effect, plain_values
from roll.configs.worker_config import WorkerConfig
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.rlvr.rlvr_config import RLVRConfig

PIPELINES = [DPOConfig, RLVRConfig, AgenticConfig]


def all_classes(root: type[ConfigModel] = ConfigModel) -> list[type[ConfigModel]]:
    found = []
    for cls in root.__subclasses__():
        if cls.__module__.startswith("roll."):
            found += [cls, *all_classes(cls)]
    return found


@pytest.mark.parametrize(
    "cls", all_classes(), ids=lambda cls: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
)
def test_every_field_has_one_sentence_of_description(cls):
    for name, field in cls.model_fields.items():
        assert field.description, f"{cls.__name__}.{name} has no description"
        assert field.description.endswith((".", ")")) and "\n" not in field.description, (
            name,
            field.description,
        )


def test_fields_without_effect_say_why():
    marked = [
        field
        for cls in all_classes()
        for field in cls.model_fields.values()
        if is_without_effect(field)
    ]
    assert len(marked) > 30
    assert all(
        item.why for field in marked for item in field.metadata if isinstance(item, NoEffect)
    )


@pytest.mark.parametrize("cls", PIPELINES)
def test_a_config_cannot_be_changed(cls):
    config = cls(sequence_length=2048)
    with pytest.raises(ValidationError, match=r"frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match=r"frozen"):
        config.actor_train.training_args.learning_rate = 1.0


@pytest.mark.parametrize("cls", PIPELINES)
def test_pickle_and_deepcopy_give_equal_configs(cls):
    config = cls(
        sequence_length=2048, actor_train=WorkerConfig(strategy_args={"strategy_name": "hf_train"})
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert type(pickle.loads(pickle.dumps(config)).actor_train) is WorkerConfig


@pytest.mark.parametrize("cls", PIPELINES)
def test_plain_values_build_an_equal_config(cls):
    config = cls(sequence_length=2048, seed=3, output_dir="/somewhere")
    assert cls(**config.to_dict()) == config
    assert cls(**cls(**config.to_dict()).to_dict()) == config


def test_plain_values_leave_out_what_has_no_effect_unless_it_was_changed():
    values = plain_values(PPOConfig(sequence_length=8, l2=0.5))
    assert values["l2"] == 0.5
    assert "use_reward_scaling" not in values and "offload_nccl" not in values["actor_train"]


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
