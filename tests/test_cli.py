"""The command line, as a user meets it: output, exit codes, and what it does not import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_projects import make_project

from roll import __version__, cli
from roll.configs.report import check_report
from roll.exceptions import DataError
from roll.pipeline.registry import load_config

GOOD = Path(__file__).parent / "configs" / "data" / "good"
RLVR = GOOD / "rlvr.yaml"


def in_a_process(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "roll.cli", *map(str, arguments)]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)


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


def test_help_and_version(roll):
    code, output, _ = roll("--help")
    assert code == 0 and "check" in output and "--version" in output
    assert roll("--version") == (0, f"roll {__version__}\n", "")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


def test_check_prints_pipeline_table_and_one_warning(project):
    ignored = ["+actor_train.data_args.dataset_dir=x", "+track_name=y"]
    result = in_a_process(
        "check", "rlvr.yaml", "num_return_sequences_in_group=2", *ignored, cwd=project
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "rlvr.yaml: a valid config for the rlvr pipeline, which runs in this process"
    assert lines[2].split() == ["actor_train"]
    table = {line[:34].strip(): line[34:].split() for line in lines[3:16]}
    assert table["rows per step"] == ["8"] and table["optimizer steps in all"] == ["4"]
    assert "\nmemory on each device, estimated: actor_train about " in result.stdout
    assert result.stdout.count("accepted without effect:") == 1
    assert result.stdout.count("dataset_dir") == 1
    assert "\x1b" not in result.stdout and result.stderr == ""


def test_overrides_change_the_numbers(roll, project, monkeypatch):
    monkeypatch.chdir(project)
    code, output, _ = roll("check", "rlvr.yaml", "rollout_batch_size=32")
    [line] = [line for line in output.splitlines() if line.startswith("optimizer steps per")]
    assert code == 0 and line.split()[-1] == "8"
    code, _, errors = roll("check", "rlvr.yaml", "rollout_batch_size=17")
    assert code == 2 and errors.endswith("; use 16 or 20\n")


def test_settings_that_others_override_are_warnings(roll, project, monkeypatch):
    monkeypatch.chdir(project)
    overrides = (
        "adv_estimator=grpo",
        "norm_std_type=batch",
        "importance_sampling=seq",
        "gamma=0.9",
    )
    sentences = load_config("rlvr.yaml", overrides, warn=False).config.cautions()
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "without effect",
        "importance_sampling",
    ]
    output = roll("check", "rlvr.yaml", *overrides)[1]
    assert all(f"warning: {sentence}" in output for sentence in sentences)
    assert set(sentences) <= set(
        json.loads(roll("check", "rlvr.yaml", *overrides, "--json")[1])["warnings"]
    )


def test_json(roll, project, monkeypatch):
    monkeypatch.chdir(project)
    values = json.loads(roll("check", "rlvr.yaml", "--json")[1])
    assert (values["valid"], values["errors"], values["warnings"]) == (True, [], [])
    assert values["pipeline"] == "rlvr"
    assert values["plans"]["actor_train"]["optimizer_steps_per_batch"] == 1
    assert values["config"]["sequence_length"] == 64


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("8xH2000", 'no GPU called "H2000" is known; did you mean "H200"?'),
        ("many", 'no GPU called "many" is known'),
        ("8 GPUs", "expected a number of GPUs and their name; write 8xH200"),
        ("0xH200", "expected a number of GPUs and their name"),
    ],
)
def test_unknown_machines_are_refused(roll, project, monkeypatch, machine, expected):
    monkeypatch.chdir(project)
    code, output, errors = roll("check", "sft.yaml", "--machine", machine)
    assert (code, output) == (2, "") and expected in errors


BAD_FILES = {
    "syntax": ("a: [1\nb: 2", "not valid YAML: expected ',' or ']', but got ':'"),
    "unknown_key": (
        "pipeline: dpo\nsequence_length: 8\nbta: 1",
        'bta: unknown key; did you mean "beta"?',
    ),
    "wrong_type": (
        "pipeline: dpo\nsequence_length: long",
        'sequence_length: found "long" (str), expected a valid integer',
    ),
    "choice": (
        "pipeline: dpo\nsequence_length: 8\nloss_type: x",
        "expected one of sigmoid, ipo, ipo_sum",
    ),
    "interpolation": (
        "pipeline: dpo\nsequence_length: ${nope}",
        "${nope} does not resolve, because there is no key nope",
    ),
    "environment": (
        "pipeline: dpo\npretrain: ${oc.env:ROLL_TEST_NOT_SET}",
        "ROLL_TEST_NOT_SET is not set",
    ),
    "devices": (
        "pipeline: dpo\nsequence_length: 8\nactor_train: {device_mapping: some}",
        'actor_train.device_mapping: found "some" (str), expected a list of GPU numbers',
    ),
    "vision": ("pipeline: dpo\npretrain: a/B-VL", "pretrain: not supported"),
    "megatron": (
        "pipeline: dpo\nsequence_length: 8\n"
        "actor_train: {strategy_args: {strategy_name: megatron_train}}",
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
    assert (code, output) == (2, "")
    assert expected in errors and errors.startswith(f"error: {tmp_path}/")
    for leak in ("Traceback", "pydantic", "omegaconf", "Input should", "validation error"):
        assert leak not in errors
    code, output, errors = roll("check", path, "--json")
    found = json.loads(output)
    assert (code, errors, found["valid"]) == (2, "", False)
    assert expected in "\n".join(found["errors"]) and {"warnings", "notes"} <= set(found)


def test_a_missing_file_ends_the_same_way(tmp_path):
    result = in_a_process("check", tmp_path / "nope.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path}/nope.yaml: no such file\n"


@pytest.mark.parametrize("arguments", [("train",), ("check",), ("check", "--wat"), ("--wat",)])
def test_usage_errors_have_exit_code_2(roll, arguments):
    code, _, errors = roll(*arguments)
    assert code == 2 and "Usage: roll" in errors


IMPORTS = """
import sys
sys.argv = ["roll", "check", *{arguments!r}]
from roll.cli import main
try:
    main()
except SystemExit:
    pass
heavy = {heavy!r} & set(sys.modules)
assert not heavy, heavy
print("light")
"""
HEAVY = {"torch", "ray", "transformers", "tensordict", "vllm", "deepspeed"}


def run_code(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("name", ["sft", "dpo", "rlvr", "agentic"])
def test_checking_a_valid_config_imports_neither_torch_nor_ray(project, name):
    result = run_code(IMPORTS.format(arguments=[f"{name}.yaml"], heavy=HEAVY), project)
    assert result.stdout.endswith("light\n") and "a valid config" in result.stdout, result.stderr


def test_a_broken_file_is_answered_without_numpy_too(project):
    arguments = ["rlvr.yaml", "sede=1", "actor_train.data_args.file_name=nowhere.jsonl"]
    result = run_code(IMPORTS.format(arguments=arguments, heavy=HEAVY | {"numpy"}), project)
    assert result.stdout == "light\n" and "sede: unknown key" in result.stderr, result.stderr


def test_help_does_not_import_what_checking_needs():
    heavy = {"pydantic", "omegaconf", "rich.table", "torch"}
    result = run_code(f"import sys, roll.cli; print(sorted({heavy} & set(sys.modules)))")
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
