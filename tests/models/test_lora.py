"""LoRA is peft's LoRA, and switching it off gives the base model back to the last bit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import nn

from roll.configs.arguments import ModelArguments
from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.models.lora import (
    adapter_disabled,
    add_lora,
    base_model,
    is_lora_model,
    merged_state_dict,
    split_names,
)

PROJECT = Path(__file__).parents[2]


def with_adapter(*, tied: bool = True, seed: int = 1, **settings) -> nn.Module:
    """A model whose adapter does something: peft starts B at zero, here every adapter weight is
    random."""
    settings = {"lora_target": "all", "lora_rank": 4, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = add_lora(tiny_model(tied=tied), ModelArguments(**settings), is_trainable=True)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding" in name or ".modules_to_save." in name:
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny_batch([7, 3])).logits


def test_forward_equals_a_plain_peft_model():
    import peft

    batch = tiny_batch([7, 3])
    torch.manual_seed(5)
    ours = add_lora(
        tiny_model(),
        ModelArguments(lora_target="q_proj,v_proj", lora_rank=4, lora_dropout=0.0),
        is_trainable=True,
    )
    torch.manual_seed(5)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
    )
    theirs = peft.get_peft_model(tiny_model(), config)
    for model in (ours, theirs):
        torch.manual_seed(6)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
    found, expected = ours(**batch).logits, theirs(**batch).logits
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    theirs_by_name = dict(theirs.named_parameters())
    trained = {name: p for name, p in ours.named_parameters() if p.grad is not None}
    assert len(trained) == 2 * 2 * 2  # layers x targets x (A, B)
    for name, parameter in trained.items():
        assert torch.equal(parameter.grad, theirs_by_name[name].grad)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("additional", [None, "lm_head"], ids=["adapter only", "and the head"])
def test_adapter_off_is_the_base_model_bit_for_bit(tied, additional):
    base = logits(tiny_model(tied=tied).eval())
    model = with_adapter(tied=tied, additional_target=additional)
    adapted = logits(model)
    assert not torch.allclose(adapted, base, atol=1e-3)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with adapter_disabled(model):
        assert torch.equal(logits(model), base)
        with adapter_disabled(model):
            assert torch.equal(logits(model), base)
        assert torch.equal(logits(model), base)  # the inner block gives back "off"
        assert {
            name: parameter.requires_grad for name, parameter in model.named_parameters()
        } == flags
    assert torch.equal(logits(model), adapted)


def test_the_switch_goes_back_after_an_exception_and_keeps_a_frozen_adapter_frozen():
    model = with_adapter()
    adapted = logits(model)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="out of memory"), adapter_disabled(model):
        raise RuntimeError("out of memory")
    assert torch.equal(logits(model), adapted)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="separate reference"), adapter_disabled(tiny_model()):
        pass


def test_which_modules_get_an_adapter():
    def adapted(target):
        model = add_lora(
            tiny_model(tied=False), ModelArguments(lora_target=target), is_trainable=True
        )
        return {
            n.split(".lora_A")[0].removeprefix("base_model.model.")
            for n in model.state_dict()
            if ".lora_A" in n
        }

    attention = {f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"}
    mlp = {f"model.layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("gate", "up", "down")}
    assert adapted("q_proj, k_proj,v_proj,o_proj") == attention
    assert adapted(["self_attn.q_proj"]) == {name for name in attention if "q_proj" in name}
    assert adapted("all-linear") == adapted("all") == attention | mlp
    assert adapted(r".*layers\.1\..*(gate|up)_proj$") == {
        name for name in mlp if ".1." in name and "down" not in name
    }


def test_targets_that_match_nothing_are_errors_that_list_the_linear_modules():
    linear = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    for settings in (
        {"lora_target": "q_proj,query"},
        {"lora_target": r".*query$"},
        {"lora_target": "q_proj", "additional_target": "value_head"},
    ):
        with pytest.raises(ConfigError, match=linear) as error:
            add_lora(tiny_model(), ModelArguments(**settings), is_trainable=True)
        assert "query" in str(error.value) or "value_head" in str(error.value)


def test_an_inference_model_without_a_saved_adapter_stays_plain():
    model = tiny_model()
    assert add_lora(model, ModelArguments(lora_target="all"), is_trainable=False) is model
    assert not is_lora_model(model)
    assert base_model(model) is model


def test_a_saved_adapter_loads_frozen_or_trainable(tmp_path):
    model = with_adapter(lora_rank=3)
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    expected = logits(model)
    for trainable in (False, True):
        args = ModelArguments(adapter_name_or_path=str(tmp_path))
        again = add_lora(tiny_model(), args, is_trainable=trainable).eval()
        assert torch.equal(logits(again), expected)
        assert again.peft_config["default"].r == 3
        assert any(parameter.requires_grad for parameter in again.parameters()) == trainable
        assert base_model(again) is not again


def test_a_folder_without_adapter_is_named_with_what_it_has(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"no adapter_config.json \(found: notes.txt\)"):
        add_lora(
            tiny_model(), ModelArguments(adapter_name_or_path=str(tmp_path)), is_trainable=False
        )


def test_adapter_dtype_in_half_precision():
    for autocast, expected in ((True, torch.float32), (False, torch.bfloat16)):
        args = ModelArguments(lora_target="q_proj", autocast_adapter_dtype=autocast)
        model = add_lora(tiny_model(dtype=torch.bfloat16), args, is_trainable=True)
        assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {expected}
        assert base_model(model).get_input_embeddings().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("additional", [None, "lm_head"], ids=["adapter only", "and the head"])
def test_merged_weights_make_a_plain_model_of_the_same_function(tied, additional):
    model = with_adapter(tied=tied, additional_target=additional)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = tiny_model(tied=tied, seed=99).eval()
    plain.load_state_dict(merged_state_dict(model))
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # peft's own merge, which changes the model, gives the same weights.
    theirs = model.merge_and_unload().state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6)


def test_merging_reads_the_given_state_dict_and_adapted_embeddings():
    settings = {"tied": False, "lora_target": "embed_tokens,q_proj"}
    model, other = with_adapter(seed=1, **settings), with_adapter(seed=2, **settings)
    plain = tiny_model(tied=False, seed=99).eval()
    plain.load_state_dict(merged_state_dict(model, other.state_dict()))
    torch.testing.assert_close(logits(plain), logits(other), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_merged_is_refused():
    model = with_adapter(tied=True, lora_target="embed_tokens,q_proj")
    with pytest.raises(ConfigError, match=r"model.embed_tokens: its weight is shared"):
        merged_state_dict(model)
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ConfigError, match="not a plain LoRA layer"):
        merged_state_dict(peft.get_peft_model(tiny_model(), config))


def test_merging_rounds_once_to_the_dtype_of_the_weight():
    args = ModelArguments(lora_target="q_proj", lora_rank=2)
    model = add_lora(tiny_model(dtype=torch.bfloat16), args, is_trainable=True)
    layer = base_model(model).model.layers[0].self_attn.q_proj
    nn.init.constant_(layer.lora_B["default"].weight, 0.01)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    expected = (layer.base_layer.weight.float() + delta).to(torch.bfloat16)
    assert torch.equal(merged_state_dict(model)["model.layers.0.self_attn.q_proj.weight"], expected)


def test_missing_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("lora"))):
        add_lora(tiny_model(), ModelArguments(lora_target="q_proj"), is_trainable=True)


@pytest.mark.slow
def test_peft_is_not_imported_before_it_is_needed():
    modules = ", ".join(
        f"roll.models.{name}" for name in ("model_providers", "checkpoint", "linear_head")
    )
    code = f"import sys, {modules}; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0


def test_names():
    assert split_names(" a, b ,,c") == ["a", "b", "c"]
    assert split_names(["a", "b"]) == ["a", "b"]
    assert split_names(None) == split_names("") == []
