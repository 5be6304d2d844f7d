"""`roll check` and `roll train` refuse the same configs, in the same words, before a model is
loaded."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from small_projects import CONFIGS, make_project

from roll.configs.memory import GIB
from roll.exceptions import install_hint
from roll.pipeline.preflight import examine, preflight
from roll.pipeline.registry import load_config
from roll.rewards.check import PLAIN_REWARDS
from roll.utils.import_utils import import_class
from roll.utils.machine import Machine, parse_machine

# NAME: CONFIG: overrides => what the errors say; several of either stand between bars.
TABLE = """
no model folder: sft: pretrain=./nowhere
    => pretrain: the folder | nowhere does not exist
a file for a model: dpo: pretrain=reward.py
    => pretrain: reward.py is a file
no weights: rlvr: pretrain=no_weights
    => pretrain: | no_weights has no weights
missing shards: rlvr: pretrain=half
    => pretrain: | names model-00002-of-2.safetensors, which is not
broken config.json: sft: pretrain=broken
    => pretrain: | broken/config.json could not be read
no tokenizer: agentic: pretrain=no_tokenizer
    => pretrain: | no_tokenizer has no tokenizer
critic elsewhere: rlvr: adv_estimator=gae | reward_pretrain=./lost |
    +critic.strategy_args.strategy_name=hf_train
    => reward_pretrain: the folder | lost does not exist
no data file: rlvr: actor_train.data_args.file_name=prompt.jsonl
    => actor_train.data_args.file_name: no such file or folder: prompt.jsonl |
    Did you mean prompts.jsonl?
two data files: dpo: actor_train.data_args.file_name=[x.jsonl,y.jsonl]
    => no such file or folder: x.jsonl | no such file or folder: y.jsonl
an unknown format: sft: actor_train.data_args.file_name=reward.py
    => cannot tell the format
a broken line: dpo: actor_train.data_args.file_name=broken.jsonl
    => broken.jsonl:2: is not valid JSON
no such column: dpo: chosen_key=better
    => actor_train.data_args: pairs.jsonl has no column better; its columns are: prompt, chosen
a row without a prompt: rlvr: actor_train.data_args.file_name=holes.jsonl
    => actor_train.data_args: holes.jsonl:2: column 'prompt' has no prompt in it
a row without a reward: rlvr: +rewards.echo.tag_included=[poems]
    => actor_train.data_args: prompts.jsonl:1: tag None belongs to no domain
no prompt fits: rlvr: prompt_length=2
    => prompts.jsonl: no prompt is left. The longest of them has 3
no answer fits: sft: sequence_length=5
    => answers.jsonl: no row is left to train on
too few pairs: dpo: actor_train.training_args.gradient_accumulation_steps=8
    => actor_train.data_args: 6 rows do not fill one batch of 16
no validation data: rlvr: +validation.data_args.file_name=v.jsonl
    => validation.data_args.file_name: no
no such template: dpo: global_template=chatlm
    => there is no chat template 'chatlm'; did you mean 'chatml'
a model without a template: agentic: pretrain=bare
    => global_template: the tokenizer of | has no chat template of its own
a negative seed: sft: seed=-1
    => seed: found -1, expected 0 or more
no such GPU: sft: +actor_train.device_mapping=[60] | num_gpus_per_node=64
    => actor_train.device_mapping: names GPU 60, but this machine shows |
    actor_train.device_mapping=null
beyond the machines: sft: +actor_train.device_mapping=[9] | num_gpus_per_node=8 | backend=local
    => actor_train.device_mapping: names GPUs of a second machine
vLLM over two devices: rlvr: actor_infer.strategy_args.strategy_name=vllm |
    +actor_infer.strategy_args.strategy_config.tensor_parallel_size=2
    => actor_infer.strategy_args.strategy_config: a vLLM engine of this strategy runs on one device
fp16: sft: actor_train.model_args.dtype=fp16
    => actor_train.model_args.dtype: found fp16, expected bf16
DeepSpeed says otherwise: sft: actor_train.strategy_args.strategy_name=deepspeed_train |
    +actor_train.strategy_args.strategy_config.gradient_clipping=7
    => actor_train.strategy_args.strategy_config.gradient_clipping: found 7, but the run says 1.0
an adapter on nothing: dpo: +actor_train.model_args.lora_target=q_prjo
    => actor_train.model_args.lora_target: the model has no module 'q_prjo'; did you mean "q_proj"?
an expression that matches nothing: dpo: +actor_train.model_args.lora_target=.*query$
    => lora_target: the expression '.*query$' matches no module | q_proj
frozen and adapted: dpo: +actor_train.model_args.lora_target=q_proj |
    +actor_train.model_args.freeze_module_prefix=model
    => freeze_module_prefix: LoRA freezes everything
frozen nothing: sft: +actor_train.model_args.freeze_module_prefix=transformer
    => freeze_module_prefix: no parameter of the model lies in 'transformer'
no adapter there: sft: +actor_train.model_args.adapter_name_or_path=model
    => actor_train.model_args.adapter_name_or_path: model has no adapter_config.json
no reward file: rlvr: rewards.echo.reward_fn=rewrd.py:score
    => rewards.echo.reward_fn: | there is no file | did you mean reward.py?
no reward function: rlvr: rewards.echo.reward_fn=reward.py:scroe
    => rewards.echo.reward_fn: | reward.py has no 'scroe'; did you mean 'score'?
a reward that breaks: rlvr: rewards.echo.reward_fn=breaks.py:score
    => rewards.echo.reward_fn: | ZeroDivisionError: division by zero (breaks.py:1)
no such worker: sft: +actor_train.worker_cls=roll.pipeline.sft.sft_worker.SFTWroker
    => actor_train.worker_cls: | has no 'SFTWroker'; did you mean "SFTWorker"?
no such module: sft: +actor_train.worker_cls=my.Worker
    => actor_train.worker_cls: | no module 'my'
no such pipeline: sft: +pipeline_cls=my.Pipeline
    => pipeline_cls: | there is no module 'my'
no checkpoint: sft: resume_from_checkpoint=elsewhere
    => resume_from_checkpoint: elsewhere is not a complete checkpoint of a run
a damaged checkpoint: sft: resume_from_checkpoint=damaged
    => resume_from_checkpoint: damaged/checkpoints/checkpoint-3/pipeline/state.json: cannot be read
a file for a folder: sft: output_dir=reward.py/runs
    => output_dir: | reward.py is a file
a name with a slash: sft: exp_name=a/b
    => exp_name: found "a/b", expected a name without slashes
no dumps: rlvr: +rollout_mock={enable: true, mode: mock, dump_dir: dumps}
    => rollout_mock.dump_dir: dumps/train has no dump for step 0 (found 0 of 2 steps)
no such environment: agentic: custom_envs.Guess.env_type=guess_nubmer
    => custom_envs.Guess.env_type: there is no environment 'guess_nubmer'; did you mean 'gue
no such environment class: agentic: custom_envs.Guess.env_type=reward.Missing
    => custom_envs.Guess.env_type: environment 'reward.Missing': module reward has no 'Missing'
an option that it lacks: agentic: +custom_envs.Guess.env_config.hihg=3
    => custom_envs.Guess.env_config: cannot be made and reset: TypeError | hihg
an environment that refuses: agentic: custom_envs.Guess.env_config.high=0
    => custom_envs.Guess.env_config: cannot be made and reset: ConfigError: guess_number: high: fou
no such manager: agentic:
    +custom_envs.Guess.env_manager_cls=roll.pipeline.agentic.env_manager.traj_env_manager.Traj
    => custom_envs.Guess.env_manager_cls: | has no 'Traj'
more than there is: sft: pretrain=huge
    => actor_train: estimated | of memory for actor_train, this machine has | it does not fit
everything at once: rlvr: rolout_batch_size=8 | seed=x | pretrain=./gone |
    actor_train.data_args.file_name=z.jsonl | opd_kl_coef=1
    => opd_kl_coef: not supported | rolout_batch_size: unknown key | seed: found | pretrain: |
    z.jsonl
nothing that makes a config: dpo: sequence_length=null | pretrain=./gone |
    actor_train.data_args.file_name=z.jsonl
    => sequence_length: missing | pretrain: the folder | no such file or folder: z.jsonl
no pipeline: sft: pipeline=stf | pretrain=./gone
    => pipeline: found "stf" | pretrain: the folder
"""
BROKEN: dict[str, tuple[str, list[str], list[str]]] = {}
for entry in re.split(r"\n(?! )", TABLE.strip()):
    case, says = " ".join(entry.split()).split(" => ")
    name, config, overrides = case.split(": ", 2)
    BROKEN[name] = (config, overrides.split(" | "), says.split(" | "))
# These ask a class, which brings torch with it.
NEED_TORCH = {"no such module", "no such manager"}

RUN = """
import contextlib, io, json, sys
from roll.cli import main

cases, results = json.load(sys.stdin), {}
for name, (config, overrides) in cases.items():
    for command in ("check", "train"):
        out, err = io.StringIO(), io.StringIO()
        sys.argv = ["roll", command, f"{config}.yaml", *overrides]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code
        results[f"{name}/{command}"] = [code, out.getvalue(), err.getvalue(), "torch" in sys.modules]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A valid project, and beside it what the broken configs name."""
    folder = make_project(tmp_path_factory.mktemp("project"))
    (folder / "holes.jsonl").write_text('{"prompt": "1 ?"}\n{"ground_truth": "2"}\n')
    (folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (folder / "breaks.py").write_text("1 / 0\n")
    for name in ("no_weights", "half", "broken", "no_tokenizer", "bare", "huge"):
        shutil.copytree(folder / "model", folder / name)
    for name in ("no_weights", "half", "huge"):
        (folder / name / "model.safetensors").unlink()
    (folder / "half" / "model-00001-of-2.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    shards = {"a": "model-00001-of-2.safetensors", "b": "model-00002-of-2.safetensors"}
    (folder / "half" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": shards})
    )
    (folder / "broken" / "config.json").write_text("{")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "no_tokenizer" / name).unlink()
    settings = json.loads((folder / "bare" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "bare" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    # The header of 10^13 parameters; nobody reads the numbers behind it.
    header = json.dumps(
        {"model.w.weight": {"dtype": "F32", "shape": [10**7, 10**6], "data_offsets": [0, 0]}}
    ).encode()
    (folder / "huge" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "damaged" / "checkpoints" / "checkpoint-3" / "pipeline").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def answers(project) -> dict[str, list]:
    """What both commands say: [exit code, output, errors, whether torch was imported by then]."""
    unset = ("HF_", "RAY_ADDRESS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
    order = sorted(BROKEN, key=lambda name: name in NEED_TORCH)
    found = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps({name: BROKEN[name][:2] for name in order}),
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("name", BROKEN)
def test_check_and_train_refuse_in_the_same_words(answers, name):
    code, output, errors, has_torch = answers[f"{name}/check"]
    assert answers[f"{name}/train"][:3] == [code, output, errors]
    assert (code, output) == (2, "") and errors.startswith("error: ")
    for expected in BROKEN[name][2]:
        assert expected in errors
    assert errors.removeprefix("error: ").startswith((f"{BROKEN[name][0]}.yaml", "command line: "))
    assert "Traceback" not in errors
    # Nothing has been loaded: a model needs torch.
    assert has_torch == (name in NEED_TORCH)


def test_no_run_was_begun(answers, project):
    """A run's folder is made before its models."""
    assert len(BROKEN) >= 20 and not (project / "runs").exists()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_whole_passes_both(project, name, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checked = examine(f"{name}.yaml")
    assert (checked.errors, checked.warnings, checked.notes) == ([], [], [])
    assert checked.require().config.pretrain == "model"
    assert set(checked.memory) >= {"actor_train"}


@pytest.mark.slow
def test_a_valid_config_that_check_passes_trains(project, tmp_path):
    arguments = ["train", "sft.yaml", f"output_dir={tmp_path}", "-q"]
    command = [sys.executable, "-m", "roll.cli", *arguments]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    checkpoint = tmp_path / "sft" / "checkpoints" / "checkpoint-2"
    assert (checkpoint / "actor_train" / "config.json").is_file()


def test_json_carries_errors_and_warnings(project):
    command = [sys.executable, "-m", "roll.cli", "check", "sft.yaml", "--json"]

    def run(*overrides):
        result = subprocess.run(
            [*command, *overrides], cwd=project, capture_output=True, text=True, timeout=100
        )
        return result.returncode, json.loads(result.stdout)

    code, found = run("pretrain=./nowhere", "sede=3")
    assert code == 2 and found["valid"] is False and len(found["errors"]) == 2
    code, found = run("track_with=wandbb")
    assert code == 0 and found["valid"] and found["errors"] == []
    (warning,) = found["warnings"]
    assert warning.startswith('track_with: there is no tracker wandbb; did you mean "wandb"?. Metr')


def test_a_hub_name_is_a_note_unless_there_is_no_network(project, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    checked = examine("dpo.yaml", ["pretrain=some/model"])
    assert checked.errors == [] and checked.memory == {}
    assert checked.notes == [
        "some/model is a Hugging Face name and not in the local cache: its size is not known yet",
        "how long the rows of pairs.jsonl are is known once the tokenizer is here",
    ]
    data = ["actor_train.data_args.file_name=some/pairs:train"]
    assert (
        "some/pairs:train is no file here, so it is taken for" in examine("dpo.yaml", data).notes[0]
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (error,) = examine("dpo.yaml", data).errors
    assert "actor_train.data_args.file_name: some/pairs:train cannot be read" in error
    (error,) = examine("dpo.yaml", ["pretrain=some/model"]).errors
    assert "pretrain: there is no folder 'some/model' here, HF_HUB_OFFLINE is set" in error
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(project / "model", cached / "snapshots" / "abc")
    checked = examine("dpo.yaml", ["pretrain=some/model"])
    assert (checked.errors, checked.notes) == ([], [])
    assert set(checked.memory) == {"actor_train", "reference"}


def test_packages_that_are_missing_are_named_with_their_extra(project, monkeypatch):
    monkeypatch.chdir(project)
    for package in ("ray", "peft", "vllm", "deepspeed", "math_verify", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed

    def found(name, *overrides):
        errors = preflight(load_config(name, overrides).config).errors
        return {problem.key: problem.message for problem in errors}

    lora = "+actor_train.model_args.lora_target=q_proj"
    errors = found("sft.yaml", "+actor_train.world_size=2", lora)
    assert f"needs Ray, which is not installed: {install_hint('ray')}" in errors["backend"]
    assert install_hint("lora") in errors["actor_train.model_args.lora_target"]
    math = "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
    errors = found(
        "rlvr.yaml",
        "actor_infer.strategy_args.strategy_name=vllm",
        "actor_train.strategy_args.strategy_name=deepspeed_train",
        "rewards.echo.reward_fn=null",
        f"+rewards.echo.worker_cls={math}",
    )
    assert install_hint("vllm") in errors["actor_infer.strategy_args.strategy_name"]
    assert install_hint("deepspeed") in errors["actor_train.strategy_args.strategy_name"]
    assert install_hint("rewards") in errors["rewards.echo.worker_cls"]
    (warning,) = examine("sft.yaml", ["track_with=wandb"]).warnings
    assert install_hint("tracking") in warning
    elsewhere = load_config("rlvr.yaml", ["actor_infer.strategy_args.strategy_name=vllm"]).config
    findings = preflight(elsewhere, parse_machine("8xH200"))
    assert findings.errors == [] and install_hint("vllm") in findings.warnings[0]


def test_another_machine_has_its_own_devices_and_memory(project, monkeypatch):
    monkeypatch.chdir(project)
    on_two = ["+actor_train.device_mapping=[0,1]"]
    on_two += ["actor_train.strategy_args.strategy_name=fsdp2_train"]
    assert examine("sft.yaml", on_two, parse_machine("8xH200")).errors == []
    (error,) = examine("sft.yaml", on_two, parse_machine("1xA100-80GB")).errors
    assert "actor_train.device_mapping: names GPU 1, but 1xA100-80GB shows 1 GPU(s)" in error
    (error,) = examine("sft.yaml", ["pretrain=huge"], parse_machine("cpu-64GB")).errors
    assert "cpu-64GB has 64.0 GiB; even with 50% fewer activations it does not fit" in error
    needed = examine("sft.yaml").memory["actor_train"].total
    checked = examine("sft.yaml", (), Machine("a toy", 0, None, needed))
    assert checked.errors == [] and "so it may not fit" in checked.warnings[0]
    assert examine("sft.yaml", (), Machine("a server", 0, None, 5 * GIB)).warnings == []


def test_large_files_are_read_in_part_and_that_is_said(project, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    monkeypatch.setattr("roll.pipeline.preflight.MAX_BYTES", 300)
    rows = [json.dumps({"prompt": f"{n}?", "answer": "x" * 40}) for n in range(50)]
    (tmp_path / "many.jsonl").write_text("\n".join(rows) + "\n")
    checked = examine("sft.yaml", [f"actor_train.data_args.file_name={tmp_path}/many.jsonl"])
    assert checked.errors == []
    (note,) = checked.notes
    assert note == f"only the first 4 rows of {tmp_path}/many.jsonl were looked at one by one"


def test_rewards_that_are_not_asked_have_nothing_to_say():
    """They are not imported, because that takes seconds: so they must not have a check of their
    own."""
    from roll.rewards.workers import PoolRewardWorker

    for name in PLAIN_REWARDS:
        worker = import_class(f"roll.rewards.workers.{name}")
        assert issubclass(worker, PoolRewardWorker)
        assert worker.check.__func__ is PoolRewardWorker.check.__func__
        assert worker.function_of.__func__ is PoolRewardWorker.function_of.__func__


def test_an_environment_is_reset_not_only_imported(project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    code = "class Env:\n    def reset(self, seed):\n        raise OSError('no server')\n"
    (project / "sulky.py").write_text(code)
    changes = ["custom_envs.Guess.env_type=sulky:Env", "~custom_envs.Guess.env_config"]
    (error,) = examine("agentic.yaml", changes).errors
    assert error.endswith("Guess.env_config: cannot be made and reset: OSError: no server")
