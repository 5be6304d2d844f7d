"""Steps, checkpoints, resume, interruption and the end of a run, with a pipeline that counts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.exceptions import ConfigError
from roll.models.checkpoint import complete_checkpoints
from roll.pipeline.base_pipeline import BasePipeline, resume_command
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.registry import load_config
from roll.utils.run_folder import RunFolder
from roll.utils.tracking import read_metrics


class Counter(BasePipeline):
    """Adds up its steps, and carries the sum."""

    def __init__(self, pipeline_config, *, progress=False):
        super().__init__(pipeline_config, progress=progress)
        self.total = 0
        self.restore()

    def states(self):
        return {"counter": {"total": self.total}}

    def load_states(self, states):
        self.total = states["counter"]["total"]

    def on_step(self, step):
        """What a test does in a step."""

    def run(self):
        for step in self.steps():
            self.total += step
            self.on_step(step)
            self.end_step(step, {"total": self.total, "parts@sum": [1, 2, [3]]})
        self.finish("Counted.")


def make_config(output_dir, **values) -> DPOConfig:
    defaults = {
        "sequence_length": 8,
        "exp_name": "exp",
        "max_steps": 6,
        "save_steps": 4,
        "track_with": "none",
    }
    return DPOConfig(**{**defaults, "output_dir": str(output_dir), **values})


@pytest.fixture(autouse=True)
def no_report(monkeypatch, request):
    """Reports have tests of their own, and take a second each."""
    if "report" not in request.node.name:
        monkeypatch.setattr(BasePipeline, "_write_report", lambda self: None)


def run(config, pipeline=Counter, **options):
    with pipeline(config, **options) as running:
        running.run()
    return running


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl")]


def test_a_run_leaves_config_metrics_checkpoints_and_its_story(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    pipeline = run(make_config(tmp_path))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    folder = tmp_path / "exp"
    assert pipeline.run_dir == folder and pipeline.pipeline_config.output_dir == str(folder)
    assert pipeline.pipeline_config.resume_from_checkpoint is False
    assert steps_of(folder) == [0, 1, 2, 3, 4, 5]
    line = read_metrics(folder / "metrics.jsonl")[4]
    assert (line["total"], line["parts"], line["system/step"]) == (10, 6, 5)
    assert [path.name for path in complete_checkpoints(folder)] == ["checkpoint-4", "checkpoint-6"]
    info = RunFolder(folder).info()
    assert (info["pipeline"], info["status"], info["last_step"]) == ("dpo", "finished", 6)
    assert info["started"] <= info["ended"] and info["command"] == sys.argv
    # The config starts such a run again: not inside the folder of this one.
    copy = load_config(folder / "config.yaml", warn=False).config
    assert (copy.output_dir, copy.exp_name, copy.max_steps) == (str(tmp_path), "exp", 6)


@pytest.mark.parametrize("how", [True, "run", "checkpoint"])
def test_resume_goes_on_where_the_checkpoint_is(tmp_path, how):
    class StopsAt5(Counter):
        def on_step(self, step):
            if step == 5:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(make_config(tmp_path, max_steps=8), StopsAt5)
    folder = tmp_path / "exp"
    assert RunFolder(folder).info()["status"] == "failed"
    assert steps_of(folder) == [0, 1, 2, 3, 4]
    where = {"run": str(folder), "checkpoint": str(folder / "checkpoints" / "checkpoint-4")}
    pipeline = run(make_config(tmp_path, max_steps=8, resume_from_checkpoint=where.get(how, how)))
    assert pipeline.run_dir == folder and pipeline.total == sum(range(8))
    assert steps_of(folder) == list(range(8))
    assert RunFolder(folder).info()["status"] == "finished"


def test_resume_of_a_finished_run_and_from_an_older_checkpoint(tmp_path, caplog):
    run(make_config(tmp_path))
    pipeline = run(make_config(tmp_path, resume_from_checkpoint=True))
    assert "there is nothing left to train" in caplog.text
    assert pipeline.total == 15 and steps_of(tmp_path / "exp") == list(range(6))
    # From an older checkpoint a new run starts with the old lines.
    older = tmp_path / "exp" / "checkpoints" / "checkpoint-4"
    pipeline = run(make_config(tmp_path, resume_from_checkpoint=str(older)))
    assert pipeline.run_dir == tmp_path / "exp-2" and pipeline.total == 15
    assert steps_of(tmp_path / "exp-2") == list(range(6))


def test_stop_ends_after_the_step_with_a_checkpoint(tmp_path, capsys):
    class StopsAt2(Counter):
        def on_step(self, step):
            if step == 2:
                self.stop("enough")

    run(make_config(tmp_path), StopsAt2, progress=None)
    folder = tmp_path / "exp"
    assert steps_of(folder) == [0, 1, 2]
    assert [path.name for path in complete_checkpoints(folder)] == ["checkpoint-3"]
    assert RunFolder(folder).info()["status"] == "finished"
    assert capsys.readouterr().out == "Stopped after 3 of 6 steps: enough.\nCounted.\n"


def test_kept_checkpoints_survive_pruning(tmp_path):
    class KeepsTheFirst(Counter):
        def on_step(self, step):
            if step == 1:
                self.save_checkpoint(keep=True)

    run(make_config(tmp_path, save_steps=1, max_ckpt_to_keep=2), KeepsTheFirst)
    names = [path.name for path in complete_checkpoints(tmp_path / "exp")]
    assert names == ["checkpoint-1", "checkpoint-5", "checkpoint-6"]


def test_when_to_validate(tmp_path):
    def steps(every):
        pipeline = Counter(make_config(tmp_path, eval_steps=every))
        pipeline.close()
        return [step for step in range(7) if pipeline.should_eval(step)]

    assert steps(3) == [0, 3, 6]
    assert steps(-1) == steps(0) == []


SCRIPT = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {here!r}]
from test_base_pipeline import Counter, make_config

Counter._write_report = lambda self: None

class Interrupted(Counter):
    def on_step(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.{name})
            print("step went on", flush=True)
        if step == 2 and {twice}:
            os.kill(os.getpid(), signal.{name})
            print("never", flush=True)

try:
    with Interrupted(make_config({out!r}), progress=None) as pipeline:
        pipeline.run()
except KeyboardInterrupt:
    print("stopped at once")
"""


def interrupted(tmp_path, *, name="SIGINT", twice=False) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    code = SCRIPT.format(
        tests=str(here.parent), here=str(here), out=str(tmp_path), name=name, twice=twice
    )
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, name):
    result = interrupted(tmp_path, name=name)
    folder = tmp_path / "exp"
    assert result.returncode == 0, result.stderr
    assert "Finishing this step, then saving. Once more stops at once." in result.stderr
    assert result.stdout.splitlines() == [
        "step went on",
        "Stopped after 3 of 6 steps: interrupted.",
        f"To go on: {resume_command(folder)}",
        "Counted.",
    ]
    assert [path.name for path in complete_checkpoints(folder)] == ["checkpoint-3"]
    assert RunFolder(folder).info()["status"] == "stopped"
    overrides = [f"resume_from_checkpoint={folder}"]
    again = run(load_config(folder / "config.yaml", overrides, warn=False).config)
    assert again.run_dir == folder and again.total == 15


@pytest.mark.slow
def test_the_second_signal_stops_at_once(tmp_path):
    result = interrupted(tmp_path, twice=True)
    assert result.stdout.splitlines() == ["step went on", "stopped at once"]
    assert RunFolder(tmp_path / "exp").info()["status"] == "stopped"
    assert complete_checkpoints(tmp_path / "exp") == []


def test_a_constructor_that_fails_marks_its_run_as_failed(tmp_path):
    class Broken(Counter):
        def load_states(self, states): ...

        def restore(self):
            raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        Broken(make_config(tmp_path))
    assert RunFolder(tmp_path / "exp").info()["status"] == "failed"
    # Nothing was trained, so the corrected config gets the same folder.
    assert run(make_config(tmp_path)).run_dir == tmp_path / "exp"


class Echo(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> str:
        return self.pipeline_config.output_dir

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, global_step: int) -> dict[str, float]:
        (Path(self.pipeline_config.output_dir) / f"echo-{global_step}").write_text("")
        return {"time/echo/do_checkpoint/total": 0.25}


def test_clusters_of_roles_are_made_initialized_saved_and_ended(tmp_path):
    config = make_config(tmp_path, actor_train=WorkerConfig(worker_cls=f"{__name__}.Echo"))
    role = config.actor_train.model_copy(update={"worker_cls": Echo, "name": "actor_train"})
    config = config.model_copy(update={"actor_train": role})

    class WithCluster(Counter):
        def __init__(self, pipeline_config, *, progress=False):
            super().__init__(pipeline_config, progress=progress)
            self.actor_train = self.make_cluster("actor_train")
            self.initialize(self.actor_train)
            self.set_checkpoint_clusters(self.actor_train)

    pipeline = WithCluster(config)
    assert isinstance(pipeline.actor_train, Cluster)
    assert pipeline.actor_train.where() == [str(tmp_path / "exp")]
    message = "critic is no role of this run; its roles are actor_train, reference"
    with pytest.raises(ConfigError, match=message):
        pipeline.make_cluster("critic")
    pipeline.run()
    assert sorted(path.name for path in (tmp_path / "exp").glob("echo-*")) == ["echo-4", "echo-6"]
    # The time that saving took stands in the line of the step that was saved.
    lines = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    times = [line.get("time/echo/do_checkpoint/total") for line in lines]
    assert times == [None, None, None, 0.25, None, 0.25]
    with pytest.raises(Exception, match="was shut down"):
        pipeline.actor_train.where()
    assert pipeline.model_folder() == tmp_path / "exp/checkpoints/checkpoint-6/actor_train"


def test_a_checkpoint_is_complete_only_when_the_line_of_its_step_is_there(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("roll.pipeline.base_pipeline.save_pipeline_state", full)
    with pytest.raises(OSError, match="no space left"):
        run(make_config(tmp_path))
    assert steps_of(tmp_path / "exp") == [0, 1, 2, 3]
    assert complete_checkpoints(tmp_path / "exp") == []


def test_ctrl_c_after_the_step_was_logged_saves_it_too(tmp_path):
    class Late(Counter):
        def log(self, step, metrics):
            logged = super().log(step, metrics)
            if step == 1:
                signal.raise_signal(signal.SIGINT)
            return logged

    run(make_config(tmp_path), Late, progress=False)
    assert [path.name for path in complete_checkpoints(tmp_path / "exp")] == ["checkpoint-2"]
    assert RunFolder(tmp_path / "exp").info()["status"] == "stopped"
    assert steps_of(tmp_path / "exp") == [0, 1]


def test_missing_gpus_are_an_error_with_the_override_that_helps(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    role = {
        "worker_cls": "roll.distributed.executor.worker.Worker",
        "device_mapping": [0],
        "strategy_args": {"strategy_name": "hf_train"},
    }
    pipeline = Counter(make_config(tmp_path, num_gpus_per_node=1, actor_train=role))
    message = r"names GPU 0, but this machine shows 0 GPU.*actor_train.device_mapping=null"
    with pytest.raises(ConfigError, match=message):
        pipeline.make_cluster("actor_train")
    pipeline.close("failed")


def test_a_report_is_written_and_named_and_a_broken_one_does_not_fail_the_run(
    tmp_path, capsys, monkeypatch, caplog
):
    run(make_config(tmp_path), progress=None)
    assert (tmp_path / "exp" / "report.html").is_file()
    assert f"Report: {tmp_path}/exp/report.html" in capsys.readouterr().out

    def broken(folders):
        raise ValueError("no template")

    monkeypatch.setattr("roll.viewer.build_report", broken)
    assert RunFolder(run(make_config(tmp_path)).run_dir).info()["status"] == "finished"
    assert "the report could not be written (ValueError: no template)" in caplog.text


def test_summaries_are_json(tmp_path):
    pipeline = Counter(make_config(tmp_path))
    pipeline.summary["validation"] = {"loss": float("nan"), "acc": 0.5}
    pipeline.run()
    text = (tmp_path / "exp" / "run.json").read_text()
    summary = json.loads(text, parse_constant=pytest.fail)["summary"]
    assert summary == {"validation": {"loss": None, "acc": 0.5}}
