"""Decoding without modules: the numbers of the model itself, whatever its biases, heads, rows."""

import threading

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from roll.engines import hf_engine
from roll.engines.graph_decoder import make_cache
from roll.engines.hf_engine import HFEngine
from roll.engines.request import GenerationRequest, SamplingParams
from roll.engines.small_decoder import SmallDecoder, can_decode
from roll.models.linear_head import use_linear_logits
from roll.models.token_tree import use_token_tree

ROPE = {"rope_theta": 500.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def randomized(model):
    """Norm weights and biases, which models begin with as ones and zeros, take random values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.copy_(1 + 0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_mistral():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = MistralConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=100,
        sliding_window=None,
        initializer_range=0.1,
        pad_token_id=0,
    )
    return MistralForCausalLM(config)


MODELS = {
    "qwen2": lambda: tiny_model("qwen2"),
    "untied": lambda: tiny_model("qwen2", tied=False),
    "grouped heads": lambda: tiny_model(
        "llama", num_attention_heads=4, num_key_value_heads=1, head_dim=16
    ),
    "wide heads": lambda: tiny_model("llama", head_dim=48),
    "all biases": lambda: tiny_model("llama", attention_bias=True, mlp_bias=True),
    "large epsilon": lambda: tiny_model("llama", rms_norm_eps=0.3),
    "linear angles": lambda: tiny_model(
        "llama", rope_parameters={"rope_type": "linear", "factor": 3.0, **ROPE}
    ),
    "llama 3 angles": lambda: tiny_model(
        "llama", rope_parameters={"rope_type": "llama3", **LLAMA3, **ROPE}
    ),
    "mistral": make_mistral,
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model(name):
    model = randomized(MODELS[name]())
    assert can_decode(model)
    ids = torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = make_cache(model.config, room=0)
        model(input_ids=ids[:2, :5], past_key_values=cache, use_cache=True)
        ids[2, :5] = ids[0, :5]
        expected = model(ids, use_cache=False).logits
        cell_RW = torch.arange(10).view(2, 5)[[0, 1, 0]]
        decoder = SmallDecoder(model, cache, cell_RW, room=7)
        for column in range(5, 9):
            logits = decoder.step(ids[:, column], column, None)
            torch.testing.assert_close(logits, expected[:, column], rtol=1e-5, atol=1e-5)
        decoder.select(torch.tensor([2, 1]))
        for column in range(9, 12):
            logits = decoder.step(ids[[2, 1], column], column, None)
            torch.testing.assert_close(logits, expected[[2, 1], column], rtol=1e-5, atol=1e-5)


def requests(**sampling):
    lengths = (4, 9, 1, 6)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(4, 99, (length,), generator=generator).tolist()) for length in lengths
    ]
    params = SamplingParams(max_new_tokens=30, **sampling)
    return [
        GenerationRequest(f"r{index}", prompt, params, 3) for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", ["qwen2", "grouped heads", "mistral"])
def test_samples_are_those_of_the_modules(name, monkeypatch):
    """Prompts of different lengths, rows that end and leave, a batch that shrinks."""
    model = randomized(MODELS[name]())
    use_linear_logits(model)
    use_token_tree(model)
    engine = HFEngine(model, pad_token_id=0, eos_token_ids=range(10, 16))
    steps = count_steps(monkeypatch)
    small = engine.generate(requests(temperature=1.2))
    assert len(steps) > 20
    assert len({len(output.token_ids) for output in small}) > 3
    monkeypatch.setattr(hf_engine, "can_decode", lambda model: False)
    steps.clear()
    for ours, theirs in zip(small, engine.generate(requests(temperature=1.2)), strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        torch.testing.assert_close(
            torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), rtol=0, atol=1e-5
        )
    assert not steps


def count_steps(monkeypatch):
    steps = []
    step = SmallDecoder.step

    def counting(self, *args):
        steps.append(args)
        return step(self, *args)

    monkeypatch.setattr(SmallDecoder, "step", counting)
    return steps


def test_conversations_that_began_alike(monkeypatch):
    begin = list(range(20, 40))
    prompts = [begin, [*begin, 50, 51], [*begin, 50, 51], [*begin, 50, 60, 61], [7, 8], begin[:9]]
    params = SamplingParams(max_new_tokens=8)
    asked = [
        GenerationRequest(f"r{index}", tuple(prompt), params, 2)
        for index, prompt in enumerate(prompts)
    ]
    outputs, sizes = [], []
    logits = hf_engine._logits

    def watched(*given, **inputs):
        sizes.append(inputs["input_ids"].numel())
        return logits(*given, **inputs)

    monkeypatch.setattr(hf_engine, "_logits", watched)
    for shares in (False, True):
        model = randomized(tiny_model("qwen2"))
        assert not shares or use_token_tree(model)
        outputs.append(HFEngine(model, pad_token_id=0, eos_token_ids=()).generate(asked))
    # Five different prompts of at most 23 tokens; a tree of 20, then 50, 51, 60, 61, and [7, 8].
    assert sizes == [5 * 23, 20 + 4 + 2]
    for shared, plain in zip(*outputs, strict=True):
        assert shared.token_ids == plain.token_ids
        torch.testing.assert_close(
            torch.tensor(shared.log_probs), torch.tensor(plain.log_probs), rtol=0, atol=1e-5
        )


def test_new_weights_count_at_once():
    model = randomized(tiny_model("qwen2"))
    engine = HFEngine(model, pad_token_id=0, eos_token_ids=())
    before = engine.generate(requests())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    after = engine.generate(requests())
    assert [output.token_ids for output in before] != [output.token_ids for output in after]
    fresh = HFEngine(model, pad_token_id=0, eos_token_ids=())
    assert after == fresh.generate(requests())


def test_an_abort_gets_through(monkeypatch):
    engine = HFEngine(randomized(tiny_model("qwen2")), pad_token_id=0, eos_token_ids=())
    step, count = SmallDecoder.step, 0

    def aborting(self, *args):
        nonlocal count
        count += 1
        if count == 3:
            thread = threading.Thread(target=engine.abort, args=(["r1"],))
            thread.start()
            thread.join()
        return step(self, *args)

    monkeypatch.setattr(SmallDecoder, "step", aborting)
    outputs = engine.generate(requests())
    assert {len(output.token_ids) for output in outputs if output.request_id == "r1"} == {3}
    assert {output.finish_reason for output in outputs if output.request_id != "r1"} == {"length"}


def changed(change):
    model = tiny_model("qwen2")
    change(model.model)
    return model


class Odd(nn.Linear):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("qwen3"),
        lambda: tiny_model("gemma2"),
        lambda: tiny_model("qwen2", dtype=torch.bfloat16),
        lambda: tiny_model("qwen2", hidden_act="gelu"),
        lambda: tiny_model("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=1),
        lambda: tiny_model(
            "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, **ROPE}
        ),
        lambda: changed(lambda m: m.layers[1].mlp.register_forward_hook(lambda *args: None)),
        lambda: changed(lambda m: setattr(m.norm, "forward", lambda x: 2 * x)),
        lambda: changed(lambda m: setattr(m.layers[0].mlp, "up_proj", Odd(64, 96, bias=False))),
    ],
)
def test_other_models_are_left_to_their_modules(make):
    assert not can_decode(make())
