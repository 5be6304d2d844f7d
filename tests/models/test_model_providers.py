"""Providers: what is loaded, what is trained, and what the errors say."""

import logging
from pathlib import Path

import pytest
import torch
from tiny_models import (
    CHAT_TEMPLATE,
    make_model_folder,
    tiny_batch,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import roll.models.model_providers as providers
from roll.configs.arguments import ModelArguments
from roll.exceptions import ConfigError, MissingDependencyError
from roll.models.lora import base_model, is_lora_model
from roll.models.model_providers import (
    default_actor_model_provider,
    default_reward_model_provider,
    default_tokenizer_provider,
    default_value_model_provider,
    freeze_by_prefix,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def args(folder: Path | str, **settings) -> ModelArguments:
    return ModelArguments(**{"model_name_or_path": str(folder), "dtype": "fp32", **settings})


def actor(folder: Path | str, *, is_trainable: bool = False, **settings) -> nn.Module:
    return default_actor_model_provider(
        tiny_tokenizer(), args(folder, **settings), None, is_trainable
    )


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


# Tokenizers


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_tokenizer_pads_left_and_keeps_text_and_template(tmp_path, family):
    folder = make_model_folder(tmp_path, family, weights=False)
    tokenizer = default_tokenizer_provider(args(folder))
    assert tokenizer.is_fast
    assert tokenizer(["a", "bcd"], padding=True)["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
    text = "Is 2 + 2 = 4?\n\n  yes~"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) == 99 and tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 2


def test_tokenizer_from_another_folder_and_with_a_length_limit(tmp_path, folder):
    bare = make_model_folder(tmp_path, tokenizer=False)
    tokenizer = default_tokenizer_provider(
        args(bare, model_max_length=77), model_name_or_path=str(folder)
    )
    assert tokenizer.model_max_length == 77


def test_a_missing_padding_token_becomes_the_end_of_sequence_token(tmp_path, caplog):
    make_model_folder(tmp_path, "llama", weights=False, tokenizer=False)
    with pytest.raises(ConfigError, match=r"has no tokenizer \(found: config.json; expected"):
        default_tokenizer_provider(args(tmp_path))
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        found = default_tokenizer_provider(args(tmp_path))
    assert found.pad_token == found.eos_token == "<|im_end|>"
    assert "has no padding token: '<|im_end|>' is used" in caplog.text
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="neither pad_token nor eos_token"):
        default_tokenizer_provider(args(tmp_path))


# Where models come from


def test_the_actor_is_the_model_of_the_folder(folder):
    model = actor(folder)
    assert same_weights(model, tiny_model())
    assert not model.training and not any(
        parameter.requires_grad for parameter in model.parameters()
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("random_init", [False, True])
def test_dtypes(folder, name, dtype, random_init):
    model = actor(folder, dtype=name, random_init=random_init)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config.dtype == dtype
    # Rotary frequencies in half precision would move every position.
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_random_init_follows_the_seed_and_nobody_else_notices(tmp_path):
    folder = make_model_folder(tmp_path, weights=False)
    torch.manual_seed(3)
    first = actor(folder, random_init=True)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(
        torch.rand(3), after
    )  # building the model drew nothing from the caller's stream
    torch.manual_seed(3)
    assert same_weights(first, actor(folder, random_init=True))
    assert same_weights(first, actor(folder, random_init=True, is_trainable=True))
    torch.manual_seed(4)
    assert not same_weights(first, actor(folder, random_init=True))
    torch.manual_seed(3)
    half = actor(folder, random_init=True, dtype="bf16")
    assert all(
        torch.equal(p.bfloat16(), q)
        for p, q in zip(first.parameters(), half.parameters(), strict=True)
    )


def test_loading_draws_nothing_either(folder):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    actor(folder, is_trainable=True, lora_target="all")
    default_value_model_provider(tiny_tokenizer(), args(folder), None, True)
    assert torch.equal(torch.rand(3), expected)


def test_tied_weights_stay_tied(folder):
    for settings in ({}, {"random_init": True, "dtype": "bf16"}):
        model = actor(folder, **settings)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_paths_that_are_not_model_folders(tmp_path, folder):
    bare = make_model_folder(tmp_path / "bare", weights=False)
    with pytest.raises(
        ConfigError, match=r"config.json.*tokenizer.json.*random_init: true"
    ) as error:
        actor(bare)
    assert str(bare) in str(error.value)
    adapter, damaged = tmp_path / "adapter", tmp_path / "damaged"
    for path, name in ((adapter, "adapter_config.json"), (damaged, "config.json")):
        path.mkdir()
        (path / name).write_text("{ not json" if path is damaged else "{}")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in (
        (adapter, "LoRA adapter: give it as adapter_name_or_path"),
        (empty, r"has no config.json.*found: nothing"),
        (tmp_path / "absent", f"the folder {tmp_path}/absent does not exist"),
        (folder / "config.json", "is a file"),
        (damaged, f"{damaged}/config.json could not be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            actor(path)
    with pytest.raises(ConfigError, match="model_name_or_path is not set"):
        default_actor_model_provider(tiny_tokenizer(), ModelArguments())


def test_a_name_that_cannot_be_fetched_says_what_was_tried(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for provide in (
        lambda: actor("nobody/no-such-model"),
        lambda: default_tokenizer_provider(args("nobody/no-such-model")),
    ):
        with pytest.raises(ConfigError) as error:
            provide()
        assert "no folder 'nobody/no-such-model'" in str(error.value)
        assert "HF_HUB_OFFLINE is set" in str(error.value)


def test_code_in_a_model_folder_does_not_run_by_itself(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration_unheard_of.Config"}}'
    )
    (tmp_path / "configuration_unheard_of.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        actor(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_an_error_and_not_random_numbers(tmp_path):
    model = tiny_model(tied=False)
    state = {
        name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name
    }
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        ConfigError,
        match=r"lacks weights that Qwen2ForCausalLM needs: model.layers.1.mlp.down_proj",
    ):
        actor(tmp_path)


def test_config_changes_and_their_errors(folder):
    assert actor(folder, model_config_kwargs={"rms_norm_eps": 0.5}).config.rms_norm_eps == 0.5
    with pytest.raises(
        ConfigError, match="Qwen2Config has no field 'rms_norm_epsilon'; nearest: rms_norm_eps"
    ):
        actor(folder, model_config_kwargs={"rms_norm_epsilon": 0.5})
    with pytest.raises(
        ConfigError, match=r"gate_proj.weight: saved \(96, 64\), the config says \(32, 64\)"
    ):
        actor(folder, model_config_kwargs={"intermediate_size": 32})


def test_attention_implementations(folder, monkeypatch):
    assert actor(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert actor(folder, attn_implementation="auto").config._attn_implementation == "sdpa"
    monkeypatch.setattr(providers, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(
        MissingDependencyError, match=r"flash-attn.*`attn_implementation: sdpa` works everywhere"
    ):
        actor(folder, attn_implementation="fa2")


def test_padding_token_reaches_the_config(tmp_path):
    folder = make_model_folder(tmp_path, pad_token_id=None)
    assert actor(folder).config.pad_token_id == 0


# Training


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**tiny_batch([8, 5])).logits.log_softmax(-1)[..., 7].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_trainable_actor(folder):
    model = actor(folder, is_trainable=True)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert model.is_gradient_checkpointing
    assert model.config.use_cache is False
    assert model.generation_config.use_cache is True
    assert not actor(
        folder, is_trainable=True, disable_gradient_checkpointing=True
    ).is_gradient_checkpointing
    assert not actor(folder).is_gradient_checkpointing


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"lora_target": "all"}, {"freeze_module_prefix": "model.embed_tokens"}]
)
def test_gradient_checkpointing_gives_the_same_gradients(tmp_path, settings, reentrant):
    folder = make_model_folder(tmp_path, tied=False)
    torch.manual_seed(0)
    expected = gradients(
        actor(folder, is_trainable=True, disable_gradient_checkpointing=True, **settings)
    )
    model = actor(
        folder, is_trainable=True, gradient_checkpointing_use_reentrant=reentrant, **settings
    )
    layer = base_model(model).model.layers[0]
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    found = gradients(model)
    assert len(calls) == 2  # once forward, once again in backward
    assert found.keys() == expected.keys() and len(found) > 10
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_freezing_by_prefix(tmp_path):
    folder = make_model_folder(tmp_path, tied=False, num_hidden_layers=11)
    model = actor(
        folder, is_trainable=True, freeze_module_prefix="model.embed_tokens, model.layers.1"
    )
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert "model.embed_tokens.weight" in frozen
    assert {name.split(".")[2] for name in frozen if "layers" in name} == {"1"}  # and not layer 10
    assert len(frozen) == 13


def test_freezing_nothing_or_everything_is_an_error(folder):
    with pytest.raises(
        ConfigError, match=r"lies in 'model.embed_token'; nearest names: model.embed_tokens"
    ):
        actor(folder, is_trainable=True, freeze_module_prefix="model.embed_token")
    with pytest.raises(ConfigError, match="freezes the whole model"):
        actor(folder, is_trainable=True, freeze_module_prefix="model")
    with pytest.raises(ConfigError, match="freeze_module_prefix and LoRA"):
        actor(folder, is_trainable=True, freeze_module_prefix="model.norm", lora_target="all")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze_by_prefix(model, ["0.weight"])
    assert [parameter.requires_grad for parameter in model.parameters()] == [
        False,
        True,
        True,
        True,
    ]


def test_lora_actor_trains_only_its_adapter(folder, caplog):
    with caplog.at_level(logging.INFO):
        model = actor(folder, is_trainable=True, lora_target="q_proj,v_proj", lora_rank=2)
    assert is_lora_model(model) and model.training
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 8 and all(".lora_" in name for name in trained)
    # Adapter: 2 layers x 2 targets x rank 2 x (64 + 64). Model: 100 x 64 embedding, 64 last norm,
    # and per layer 4 x 64 x 64 attention, 3 x 64 biases, 3 x 64 x 96 MLP, 2 x 64 norms.
    assert 6_400 + 64 + 2 * (16_384 + 192 + 18_432 + 128) + 1_024 == 77_760
    assert "1,024 of 77,760 parameters are trainable (1.32%)" in caplog.text
    assert gradients(model).keys() == trained


def test_dropout_in_the_config_is_mentioned(tmp_path, caplog):
    folder = make_model_folder(tmp_path, attention_dropout=0.25)
    actor(folder, is_trainable=False)
    assert "dropout" not in caplog.text
    actor(folder, is_trainable=True)
    assert "attention_dropout=0.25" in caplog.text


# Value and reward models


def test_a_value_model_has_one_value_per_token_and_no_dropout(folder):
    torch.manual_seed(0)
    model = default_value_model_provider(tiny_tokenizer(), args(folder), None, True)
    batch = tiny_batch([5, 3])
    values = model(**batch).logits
    assert values.shape == (2, 5, 1)
    assert torch.equal(model(**batch).logits, values)  # in training mode
    assert same_weights(model.model, tiny_model().model)
    torch.manual_seed(0)
    assert same_weights(
        model, default_value_model_provider(tiny_tokenizer(), args(folder), None, False)
    )
    torch.manual_seed(1)
    other = default_value_model_provider(tiny_tokenizer(), args(folder), None, False)
    assert not torch.equal(model.score.weight, other.score.weight)


def test_a_value_model_with_lora_trains_its_new_head(folder):
    model = default_value_model_provider(
        tiny_tokenizer(), args(folder, lora_target="q_proj"), None, True
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "base_model.model.score.modules_to_save.default.weight" in trained
    assert model(**tiny_batch([4])).logits.shape == (1, 4, 1)


@pytest.mark.parametrize("model_type", ["auto_sequence_classification", "trl"])
def test_a_value_model_is_a_token_classifier(folder, model_type):
    with pytest.raises(ConfigError, match="a value model is 'auto_token_classification'"):
        default_value_model_provider(tiny_tokenizer(), args(folder, model_type=model_type))


@pytest.mark.parametrize(
    ("auto_class", "model_type", "shape"),
    [
        (AutoModelForSequenceClassification, "auto_sequence_classification", (2, 1)),
        (AutoModelForTokenClassification, "auto_token_classification", (2, 5, 1)),
    ],
)
def test_reward_models(tmp_path, auto_class, model_type, shape):
    torch.manual_seed(0)
    saved = auto_class.from_config(tiny_config(num_labels=1))
    saved.save_pretrained(tmp_path)
    for setting in (model_type, None):
        model = default_reward_model_provider(tiny_tokenizer(), args(tmp_path, model_type=setting))
        assert type(model) is type(saved) and same_weights(model, saved)
        assert model(**tiny_batch([5, 3])).logits.shape == shape


def test_a_reward_model_that_is_only_used_must_bring_its_head(folder):
    with pytest.raises(
        ConfigError, match=r"lacks weights that Qwen2ForSequenceClassification needs: score.weight"
    ):
        default_reward_model_provider(tiny_tokenizer(), args(folder))
    model = default_reward_model_provider(tiny_tokenizer(), args(folder), None, True)
    assert model.score.weight.requires_grad


def test_reward_model_errors(tmp_path, folder):
    with pytest.raises(ConfigError, match="a reward model is one of"):
        default_reward_model_provider(tiny_tokenizer(), args(folder, model_type="trl"))
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        ConfigError,
        match=r"num_labels.*\n  score.weight: saved \(1, 64\), the config says \(3, 64\)",
    ):
        default_reward_model_provider(tiny_tokenizer(), args(tmp_path, num_labels=3))
