"""What is recorded, one step at a time and unrecorded on a CPU;
`tests/gpu/test_graph_decoder_on_cuda.py` records."""

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from roll.engines import graph_decoder, hf_engine
from roll.engines.graph_decoder import GraphDecoder, RoomyLayer, _decoding, can_record, make_cache
from roll.engines.hf_engine import HFEngine
from roll.engines.request import GenerationRequest, SamplingParams


def prefilled(model, ids_RW: Tensor, first_R: Tensor, room: int):
    """The cache of left-padded rows, and a mask of their tokens."""
    cache = make_cache(model.config, room)
    column_W = torch.arange(ids_RW.shape[1])
    mask_RW = column_W >= first_R[:, None]
    positions = (column_W - first_R[:, None]).clamp(min=0)
    model(
        ids_RW,
        attention_mask=mask_RW,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    return cache, mask_RW


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@torch.inference_mode()
def test_steps_are_those_of_the_model(family):
    model = tiny_model(family, num_attention_heads=4, num_key_value_heads=2).eval()
    generator = torch.Generator().manual_seed(0)
    ids_RW, first_R = torch.randint(3, 99, (3, 7), generator=generator), torch.tensor([0, 4, 2])
    plain, mask_RW = prefilled(model, ids_RW, first_R, room=5)
    ours, _ = prefilled(model, ids_RW, first_R, room=5)
    column = torch.tensor([7])
    for step in range(3):
        token_R1 = torch.randint(3, 99, (3, 1), generator=generator)
        position_R1 = (column - first_R)[:, None]
        mask_RW = torch.nn.functional.pad(mask_RW, (0, 1), value=True)
        options = {"position_ids": position_R1, "use_cache": True}
        expected = model(token_R1, attention_mask=mask_RW, past_key_values=plain, **options).logits
        with _decoding(model, ours, column):
            any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            found = model(
                token_R1,
                attention_mask=any_mask,
                past_key_values=ours,
                decode=(first_R, column + 1),
                **options,
            ).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=f"step {step}")
        column = column + 1
    assert model.config._attn_implementation == "sdpa" and all(
        type(layer) is RoomyLayer for layer in ours.layers
    )


class UnrecordedStep:
    """Does at once what `_RecordedStep` records, for a machine without a GPU."""

    def __init__(self, decoder, token_R, position_R):
        self.decoder = decoder
        self.first_R = decoder.num_tokens - position_R

    def __call__(self, token_R):
        column = torch.tensor([self.decoder.num_tokens])
        with _decoding(self.decoder.model, self.decoder.cache, column):
            return self.decoder.logits(
                token_R[:, None],
                position_ids=(column - self.first_R)[:, None],
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
                decode=(self.first_R, column + 1),
            )


def test_rows_leave_and_the_cache_grows(monkeypatch):
    monkeypatch.setattr(graph_decoder, "_RecordedStep", UnrecordedStep)
    monkeypatch.setattr(GraphDecoder, "_forget_step", lambda self: setattr(self, "_step", None))
    monkeypatch.setattr(hf_engine, "can_decode", lambda model: False)
    monkeypatch.setattr(graph_decoder, "GROWTH", 2)  # short of room all the time
    make = graph_decoder.make_cache
    monkeypatch.setattr(hf_engine, "make_cache", lambda config, room: make(config, 3))
    sampling = SamplingParams(max_new_tokens=40)
    requests = [
        GenerationRequest(f"r{i}", tuple(range(20, 23 + 2 * i)), sampling, 4) for i in range(3)
    ]
    engine = HFEngine(tiny_model().eval(), pad_token_id=0, eos_token_ids=range(1, 100, 20))
    expected = engine.generate(requests)
    assert len({len(output.token_ids) for output in expected}) > 3
    monkeypatch.setattr(hf_engine, "can_record", lambda *_: True)
    for found, plain in zip(engine.generate(requests), expected, strict=True):
        assert found.token_ids == plain.token_ids
        assert found.log_probs == pytest.approx(plain.log_probs, abs=1e-5)


def test_only_plain_dense_models_on_a_gpu_are_recorded(monkeypatch):
    monkeypatch.setattr(graph_decoder, "has_decode_kernel", lambda: True)
    model = tiny_model()
    cache = make_cache(model.config, 4)
    assert not can_record(model, cache)  # on a CPU
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    assert can_record(model, cache)
    assert not can_record(tiny_model("gemma2"), make_cache(tiny_model("gemma2").config, 4))
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not can_record(model, cache)
    hook.remove()
    dynamic = tiny_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert not can_record(dynamic, cache)
    monkeypatch.setattr(graph_decoder, "has_decode_kernel", lambda: False)
    assert not can_record(model, cache)


def test_a_layer_grows_when_its_room_is_used_up():
    layer = RoomyLayer(2)
    states = torch.randn(3, 2, 4, 5)
    layer.update(states, states + 1)
    assert layer.capacity == 6
    layer.grow(6)
    assert layer.capacity == 6
    layer.grow(7)
    assert layer.capacity > 7 and layer.num_tokens == 4
    torch.testing.assert_close(layer.buffers[1][:, :4].transpose(1, 2), states + 1)
