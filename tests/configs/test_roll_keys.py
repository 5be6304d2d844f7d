"""Parts of ROLL that do not exist here are named, each once."""

import json

import pytest

from roll.configs.roll_keys import unsupported_parts
from roll.exceptions import ConfigError
from roll.pipeline.registry import load_config

VISION = "a vision or audio model; only text models are trained"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "qwen3-vl",
        "OpenGVLab/InternVL2-8B",
        "llava-hf/llava-1.5-7b",
        "Qwen3_VL_4B",
        "Qwen2.5-Omni-7B",
    ],
)
def test_vision_models_are_known_by_name(name):
    assert unsupported_parts({"pretrain": name}) == [
        ("pretrain", f'not supported: "{name}" is {VISION}')
    ]


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-7B", "/data/vl/qwen3-8b", "evl-7b", "/models/VLA/plain", "some/vlad-1b"]
)
def test_text_models_are_left_alone(name):
    assert (
        unsupported_parts(
            {"pretrain": name, "actor_train": {"model_args": {"model_name_or_path": name}}}
        )
        == []
    )


def test_a_local_folder_is_judged_by_its_config(tmp_path):
    text, vision = tmp_path / "my-VL-text", tmp_path / "plain"
    for folder, config in ((text, {"model_type": "qwen2"}), (vision, {"vision_config": {}})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    assert unsupported_parts({"pretrain": str(text)}) == []
    assert [key for key, _ in unsupported_parts({"pretrain": str(vision)})] == ["pretrain"]


def test_every_model_is_named_once_and_templates_only_without_models():
    values = {
        "pretrain": "a/B-VL-3B",
        "reward_pretrain": "a/B-VL-3B",
        "reference": {
            "model_args": {"model_name_or_path": "a/B-VL-3B"},
            "data_args": {"template": "qwen2-vl"},
        },
    }
    assert [key for key, _ in unsupported_parts(values)] == ["pretrain"]
    assert unsupported_parts({"reference": values["reference"] | {"model_args": {}}}) == [
        ("reference.data_args.template", f'not supported: template "qwen2-vl" is for {VISION}')
    ]
    manager = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"
    assert [
        key for key, _ in unsupported_parts({"custom_envs": {"S": {"env_manager_cls": manager}}})
    ] == ["custom_envs.S.env_manager_cls"]


def test_other_pipelines():
    values = {"student_train": {}, "teacher": {}, "sft_train": {}, "student": {}}
    assert dict(unsupported_parts(values)) == {
        "student_train": "not supported: on-policy distillation",
        "teacher": "not supported: on-policy distillation",
        "sft_train": "not supported: ROLL's supervised fine-tuning is `pipeline: sft` here; write that, rename "
        "sft_train to actor_train, and give max_steps instead of num_train_epochs",
        "student": "not supported: distillation",
    }


def test_rolls_supervised_file_loads_once_it_is_changed_as_the_message_says(tmp_path):
    path = tmp_path / "sft.yaml"
    role = "  strategy_args: {strategy_name: hf_train}\n  data_args: {file_name: a.json"
    path.write_text(
        f"sequence_length: 64\nprompt_key: instruction\nquery_key: input\nresponse_key: output\nsft_train:\n{role}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "`pipeline: sft`" in message and "rename sft_train to actor_train" in message
    assert "prompt_key: not supported: name the column in actor_train.data_args.prompt" in message
    assert (
        "response_key: not supported: name the column in actor_train.data_args.response" in message
    )
    assert "query_key: not supported: only one column is the prompt" in message
    path.write_text(
        "pipeline: sft\npretrain: x\nsequence_length: 64\nmax_steps: 10\nactor_train:\n"
        f"{role}, prompt: instruction, response: output}}\n"
    )
    config = load_config(path).config
    assert config.pipeline == "sft" and not config.missing_for_training()


def test_classes_that_do_not_exist_here_are_named():
    path = "roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker"
    found = unsupported_parts(
        {"rewards": {"a": {"worker_cls": path}, "b": {"worker_cls": "my.own.Worker"}}}
    )
    assert found == [
        (
            "rewards.a.worker_cls",
            "not supported: DetectionRewardWorker, which judges what a vision model sees",
        )
    ]
