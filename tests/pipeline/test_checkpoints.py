"""Exact resume, checkpoints that survive a crash, and checkpoints that other worlds can read. Real processes."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from lab_worker import assert_same
from tiny_models import make_model_folder
from training_setup import PROBES, make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.algorithms.rewards import RunningMoments
from roll.datasets.sampler import EpochSampler
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError, DataError
from roll.utils.checkpoint_manager import (
    checkpoint_folder,
    complete_checkpoints,
    find_checkpoint,
    get_latest_ckpt,
    load_pipeline_state,
    prune_checkpoints,
    save_pipeline_state,
)
from roll.utils.kl_controller import AdaptiveKLController

TRAINING = {"learning_rate": 1e-2, "warmup_steps": 2, "lr_scheduler_type": "cosine"}

# Trains steps FIRST ... LAST-1, continuing from a checkpoint if told to; writes metrics and final state to OUT.
SCRIPT = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    from training_setup import PROBES, make_batch, make_config
    from roll.distributed.executor.cluster import Cluster
    from roll.distributed.scheduler.resource_manager import ResourceManager
    from roll.distributed.strategy.checkpoint import random_states

    first, last, resume, save = {first}, {last}, {resume!r}, {save!r}
    config = make_config("dpo", {folder!r}, strategy={strategy!r}, workers={workers}, output_dir={run!r},
                         training_args={training!r}, resume_from_checkpoint=resume)
    resources = ResourceManager(0, 1, backend={backend!r})
    with Cluster("actor_train", PROBES["dpo"], resources, config.actor_train) as cluster:
        cluster.initialize(config)
        metrics = []
        for step in range(first, last):
            batch = make_batch("dpo", seed=step)
            result = cluster.train_step(batch).meta_info["metrics"]
            metrics.append({{k: v for k, v in result.items() if not k.startswith("time/")}})
        if save:
            cluster.do_checkpoint(last - 1)
        state = cluster.execute_all_sync("training_state")
    torch.save({{"metrics": metrics, "state": state}}, {out!r})
    """
)


def run_training(out: Path, **options) -> dict:
    defaults = {
        "tests": str(Path(__file__).parents[1]),
        "resume": False,
        "save": False,
        "training": TRAINING,
    }
    code = SCRIPT.format(**{**defaults, "out": str(out), **options})
    subprocess.run([sys.executable, "-c", code], check=True)
    return torch.load(out, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "backend"), [("hf_train", 1, "local"), ("fsdp2_train", 2, "ray")]
)
def test_exact_resume_in_a_new_process(tmp_path, strategy, workers, backend):
    folder = str(make_model_folder(tmp_path / "model"))
    common = {"folder": folder, "strategy": strategy, "workers": workers, "backend": backend}
    whole = run_training(tmp_path / "whole.pt", first=0, last=6, run=str(tmp_path / "a"), **common)
    run = str(tmp_path / "b")
    start = run_training(tmp_path / "start.pt", first=0, last=3, run=run, save=True, **common)
    (checkpoint_folder(run, 2) / "pipeline").mkdir()
    rest = run_training(tmp_path / "rest.pt", first=3, last=6, run=run, resume=True, **common)
    assert_same(start["metrics"] + rest["metrics"], whole["metrics"])
    assert_same(rest["state"], whole["state"])
    assert len({str(metrics["actor/lr"]) for metrics in whole["metrics"]}) > 3


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_loads_with_one_and_in_plain_transformers(tmp_path):
    folder = str(make_model_folder(tmp_path / "model"))
    run = str(tmp_path / "run")
    options = {"folder": folder, "strategy": "fsdp2_train", "run": run}
    two = run_training(
        tmp_path / "2.pt", first=0, last=2, save=True, workers=2, backend="ray", **options
    )
    (checkpoint_folder(run, 1) / "pipeline").mkdir()
    one = run_training(
        tmp_path / "1.pt", first=2, last=2, resume=True, workers=1, backend="local", **options
    )
    for key in ("weights", "optimizer", "scheduler"):
        assert_same(one["state"][0][key], two["state"][0][key])
    saved = checkpoint_folder(run, 1) / "actor_train"
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for name, value in plain.named_parameters():
        assert torch.equal(value, one["state"][0]["weights"][name])
    assert AutoTokenizer.from_pretrained(saved)("ab")["input_ids"]


def local_cluster(config):
    cluster = Cluster("actor_train", PROBES["dpo"], ResourceManager(0, 1), config.actor_train)
    cluster.initialize(config)
    return cluster


@pytest.mark.slow
def test_kill_while_saving_leaves_the_previous_checkpoint_whole(tmp_path):
    folder, run = make_model_folder(tmp_path / "model"), tmp_path / "run"
    script = tmp_path / "saver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            from training_setup import PROBES, make_batch, make_config
            from roll.distributed.executor.cluster import Cluster
            from roll.distributed.scheduler.resource_manager import ResourceManager
            config = make_config("dpo", {str(folder)!r}, output_dir={str(run)!r})
            cluster = Cluster("actor_train", PROBES["dpo"], ResourceManager(0, 1), config.actor_train)
            cluster.initialize(config)
            cluster.train_step(make_batch("dpo"))
            cluster.do_checkpoint(1)
            print("saved", flush=True)
            while True:
                cluster.do_checkpoint(1)
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    # Libraries may print lines of their own before.
    assert process.stdout is not None and "saved\n" in process.stdout
    checkpoint = checkpoint_folder(run, 1)
    (checkpoint / "pipeline").mkdir()
    # Strike while a temporary folder is being written.
    while not list(checkpoint.glob(".actor_train.tmp-*")):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    config = make_config("dpo", folder, output_dir=str(run), resume_from_checkpoint=True)
    cluster = local_cluster(config)
    assert cluster.workers[0].strategy.scheduler.last_epoch == 1


def test_loading_explains_another_precision_and_another_model(tmp_path):
    folder, run = make_model_folder(tmp_path / "model"), str(tmp_path / "run")
    config = make_config("dpo", folder, output_dir=run)
    cluster = local_cluster(config)
    cluster.do_checkpoint(1)
    saved = checkpoint_folder(run, 1) / "actor_train"
    strategy = (
        local_cluster(make_config("dpo", folder, output_dir=run, model_args={"dtype": "bf16"}))
        .workers[0]
        .strategy
    )
    with pytest.raises(
        DataError, match=r"trained in torch\.float32 and this run uses torch\.bfloat16"
    ):
        strategy.load_checkpoint(saved)
    wider = make_model_folder(tmp_path / "wider", "qwen2", intermediate_size=40)
    strategy = local_cluster(make_config("dpo", wider, output_dir=run)).workers[0].strategy
    with pytest.raises(DataError, match="saved with shape"):
        strategy.load_checkpoint(saved)
    with pytest.raises(DataError, match=r"state\.json: not found"):
        strategy.load_checkpoint(tmp_path / "model")


def test_which_checkpoints_count_and_which_are_kept(tmp_path):
    for step in (2, 10, 30):
        (checkpoint_folder(tmp_path, step) / "actor_train").mkdir(parents=True)
        if step != 30:
            (checkpoint_folder(tmp_path, step) / "pipeline").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-10",
    ]
    assert get_latest_ckpt(tmp_path) == checkpoint_folder(tmp_path, 10)
    assert find_checkpoint(tmp_path, False) is None
    assert find_checkpoint(tmp_path / "new", True) is None
    assert find_checkpoint("elsewhere", str(checkpoint_folder(tmp_path, 2))) == checkpoint_folder(
        tmp_path, 2
    )
    with pytest.raises(
        ConfigError, match=r"checkpoint-30 is not a complete checkpoint.*checkpoint-10"
    ):
        find_checkpoint(tmp_path, str(checkpoint_folder(tmp_path, 30)))
    assert prune_checkpoints(tmp_path, 0) == []
    assert prune_checkpoints(tmp_path, 1) == [checkpoint_folder(tmp_path, 2)]
    assert not checkpoint_folder(tmp_path, 2).exists()
    assert checkpoint_folder(tmp_path, 30).exists()


def test_what_the_pipeline_carries_continues_exactly(tmp_path):
    sampler = EpochSampler(10, 4, seed=3)
    controller, moments = AdaptiveKLController(0.1, 0.05, 100), RunningMoments()
    sampler.next_batch()
    controller.update(current=0.123456789, n_steps=7)
    moments.update(torch.tensor([0.1, 0.7, 1 / 3]))
    torch.manual_seed(11)
    for step in (1, 2):
        states = {
            "data": sampler.state_dict(),
            "kl": controller.state_dict(),
            "moments": moments.state_dict(),
        }
        save_pipeline_state(tmp_path, step, states, max_ckpt_to_keep=1)
    drawn = torch.rand(3)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2"]

    step, states = load_pipeline_state(checkpoint_folder(tmp_path, 2))
    other_sampler = EpochSampler(10, 4, seed=3)
    other_controller, other_moments = AdaptiveKLController(0.1, 0.05, 100), RunningMoments()
    other_sampler.load_state_dict(states["data"])
    other_controller.load_state_dict(states["kl"])
    other_moments.load_state_dict(states["moments"])
    assert step == 2
    assert torch.equal(torch.rand(3), drawn)
    assert list(other_sampler.next_batch()) == list(sampler.next_batch())
    assert other_controller.value == controller.value
    assert other_moments == moments


def test_a_damaged_pipeline_state_is_explained(tmp_path):
    save_pipeline_state(tmp_path, 1, {})
    folder = checkpoint_folder(tmp_path, 1)
    (folder / "pipeline" / "state.json").write_text("{")
    with pytest.raises(
        DataError, match=r"state\.json: cannot be read .* use an earlier checkpoint"
    ):
        load_pipeline_state(folder)
