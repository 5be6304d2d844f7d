"""Checkpoints: readable by plain transformers, whole or absent, and clear about what does not fit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model_folder, tiny_batch, tiny_config, tiny_model, tiny_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from roll.configs.model_args import ModelArguments
from roll.exceptions import DataError
from roll.models.hf_checkpoint import (
    atomic_folder,
    load_hf_weights,
    read_hf_weights,
    save_hf_checkpoint,
    write_hf_files,
)
from roll.models.lora import adapter_disabled, add_lora
from roll.models.model_providers import default_actor_model_provider

PROJECT = Path(__file__).parents[2]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tiny_batch([7, 3])).logits


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def lora_actor(folder: Path, *, seed: int = 0, **settings) -> nn.Module:
    args = ModelArguments(
        model_name_or_path=str(folder), dtype="fp32", **{"lora_target": "all", **settings}
    )
    torch.manual_seed(seed)
    model = default_actor_model_provider(tiny_tokenizer(), args, None, True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


# Whole models


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_through_plain_transformers(tmp_path, family, tied, dtype):
    model = tiny_model(family, tied=tied, seed=4, dtype=dtype)
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "step-1")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert again.dtype == dtype
    assert same_weights(again, model) and torch.equal(logits(again), logits(model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step-1")
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b" and tokenizer.chat_template
    assert ("lm_head.weight" in load_file(tmp_path / "step-1" / "model.safetensors")) == (not tied)
    target = tiny_model(family, tied=tied, seed=5, dtype=dtype)
    load_hf_weights(target, tmp_path / "step-1")
    assert same_weights(target, model)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_loading_keeps_the_parameters_that_an_optimizer_knows(tmp_path):
    save_hf_checkpoint(tiny_model(seed=1), tiny_tokenizer(), tmp_path / "a")
    target = tiny_model(seed=2)
    before = {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()}
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    load_hf_weights(target, tmp_path / "a")
    assert {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()} == before
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert torch.equal(torch.rand(2), expected)


def test_a_given_state_dict_is_written_and_its_tied_copy_dropped(tmp_path):
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    gathered = {
        name: tensor.clone() for name, tensor in other.state_dict().items()
    }  # two tensors for the tied weight
    keys = set(gathered)
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a", gathered)
    assert set(gathered) == keys  # the caller's dictionary is left alone
    assert "lm_head.weight" not in load_file(tmp_path / "a" / "model.safetensors")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), other)


def test_a_trained_model_is_saved_with_its_cache_on_and_any_generation_config(tmp_path):
    folder = make_model_folder(tmp_path / "base")
    args = ModelArguments(model_name_or_path=str(folder), dtype="fp32")
    model = default_actor_model_provider(tiny_tokenizer(), args, None, True)
    model.generation_config.do_sample, model.generation_config.temperature = (
        False,
        0.5,
    )  # transformers refuses to save
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path / "refused")
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["use_cache"] is True
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text())["temperature"] == 0.5
    assert model.config.use_cache is False and model.generation_config.temperature == 0.5


def test_a_model_that_came_without_cache_is_saved_without_cache(tmp_path):
    folder = make_model_folder(tmp_path / "base", use_cache=False)
    (folder / "generation_config.json").write_text(
        "{}"
    )  # says nothing about the cache, as in most published models
    args = ModelArguments(model_name_or_path=str(folder), dtype="fp32")
    model = default_actor_model_provider(tiny_tokenizer(), args, None, True)
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["use_cache"] is False


def test_value_models_round_trip(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(tiny_config(num_labels=1))
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a")
    assert same_weights(AutoModelForTokenClassification.from_pretrained(tmp_path / "a"), model)
    target = AutoModelForTokenClassification.from_config(tiny_config(num_labels=1))
    load_hf_weights(target, tmp_path / "a")
    assert same_weights(target, model)


def test_a_mixture_of_experts_is_saved_in_its_published_format(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=1, head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in load_file(
        tmp_path / "a" / "model.safetensors"
    )
    torch.manual_seed(1)
    target = Qwen3MoeForCausalLM(config)
    load_hf_weights(target, tmp_path / "a")  # in memory the experts are one tensor
    assert same_weights(target, model)


# What does not fit


def test_another_shape_names_the_tensors_and_both_shapes(tmp_path):
    save_hf_checkpoint(tiny_model(intermediate_size=32), tiny_tokenizer(), tmp_path / "a")
    target = tiny_model()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(DataError) as error:
        load_hf_weights(target, tmp_path / "a")
    message = str(error.value)
    assert str(tmp_path / "a") in message
    assert (
        "model.layers.0.mlp.down_proj.weight: saved with shape (64, 32), the model has (64, 96)"
        in message
    )
    assert message.count("saved with shape") == 6
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_other_names_are_listed_from_both_sides(tmp_path):
    save_hf_checkpoint(tiny_model(num_hidden_layers=1), tiny_tokenizer(), tmp_path / "short")
    with pytest.raises(
        DataError, match=r"model.layers.1.input_layernorm.weight: missing in the checkpoint"
    ):
        load_hf_weights(tiny_model(), tmp_path / "short")
    save_hf_checkpoint(tiny_model(num_hidden_layers=3), tiny_tokenizer(), tmp_path / "long")
    with pytest.raises(
        DataError, match=r"model.layers.2.input_layernorm.weight: not a tensor of the model"
    ):
        load_hf_weights(tiny_model(), tmp_path / "long")
    save_hf_checkpoint(tiny_model(num_hidden_layers=9), tiny_tokenizer(), tmp_path / "longer")
    with pytest.raises(DataError, match=r"and 64 more"):
        load_hf_weights(tiny_model(), tmp_path / "longer")


def test_another_dtype_is_an_error_unless_asked_for(tmp_path):
    saved = tiny_model(dtype=torch.bfloat16)
    save_hf_checkpoint(saved, tiny_tokenizer(), tmp_path / "a")
    target = tiny_model(seed=3)
    with pytest.raises(
        DataError, match=r"norm.weight: saved as torch.bfloat16, the model has torch.float32"
    ):
        load_hf_weights(target, tmp_path / "a")
    load_hf_weights(target, tmp_path / "a", cast=True)
    assert all(
        torch.equal(t, saved.state_dict()[name].float()) for name, t in target.state_dict().items()
    )


def test_folders_that_are_not_checkpoints(tmp_path):
    with pytest.raises(DataError, match="no such checkpoint folder"):
        load_hf_weights(tiny_model(), tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"no model\*.safetensors \(found: notes.txt\)"):
        load_hf_weights(tiny_model(), tmp_path)


# LoRA


def test_an_adapter_checkpoint_is_small_and_readable_by_transformers(tmp_path):
    base = make_model_folder(tmp_path / "base")
    model = lora_actor(base)
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode(
        [10, 11]
    ) == tiny_tokenizer().decode([10, 11])
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "a")), logits(model))
    args = ModelArguments(
        model_name_or_path=str(base), adapter_name_or_path=str(tmp_path / "a"), dtype="fp32"
    )
    assert torch.equal(logits(default_actor_model_provider(tiny_tokenizer(), args)), logits(model))


@pytest.mark.parametrize("additional", [None, "lm_head"], ids=["adapter only", "and the head"])
def test_merged_and_adapter_checkpoints_continue_training_the_same(tmp_path, additional):
    base = make_model_folder(tmp_path / "base", tied=False)
    model = lora_actor(base, additional_target=additional)
    if additional:
        nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    for merge in (False, True):
        folder = tmp_path / f"merge-{merge}"
        save_hf_checkpoint(model, tiny_tokenizer(), folder, merge_adapter=merge)
        target = lora_actor(base, seed=7, additional_target=additional)
        assert not torch.equal(logits(target), logits(model))
        load_hf_weights(target, folder)
        assert same_weights(target, model)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merge-True")
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    load_hf_weights(
        tiny_model(tied=False), tmp_path / "merge-True"
    )  # a plain model takes the merged weights


def test_an_adapter_on_random_weights_is_saved_merged_because_its_base_has_no_name(tmp_path):
    base = make_model_folder(tmp_path / "base", weights=False)
    model = lora_actor(base, random_init=True)
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    assert (tmp_path / "a" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("merge", [False, True])
def test_a_given_state_dict_of_a_lora_model(tmp_path, merge):
    base = make_model_folder(tmp_path / "base")
    model, other = lora_actor(base, seed=1), lora_actor(base, seed=2)
    gathered = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a", gathered, merge_adapter=merge)
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "a"))
    torch.testing.assert_close(found, logits(other), rtol=1e-5, atol=1e-5)


def test_adapters_that_do_not_fit(tmp_path):
    base = make_model_folder(tmp_path / "base")
    save_hf_checkpoint(lora_actor(base, lora_rank=4), tiny_tokenizer(), tmp_path / "a")
    with pytest.raises(
        DataError,
        match=r"q_proj.lora_A.weight: saved with shape \(4, 64\), the model has \(2, 64\)",
    ):
        load_hf_weights(lora_actor(base, lora_rank=2), tmp_path / "a")
    with pytest.raises(DataError, match=r"gate_proj.lora_A.weight: not a tensor of the model"):
        load_hf_weights(lora_actor(base, lora_rank=4, lora_target="q_proj"), tmp_path / "a")
    with pytest.raises(DataError, match=r"it holds a LoRA adapter, and this model has none"):
        load_hf_weights(tiny_model(), tmp_path / "a")
    with pytest.raises(
        DataError, match=r"has no adapter_model.safetensors, which a model with LoRA needs"
    ):
        load_hf_weights(lora_actor(base), base)
    half = add_lora(
        tiny_model(), ModelArguments(lora_target="all", lora_rank=4), is_trainable=True
    ).bfloat16()
    with pytest.raises(DataError, match=r"saved as torch.float32, the model has torch.bfloat16"):
        load_hf_weights(half, tmp_path / "a")
    load_hf_weights(half, tmp_path / "a", cast=True)


def test_saving_leaves_the_adapter_as_it_was(tmp_path):
    base = make_model_folder(tmp_path / "base")
    model = lora_actor(base)
    expected, flags = logits(model), [parameter.requires_grad for parameter in model.parameters()]
    for merge in (False, True):
        save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / f"{merge}", merge_adapter=merge)
    assert torch.equal(logits(model), expected)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    with adapter_disabled(model):
        assert torch.equal(logits(model), logits(tiny_model()))


# Sharded models


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_gathered_fsdp2_state_and_back(tmp_path, one_rank, lora):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))  # the default would be a GPU, where there is one

    base = make_model_folder(tmp_path / "base")

    def sharded(seed: int) -> nn.Module:
        model = lora_actor(base, seed=seed) if lora else tiny_model(seed=seed)
        return fully_shard(model, mesh=mesh)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
    model, target = sharded(1), sharded(2)
    with pytest.raises(ValueError, match="gather its full state dict"):
        save_hf_checkpoint(model, tiny_tokenizer(), tmp_path / "a")
    with pytest.raises(ValueError, match="use read_hf_weights"):
        load_hf_weights(model, base)
    save_hf_checkpoint(
        model, tiny_tokenizer(), tmp_path / "a", get_model_state_dict(model, options=options)
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert type(plain).__name__ == "Qwen2ForCausalLM"
    expected = logits(model)
    assert torch.equal(logits(plain), expected)
    assert not torch.equal(logits(target), expected)
    set_model_state_dict(target, read_hf_weights(target, tmp_path / "a"), options=options)
    assert torch.equal(logits(target), expected)


# Whole or not at all


def test_an_error_while_writing_leaves_the_previous_checkpoint(tmp_path):
    target = tmp_path / "a"
    for text in ("first", "second"):
        with atomic_folder(target, replace=True) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text(text)
            assert not target.exists() or (target / "deep" / "file").read_text() == "first"
    with pytest.raises(OSError, match="disk full"), atomic_folder(target, replace=True) as folder:
        (folder / "half").write_text("x")
        raise OSError("disk full")
    assert (target / "deep" / "file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_with_content_is_replaced_only_on_request(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="replace=True"), atomic_folder(tmp_path):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    with atomic_folder(tmp_path / "empty") as folder:
        (folder / "file").write_text("x")
    assert (tmp_path / "empty" / "file").is_file()


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    for name in ("a", "step[1]"):
        for leftover in (f".{name}.tmp-1", f".{name}.old-1", f".{name}b.tmp-1"):
            (tmp_path / leftover).mkdir()
        (tmp_path / f".{name}.old-1" / "file").write_text("previous")
        # Died between the two renames: the previous folder comes back before the new one is written.
        with atomic_folder(tmp_path / name, replace=True) as folder:
            assert (tmp_path / name / "file").read_text() == "previous"
            (folder / "file").write_text("new")
        (tmp_path / f".{name}.old-2").mkdir()
        with atomic_folder(tmp_path / name, replace=True) as folder:
            (folder / "file").write_text("newer")
        assert (tmp_path / name / "file").read_text() == "newer"
    assert {path.name for path in tmp_path.iterdir()} == {
        "a",
        ".ab.tmp-1",
        "step[1]",
        ".step[1]b.tmp-1",
    }


@pytest.mark.slow
def test_a_killed_process_leaves_the_previous_checkpoint_whole(tmp_path):
    """The child is killed at the worst moment: all files are written and none is renamed yet."""
    save_hf_checkpoint(tiny_model(seed=0), tiny_tokenizer(), tmp_path / "a")
    code = """
import sys
from pathlib import Path
import roll.models.hf_checkpoint as checkpoint
from tiny_models import tiny_model, tiny_tokenizer
write = checkpoint.write_hf_files
def write_and_wait(*args, **kwargs):
    write(*args, **kwargs)
    print("written", flush=True)
    sys.stdin.read()
checkpoint.write_hf_files = write_and_wait
checkpoint.save_hf_checkpoint(tiny_model(seed=1), tiny_tokenizer(), Path(sys.argv[1]), replace=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT / "tests")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    # Libraries may print lines of their own before.
    assert child.stdout is not None and b"written\n" in child.stdout
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(list(tmp_path.glob(".a.tmp-*"))) == 1
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), tiny_model(seed=0))
    save_hf_checkpoint(tiny_model(seed=2), tiny_tokenizer(), tmp_path / "a", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), tiny_model(seed=2))


def test_write_into_a_folder_of_the_caller(tmp_path):
    (tmp_path / "optimizer.pt").write_text("state")
    write_hf_files(tiny_model(), tiny_tokenizer(), tmp_path)
    assert (tmp_path / "optimizer.pt").is_file() and (tmp_path / "model.safetensors").is_file()
