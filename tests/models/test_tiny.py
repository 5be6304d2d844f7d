"""Models from nothing: what `transformers` loads, the same for the same seed."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.exceptions import ConfigError
from roll.models.tiny import ASCII, character_tokenizer, make_tiny_model


def test_transformers_loads_the_folder(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model", "0123456789<", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer("12<")["input_ids"] == [4, 5, 13] and tokenizer.decode([4, 5, 13]) == "12<"
    assert (
        (tokenizer.pad_token_id, tokenizer.eos_token_id)
        == (0, 2)
        == (model.config.pad_token_id, model.config.eos_token_id)
    )
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 150_000
    assert model(torch.tensor([[4, 5, 13]])).logits.shape == (1, 3, 14)


def test_weights_depend_on_the_seed_alone(tmp_path: Path):
    torch.manual_seed(99)
    state = torch.get_rng_state()
    weights = [
        AutoModelForCausalLM.from_pretrained(
            make_tiny_model(tmp_path / name, "ab", seed=seed)
        ).lm_head.weight
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_all_of_ascii_goes_in_and_comes_out():
    tokenizer = character_tokenizer()
    ids = tokenizer(ASCII)["input_ids"]
    assert len(ids) == len(ASCII) and tokenizer.decode(ids) == ASCII


@pytest.mark.parametrize(
    ("characters", "found"), [("aba", r"\['a'\] more than once"), ("é", "é"), ("", "none")]
)
def test_bad_characters(characters, found):
    with pytest.raises(ConfigError, match=f"expected different ASCII characters, found .*{found}"):
        character_tokenizer(characters)


def test_heads_have_to_divide(tmp_path: Path):
    with pytest.raises(ConfigError, match="hidden=64 is not a multiple of heads=3"):
        make_tiny_model(tmp_path, "a", heads=3)
