"""The command line, as a user meets it: output, exit codes, and what it does not import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll import __version__, cli
from roll.configs.report import check_report
from roll.exceptions import DataError
from roll.pipeline.registry import load_config

GOOD = Path(__file__).parent / "configs" / "data" / "good"
RLVR = GOOD / "rlvr.yaml"


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "roll.cli", *map(str, arguments)]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def roll(monkeypatch, capsys):
    """Call the command in this process; returns (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["roll", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return call


def test_help_lists_the_commands(roll):
    code, output, _ = roll("--help")
    assert code == 0
    assert "check" in output and "--version" in output


def test_version(roll):
    assert roll("--version") == (0, f"roll {__version__}\n", "")


def test_check_prints_pipeline_table_and_one_warning():
    result = in_a_process("check", RLVR)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"{RLVR}: a valid config for the rlvr pipeline, which runs on Ray"
    assert lines[2].split() == ["actor_train", "critic"]
    table = {line[:34].strip(): line[34:].split() for line in lines[3:16]}
    assert table["rows per step"] == ["128", "128"]
    assert table["optimizer steps in all"] == ["720", "400"]
    assert table["learning rate, last step"] == ["1.43e-09", "2.5e-08"]
    assert result.stdout.count("accepted without effect:") == 1
    assert result.stdout.count("dataset_dir") == 1
    assert "\x1b" not in result.stdout and result.stderr == ""


def test_overrides_change_the_numbers(roll):
    code, output, _ = roll("check", RLVR, "rollout_batch_size=32", "ppo_epochs=1", "adv_estimator=grpo")
    assert code == 0
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("optimizer steps per")] == ["8"]


def test_json(roll):
    values = json.loads(roll("check", RLVR, "--json")[1])
    assert values["pipeline"] == "rlvr"
    assert values["plans"]["actor_train"]["optimizer_steps_per_batch"] == 8
    assert values["config"]["sequence_length"] == 6144


BAD_FILES = {
    "syntax": ("a: [1\nb: 2", "not valid YAML: expected ',' or ']', but got ':'"),
    "unknown_key": ("pipeline: dpo\nsequence_length: 8\nbta: 1", 'bta: unknown key; did you mean "beta"?'),
    "wrong_type": (
        "pipeline: dpo\nsequence_length: long",
        'sequence_length: found "long" (str), expected a whole number',
    ),
    "choice": ("pipeline: dpo\nsequence_length: 8\nloss_type: x", "expected one of sigmoid, ipo, ipo_sum"),
    "interpolation": (
        "pipeline: dpo\nsequence_length: ${nope}",
        "${nope} does not resolve, because there is no key nope",
    ),
    "environment": ("pipeline: dpo\npretrain: ${oc.env:ROLL_TEST_NOT_SET}", "ROLL_TEST_NOT_SET is not set"),
    "devices": (
        "pipeline: dpo\nsequence_length: 8\nactor_train: {device_mapping: some}",
        'actor_train.device_mapping: found "some" (str), expected a list of GPU numbers',
    ),
    "vision": ("pipeline: dpo\npretrain: a/B-VL", "pretrain: not supported"),
    "megatron": (
        "pipeline: dpo\nsequence_length: 8\nactor_train: {strategy_args: {strategy_name: megatron_train}}",
        'the strategy "megatron_train" is not supported; the nearest one is "fsdp2_train"',
    ),
    "no_pipeline": ("seed: 1", "no key says which pipeline this is"),
    "base": ("defaults: [nowhere]", "nowhere.yaml: no such file (named in the defaults of"),
    "incomplete": (
        "pipeline: dpo\nsequence_length: 8",
        "actor_train.strategy_args: missing; actor_train needs a strategy",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_end_with_one_clear_message_and_exit_code_2(roll, name, tmp_path):
    text, expected = BAD_FILES[name]
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    code, output, errors = roll("check", path)
    assert code == 2
    assert expected in errors and errors.startswith(f"error: {tmp_path}/")
    assert output == ""
    for leak in ("Traceback", "pydantic", "omegaconf", "Input should", "validation error"):
        assert leak not in errors


def test_a_missing_file_ends_the_same_way(tmp_path):
    result = in_a_process("check", tmp_path / "nope.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path}/nope.yaml: no such file\n"


def test_what_does_not_divide_ends_the_same_way(roll):
    code, _, errors = roll("check", RLVR, "rollout_batch_size=17", "adv_estimator=grpo")
    assert code == 2 and errors.endswith("; use 16 or 20\n")


@pytest.mark.parametrize("arguments", [("train",), ("check",), ("check", "--wat"), ("--wat",)])
def test_usage_errors_have_exit_code_2(roll, arguments):
    code, _, errors = roll(*arguments)
    assert code == 2 and "Usage: roll" in errors


def test_checking_imports_neither_torch_nor_ray():
    code = f"""
import sys
sys.argv = ["roll", "check", {str(RLVR)!r}]
from roll.cli import main
try:
    main()
except SystemExit:
    pass
heavy = {{"torch", "ray", "transformers", "numpy", "tensordict", "vllm", "deepspeed"}} & set(sys.modules)
assert not heavy, heavy
print("light")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.endswith("light\n"), result.stderr


def test_help_does_not_import_what_checking_needs():
    code = "import sys, roll.cli; print(sorted({'pydantic', 'omegaconf', 'rich.table', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_every_roll_error_becomes_a_message(roll, monkeypatch):
    def fail(**options: str) -> None:
        raise DataError("row 3 of data.jsonl has no prompt")

    monkeypatch.setattr(cli, "app", fail)
    assert roll() == (2, "", "error: row 3 of data.jsonl has no prompt\n")


def test_a_terminal_gets_a_table_with_a_rule_under_its_head(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cli._print_report(check_report(load_config(RLVR, warn=False)))
    output = capsys.readouterr().out
    assert "rows per micro-batch" in output and "────" in output
