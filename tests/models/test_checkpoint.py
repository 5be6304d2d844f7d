"""Checkpoints: exact resume, readable by plain transformers, whole or absent, clear about
misfits."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from lab_worker import assert_same
from safetensors.torch import load_file
from tiny_models import make_model_folder, tiny_batch, tiny_config, tiny_model, tiny_tokenizer
from torch import nn
from training_setup import PROBES, make_config
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from roll.algorithms.kl import AdaptiveKLController
from roll.algorithms.rewards import RunningMoments
from roll.configs.arguments import ModelArguments
from roll.datasets.sampler import EpochSampler
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError, DataError
from roll.models.checkpoint import (
    atomic_folder,
    checkpoint_folder,
    complete_checkpoints,
    find_checkpoint,
    get_latest_ckpt,
    load_hf_weights,
    load_pipeline_state,
    prune_checkpoints,
    read_hf_weights,
    save_pipeline_state,
    write_hf_files,
)
from roll.models.lora import adapter_disabled, add_lora
from roll.models.model_providers import default_actor_model_provider

TESTS = str(Path(__file__).parents[1])


def save(model, folder, state_dict=None):
    with atomic_folder(folder) as temporary:
        write_hf_files(model, tiny_tokenizer(), temporary, state_dict)


def logits(model):
    with torch.no_grad():
        return model.eval()(**tiny_batch([7, 3])).logits


def same_weights(one, other):
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def lora_actor(folder, *, seed=0, **settings):
    settings = {"lora_target": "all", **settings}
    args = ModelArguments(model_name_or_path=str(folder), dtype="fp32", **settings)
    torch.manual_seed(seed)
    model = default_actor_model_provider(tiny_tokenizer(), args, None, True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


# Weights of whole models


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_through_plain_transformers(tmp_path, family, tied, dtype):
    model = tiny_model(family, tied=tied, seed=4, dtype=dtype)
    save(model, tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert again.dtype == dtype
    assert same_weights(again, model) and torch.equal(logits(again), logits(model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b" and tokenizer.chat_template
    assert ("lm_head.weight" in load_file(tmp_path / "a" / "model.safetensors")) == (not tied)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    # Loading keeps the parameters that an optimizer knows, and draws no random number.
    target = tiny_model(family, tied=tied, seed=5, dtype=dtype)
    before = {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()}
    state = torch.get_rng_state()
    load_hf_weights(target, tmp_path / "a")
    assert same_weights(target, model)
    assert {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()} == before
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied
    assert torch.equal(torch.get_rng_state(), state)


def test_a_given_state_dict_is_written_and_its_tied_copy_dropped(tmp_path):
    other = tiny_model(seed=2)
    gathered = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    keys = set(gathered)
    save(tiny_model(seed=1), tmp_path / "a", gathered)
    assert set(gathered) == keys  # the caller's dictionary is left alone
    assert "lm_head.weight" not in load_file(tmp_path / "a" / "model.safetensors")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), other)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_trained_model_is_saved_with_the_cache_and_generation_config_it_came_with(
    tmp_path, use_cache
):
    folder = make_model_folder(tmp_path / "base", use_cache=use_cache)
    # Says nothing about the cache, as in most published models.
    (folder / "generation_config.json").write_text("{}")
    args = ModelArguments(model_name_or_path=str(folder), dtype="fp32")
    model = default_actor_model_provider(tiny_tokenizer(), args, None, True)
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.5  # transformers refuses to save that
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path / "refused")
    save(model, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["use_cache"] is use_cache
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text())["temperature"] == 0.5
    assert model.config.use_cache is False and model.generation_config.temperature == 0.5


def test_value_models_and_mixtures_of_experts_round_trip(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    def value_model():
        return AutoModelForTokenClassification.from_config(tiny_config(num_labels=1))

    def mixture():
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=50, hidden_size=64, intermediate_size=64, moe_intermediate_size=16,
                num_hidden_layers=1, head_dim=32, num_attention_heads=2, num_key_value_heads=2,
                num_experts=4, num_experts_per_tok=2, pad_token_id=0,
            )
        )  # fmt: skip

    for make in (value_model, mixture):
        model, target = make(), make()
        save(model, tmp_path / make.__name__)
        assert same_weights(type(model).from_pretrained(tmp_path / make.__name__), model)
        load_hf_weights(target, tmp_path / make.__name__)
        assert same_weights(target, model)
    # In memory the experts are one tensor; the file has the published names.
    saved = load_file(tmp_path / "mixture" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in saved


@pytest.mark.parametrize(
    ("saved", "messages"),
    [
        (
            {"intermediate_size": 32},
            ["0.mlp.down_proj.weight: saved with shape (64, 32), the model has (64, 96)"],
        ),
        (
            {"num_hidden_layers": 1},
            ["model.layers.1.input_layernorm.weight: missing in the checkpoint"],
        ),
        (
            {"num_hidden_layers": 9},
            ["model.layers.2.input_layernorm.weight: not a tensor of the model", "and 64 more"],
        ),
        (
            {"dtype": torch.bfloat16},
            ["norm.weight: saved as torch.bfloat16, the model has torch.float32"],
        ),
    ],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path, saved, messages):
    save(tiny_model(**saved), tmp_path / "a")
    target = tiny_model(seed=3)
    with pytest.raises(DataError) as error:
        load_hf_weights(target, tmp_path / "a")
    for message in (str(tmp_path / "a"), *messages):
        assert message in str(error.value)
    assert same_weights(target, tiny_model(seed=3))


def test_folders_that_are_not_checkpoints(tmp_path):
    with pytest.raises(DataError, match="no such checkpoint folder"):
        load_hf_weights(tiny_model(), tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"no model\*.safetensors \(found: notes.txt\)"):
        load_hf_weights(tiny_model(), tmp_path)
    write_hf_files(tiny_model(), tiny_tokenizer(), tmp_path)
    assert (tmp_path / "notes.txt").is_file() and (tmp_path / "model.safetensors").is_file()


# LoRA


@pytest.mark.parametrize("additional", [None, "lm_head"], ids=["adapter only", "and the head"])
@pytest.mark.parametrize("named", [True, False], ids=["base with a name", "random base"])
def test_adapters_are_readable_by_transformers_and_continue_training(tmp_path, additional, named):
    base = make_model_folder(tmp_path / "base", tied=False)
    settings = {"additional_target": additional}
    model, other, third = (lora_actor(base, seed=seed, **settings) for seed in range(3))
    if additional:
        nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    for actor in (model, third):
        if not named:  # as after random initialisation: the base cannot be loaded again
            actor.base_model.model.name_or_path = actor.base_model.model.config.name_or_path = ""
    expected, flags = logits(model), [parameter.requires_grad for parameter in model.parameters()]
    save(model, tmp_path / "a")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert ("adapter_model.safetensors" in names) is named
    assert ({"model.safetensors", "config.json", "adapter"} <= names) is not named
    assert not named or not {"model.safetensors", "config.json"} & names
    # Saving leaves the adapter as it was.
    assert torch.equal(logits(model), expected)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    with adapter_disabled(model):
        assert torch.equal(logits(model), logits(tiny_model(tied=False)))

    def loaded(folder):
        if named and additional:  # transformers alone does not read trained copies of modules
            options = {"model_name_or_path": str(base), "dtype": "fp32"}
            args = ModelArguments(adapter_name_or_path=str(folder), **options)
            return logits(default_actor_model_provider(tiny_tokenizer(), args))
        return logits(AutoModelForCausalLM.from_pretrained(folder))

    torch.testing.assert_close(loaded(tmp_path / "a"), expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode([10]) == tiny_tokenizer().decode(
        [10]
    )
    assert not torch.equal(logits(other), expected)
    load_hf_weights(other, tmp_path / "a")
    assert same_weights(other, model)
    if not named:
        load_hf_weights(tiny_model(tied=False), tmp_path / "a")  # a plain model takes merged ones
    # Tensors that were gathered elsewhere are written instead of the model's own.
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(third, tmp_path / "b", gathered)
    torch.testing.assert_close(loaded(tmp_path / "b"), expected, rtol=1e-4, atol=1e-4)


def test_adapters_that_do_not_fit(tmp_path):
    base = make_model_folder(tmp_path / "base")
    save(lora_actor(base, lora_rank=4), tmp_path / "a")
    settings = ModelArguments(lora_target="all", lora_rank=4)
    half = add_lora(tiny_model(), settings, is_trainable=True).bfloat16()
    for target, folder, message in (
        (
            lora_actor(base, lora_rank=2),
            "a",
            r"q_proj.lora_A.weight: saved with shape \(4, 64\), the model has \(2, 64\)",
        ),
        (
            lora_actor(base, lora_rank=4, lora_target="q_proj"),
            "a",
            r"gate_proj.lora_A.weight: not a tensor of the model",
        ),
        (tiny_model(), "a", r"it holds a LoRA adapter, and this model has none"),
        (lora_actor(base), "base", r"no adapter_model.safetensors, which a model with LoRA needs"),
        (half, "a", r"saved as torch.float32, the model has torch.bfloat16"),
    ):
        with pytest.raises(DataError, match=message):
            load_hf_weights(target, tmp_path / folder)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_gathered_fsdp2_state_and_back(tmp_path, lone_process_group, lora):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))  # the default would be a GPU, where there is one
    base = make_model_folder(tmp_path / "base")
    model, target = (
        fully_shard(lora_actor(base, seed=seed) if lora else tiny_model(seed=seed), mesh=mesh)
        for seed in (1, 2)
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
    with pytest.raises(ValueError, match="gather its full state dict"):
        save(model, tmp_path / "a")
    save(model, tmp_path / "a", get_model_state_dict(model, options=options))
    expected = logits(model)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "a")), expected)
    assert not torch.equal(logits(target), expected)
    set_model_state_dict(target, read_hf_weights(target, tmp_path / "a"), options=options)
    assert torch.equal(logits(target), expected)


# Whole or not at all


def test_an_error_while_writing_leaves_the_previous_folder(tmp_path):
    target = tmp_path / "a"
    for text in ("first", "second"):
        with atomic_folder(target) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text(text)
            assert not target.exists() or (target / "deep" / "file").read_text() == "first"
    with pytest.raises(OSError, match="disk full"), atomic_folder(target) as folder:
        (folder / "half").write_text("x")
        raise OSError("disk full")
    assert (target / "deep" / "file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    for name in ("a", "step[1]"):
        for leftover in (f".{name}.tmp-1", f".{name}.old-1", f".{name}b.tmp-1"):
            (tmp_path / leftover).mkdir()
        (tmp_path / f".{name}.old-1" / "file").write_text("previous")
        # Died between the two renames: the previous folder comes back before the new is written.
        with atomic_folder(tmp_path / name) as folder:
            assert (tmp_path / name / "file").read_text() == "previous"
            (folder / "file").write_text("new")
        (tmp_path / f".{name}.old-2").mkdir()
        with atomic_folder(tmp_path / name) as folder:
            (folder / "file").write_text("newer")
        assert (tmp_path / name / "file").read_text() == "newer"
    kept = {"a", ".ab.tmp-1", "step[1]", ".step[1]b.tmp-1"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def local_cluster(config):
    cluster = Cluster("actor_train", PROBES["dpo"], ResourceManager(0, 1), config.actor_train)
    cluster.initialize(config)
    return cluster


@pytest.mark.slow
def test_kill_while_saving_leaves_the_previous_checkpoint_whole(tmp_path):
    folder, run = make_model_folder(tmp_path / "model"), tmp_path / "run"
    code = f"""
import sys
sys.path.insert(0, {TESTS!r})
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
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
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
    assert local_cluster(config).workers[0].strategy.scheduler.last_epoch == 1


# Resume

# Trains steps FIRST ... LAST-1, continuing from a checkpoint if told to; OUT gets the final state.
SCRIPT = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    from training_setup import PROBES, make_batch, make_config
    from roll.distributed.executor.cluster import Cluster
    from roll.distributed.scheduler.resource_manager import ResourceManager

    config = make_config("dpo", {folder!r}, strategy={strategy!r}, workers={workers},
                         output_dir={run!r}, resume_from_checkpoint={resume!r},
                         training_args={training!r})
    resources = ResourceManager(0, 1, backend={backend!r})
    with Cluster("actor_train", PROBES["dpo"], resources, config.actor_train) as cluster:
        cluster.initialize(config)
        metrics = []
        for step in range({first}, {last}):
            batch = make_batch("dpo", seed=step)
            result = cluster.train_step(batch).meta_info["metrics"]
            metrics.append({{k: v for k, v in result.items() if not k.startswith("time/")}})
        if {save!r}:
            cluster.do_checkpoint({last} - 1)
        state = cluster.execute_all_sync("training_state")
    torch.save({{"metrics": metrics, "state": state}}, {out!r})
    """
)


def run_training(out, **options):
    training = {"learning_rate": 1e-2, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
    values = {"tests": TESTS, "resume": False, "save": False, "training": training, **options}
    code = SCRIPT.format(out=str(out), **values)
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
    folder, run = str(make_model_folder(tmp_path / "model")), str(tmp_path / "run")
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


def test_loading_explains_what_does_not_fit(tmp_path):
    folder, run = make_model_folder(tmp_path / "model"), str(tmp_path / "run")
    local_cluster(make_config("dpo", folder, output_dir=run)).do_checkpoint(1)
    saved = checkpoint_folder(run, 1) / "actor_train"
    half = make_config("dpo", folder, output_dir=run, model_args={"dtype": "bf16"})
    message = r"trained in torch\.float32 and this run uses torch\.bfloat16"
    with pytest.raises(DataError, match=message):
        local_cluster(half).workers[0].strategy.load_checkpoint(saved)
    wider = make_model_folder(tmp_path / "wider", "qwen2", intermediate_size=40)
    strategy = local_cluster(make_config("dpo", wider, output_dir=run)).workers[0].strategy
    with pytest.raises(DataError, match="saved with shape"):
        strategy.load_checkpoint(saved)
    with pytest.raises(DataError, match=r"state\.json: cannot be read"):
        strategy.load_checkpoint(tmp_path / "model")
    state = saved / "training" / "state.json"
    text = state.read_text()
    state.write_text(text.replace('"format_version": 1', '"format_version": 7'))
    with pytest.raises(DataError, match=r"format_version is 7, this version of roll reads 1"):
        strategy.load_checkpoint(saved)
    state.write_text(text)
    (saved / "training" / "optimizer").rename(saved / "elsewhere")
    strategy = local_cluster(make_config("dpo", folder, output_dir=run)).workers[0].strategy
    with pytest.raises(DataError, match=r"no optimizer state here; to start from the weights"):
        strategy.load_checkpoint(saved)


# Which checkpoints there are, and the pipeline's state


def test_which_checkpoints_count_and_which_are_kept(tmp_path):
    folders = {step: checkpoint_folder(tmp_path, step) for step in (2, 10, 30, 40)}
    for step, folder in folders.items():
        (folder / "actor_train").mkdir(parents=True)
        if step != 30:
            (folder / "pipeline").mkdir()
    assert complete_checkpoints(tmp_path) == [folders[2], folders[10], folders[40]]
    assert get_latest_ckpt(tmp_path) == folders[40]
    assert find_checkpoint(tmp_path, False) is None
    assert find_checkpoint(tmp_path, True) == folders[40]
    assert find_checkpoint(tmp_path / "new", True) is None
    assert find_checkpoint("elsewhere", str(folders[2])) == folders[2]
    message = r"checkpoint-30 is not a complete checkpoint.*nearby: .*checkpoint-10"
    with pytest.raises(ConfigError, match=message):
        find_checkpoint(tmp_path, str(folders[30]))
    with pytest.raises(ConfigError, match="no complete checkpoint is nearby"):
        find_checkpoint(tmp_path / "new", str(folders[30]))
    assert prune_checkpoints(tmp_path, 0) == []
    assert prune_checkpoints(tmp_path, 1, keep_steps=[2]) == [folders[10]]
    assert [folder.exists() for folder in folders.values()] == [True, False, True, True]


def test_what_the_pipeline_carries_continues_exactly(tmp_path):
    def carried():
        return {
            "data": EpochSampler(10, 4, seed=3),
            "kl": AdaptiveKLController(0.1, 0.05, 100),
            "moments": RunningMoments(),
        }

    before, after = carried(), carried()
    before["data"].next_batch()
    before["kl"].update(current=0.123456789, n_steps=7)
    before["moments"].update(torch.tensor([0.1, 0.7, 1 / 3]))
    torch.manual_seed(11)
    states = {name: part.state_dict() for name, part in before.items()}
    for step in (1, 2):
        save_pipeline_state(tmp_path, step, states, max_ckpt_to_keep=1)
    drawn = torch.rand(3)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2"]

    step, states = load_pipeline_state(checkpoint_folder(tmp_path, 2))
    for name, part in after.items():
        part.load_state_dict(states[name])
    assert step == 2
    assert torch.equal(torch.rand(3), drawn)
    assert list(after["data"].next_batch()) == list(before["data"].next_batch())
    assert after["kl"].value == before["kl"].value
    assert after["moments"] == before["moments"]
    (checkpoint_folder(tmp_path, 2) / "pipeline" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json: cannot be read .* use an earlier one"):
        load_pipeline_state(checkpoint_folder(tmp_path, 2))
