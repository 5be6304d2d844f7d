"""Decoding as a recorded graph on one real GPU: the attention kernel, and the samples of the same
model unrecorded."""

import gc
import secrets

import pytest
import torch
from decode_checks import check_decode_attention
from tiny_models import tiny_model

from roll.engines import hf_engine
from roll.engines.graph_decoder import GraphDecoder
from roll.engines.hf_engine import HFEngine
from roll.engines.request import GenerationRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def recorded(monkeypatch):
    """How often a decoder took a step."""
    steps = []
    step = GraphDecoder.step
    monkeypatch.setattr(
        GraphDecoder, "step", lambda self, *arguments: steps.append(1) or step(self, *arguments)
    )
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 16), (5, 7, 1, 130, 80), (64, 14, 2, 1000, 64), (3, 40, 8, 333, 128)]
)
def test_attention_of_one_token(shape, dtype):
    check_decode_attention(*shape, dtype=dtype, device="cuda", seed=secrets.randbelow(1 << 30))


def answers(model, requests, *, end_every: int):
    engine = HFEngine(model, pad_token_id=0, eos_token_ids=range(1, 100, end_every))
    return [(output.token_ids, output.log_probs) for output in engine.generate(requests)]


def requests_of(num_new: int, **sampling):
    generator = torch.Generator().manual_seed(1)
    return [
        GenerationRequest(
            f"r{index}",
            tuple(torch.randint(4, 99, (length,), generator=generator).tolist()),
            SamplingParams(max_new_tokens=num_new, **sampling),
            num_samples=6,
        )
        for index, length in enumerate((3, 17, 9, 9, 30))
    ]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(("num_new", "end_every"), [(60, 30), (1100, 99)])
def test_samples_are_those_of_the_model_itself(family, num_new, end_every, recorded, monkeypatch):
    """Short answers that leave the batch all the time, and long ones that use up the room of the
    cache."""
    model = tiny_model(
        family, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048
    )
    model = model.to("cuda").eval()
    requests = requests_of(num_new)
    found = answers(model, requests, end_every=end_every)
    assert recorded
    recorded.clear()
    monkeypatch.setattr(hf_engine, "can_record", lambda *_: False)
    expected = answers(model, requests, end_every=end_every)
    assert not recorded
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-4)


def test_nothing_is_left_on_the_gpu(recorded):
    """Without the help of the garbage collector, which comes when it likes."""
    model = tiny_model().to("cuda").eval()
    requests = requests_of(40)
    answers(model, requests, end_every=30)  # libraries take their own memory
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        answers(model, requests, end_every=30)
        assert recorded and torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_a_call_uses_the_weights_of_its_time(recorded):
    model = tiny_model().to("cuda").eval()
    requests = requests_of(20)
    before = answers(model, requests, end_every=99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    after = answers(model, requests, end_every=99)
    assert recorded and after != before
    assert after == answers(model, requests, end_every=99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.div(1.3)  # other memory, too
    assert [ids for ids, _ in answers(model, requests, end_every=99)] == [ids for ids, _ in before]
