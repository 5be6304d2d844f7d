"""Which pipeline a file is for."""

from pathlib import Path

import pytest

from roll.exceptions import ConfigError
from roll.pipeline.registry import detect_pipeline, load_config


@pytest.mark.parametrize(
    ("values", "pipeline"),
    [
        ({"pipeline": "dpo", "rewards": {}}, "dpo"),
        ({"pipeline_cls": "roll.pipeline.agentic.agentic_pipeline.AgenticPipeline"}, "agentic"),
        (
            {
                "pipeline_cls": "roll.pipeline.rlvr.rlvr_pipeline.RLVRPipeline",
                "rollout_batch_size": 3,
            },
            "rlvr",
        ),
        ({"pipeline_cls": "my.own.Pipeline", "custom_envs": {}}, "agentic"),
        ({"beta": 0.1}, "dpo"),
        ({"beta": 0.1, "val_batch_size": 4, "rollout_batch_size": 8}, "dpo"),
        ({"rewards": {}, "val_batch_size": 4}, "rlvr"),
        ({"chosen_key": "a", "validation": {}}, "dpo"),
        ({"num_return_sequences_in_group": 8, "validation": {}, "adv_estimator": "grpo"}, "rlvr"),
        ({"rewards": {}}, "rlvr"),
        ({"train_env_manager": {}}, "agentic"),
        ({"reward_normalization": {}, "pretrain": "x"}, "agentic"),
        ({"stop_at_exact_match": 0.5, "validation": {}}, "sft"),
    ],
)
def test_detection(values, pipeline):
    assert detect_pipeline(values) == pipeline


def test_no_sign_of_a_pipeline_lists_what_was_looked_for():
    with pytest.raises(ConfigError) as caught:
        detect_pipeline({"pretrain": "x", "adv_estimator": "grpo"})
    message = str(caught.value)
    assert message.startswith(
        "no key says which pipeline this is; add `pipeline:` with one of dpo, rlvr, agentic, sft (dpo: loss_type,"
    )
    assert (
        "agentic: custom_envs, train_env_manager" in message
        and "num_return_sequences_in_group" in message
    )


def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"a.yaml: the file is empty"):
        load_config(tmp_path / "a.yaml")


def test_signs_of_two_pipelines_are_both_shown():
    with pytest.raises(
        ConfigError, match=r"keys of several pipelines \(rlvr: rewards; agentic: custom_envs\)"
    ):
        detect_pipeline({"rewards": {}, "custom_envs": {}})


def test_an_unknown_pipeline_suggests_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r'pipeline: found "rlv" .*, expected one of dpo, rlvr, agentic, sft; did you mean "rlvr"',
    ):
        detect_pipeline({"pipeline": "rlv"})
    with pytest.raises(ConfigError, match=r"pipeline: found 3"):
        detect_pipeline({"pipeline": 3})
    with pytest.raises(ConfigError, match="pipeline: found "):
        detect_pipeline({"pipeline": {"name": "dpo"}})


def test_the_file_is_named_when_detection_fails(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text("seed: 1")
    with pytest.raises(ConfigError, match=rf"^{path}: no key says which pipeline this is"):
        load_config(path)
