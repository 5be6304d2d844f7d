"""The script behind the table of ROLL's files, on a small checkout made here."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "roll_examples.py"
RLVR = """
sequence_length: 64
prompt_length: 8
pretrain: some/model
adv_estimator: reinforce
rollout_batch_size: 2
logging_dir: logs
rewards: {{math: {{worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}}}
actor_train:
  data_args: {{file_name: a.jsonl}}
  training_args: {{per_device_train_batch_size: 1, gradient_accumulation_steps: {steps}}}
  strategy_args: {{strategy_name: {strategy}}}
actor_infer: {{strategy_args: {{strategy_name: hf_infer}}}}
reference: {{strategy_args: {{strategy_name: hf_infer}}}}
"""
ENVS = """
defaults: [../config/envs@_here_]
sequence_length: 64
pretrain: some/model
adv_estimator: reinforce
rollout_batch_size: 2
eval_steps: 0
custom_envs: {Sokoban: "${envs.Sokoban}"}
train_env_manager: {tags: [Sokoban], num_env_groups: 2}
actor_train:
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
  strategy_args: {strategy_name: megatron_train}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
reference: {strategy_args: {strategy_name: hf_infer}}
"""
FILES = {
    "config/envs.yaml": "envs: {Sokoban: {env_type: sokoban, agent_runner_cls: null, env_config: {dim_rooms: [6, 6]}}}",
    "a/trains.yaml": RLVR.format(strategy="hf_train", steps=2),
    "a/megatron.yaml": RLVR.format(strategy="megatron_train", steps=2),
    "a/sizes.yaml": RLVR.format(strategy="megatron_train", steps=64),
    "a/vision.yaml": RLVR.format(strategy="megatron_train", steps=2).replace(
        "some/model", "Qwen/Qwen2.5-VL-7B"
    ),
    "a/sft.yaml": "sequence_length: 64\nprompt_key: x\nsft_train: {strategy_args: {strategy_name: megatron_train}}",
    "a/envs.yaml": ENVS,
    "a/empty.yaml": "",
}
EXPECTED = """\
| file | verdict | the one reason | with FSDP2 in place of Megatron |
|---|---|---|---|
| `a/empty.yaml` | refused | the file is empty |  |
| `a/envs.yaml` | refused | the strategy "megatron_train" | loads: custom_envs.Sokoban.env_config: got an unexpected \
keyword argument 'dim_rooms' |
| `a/megatron.yaml` | refused | the strategy "megatron_train" | trains |
| `a/sft.yaml` | refused | sft_train: ROLL's supervised fine-tuning is `pipeline: sft` here | refused |
| `a/sizes.yaml` | refused | the strategy "megatron_train" | refused: rollout_batch_size: found 2, expected a multiple \
of 64 |
| `a/trains.yaml` | trains | 1 keys without effect |  |
| `a/vision.yaml` | refused | pretrain: "Qwen/Qwen2.5-VL-7B" is a vision or audio model | refused |
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    root = tmp_path_factory.mktemp("ROLL")
    for name, text in FILES.items():
        path = root / "examples" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "roll" / "utils").mkdir(parents=True)
    (root / "roll" / "utils" / "dynamic_batching.py").write_text(
        "def dynamic_batching_shard(): ...\n"
    )
    (root / "roll" / "utils" / "own.py").write_text("def thing(): ...\n")
    lines = (
        "from roll.utils.dynamic_batching import dynamic_batching_shard",
        "from roll.utils.own import thing, gone",
    )
    (root / "examples" / "start.py").write_text("\n".join(lines))
    return root


def run(*arguments) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_table_of_files(checkout):
    summary, table = run(checkout, "--markdown").split("\n\n")
    assert table == EXPECTED
    assert summary == (
        "7 files: 1 train as they are, 1 more once Megatron's strategies are replaced by fsdp2_train and fsdp2_infer, "
        "0 load and do not train, 5 are refused either way."
    )


@pytest.mark.slow
def test_the_list_of_imports(checkout):
    assert run(checkout, "--imports", "--markdown") == (
        "3 imports; 1 do not exist in this ROLL either; of the other 2, 1 work here and 1 do not:\n\n"
        "- `roll.utils.own`: `thing`\n"
    )


def test_a_folder_that_is_no_checkout(tmp_path):
    assert "name the folder of a checkout of ROLL" in run(tmp_path)
