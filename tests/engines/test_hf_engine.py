"""Our sampling loop: right tokens and log-probs, and samples that do not know their neighbours."""

import gc
import random
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from roll.distributed.strategy import hf_strategy
from roll.engines import hf_engine
from roll.engines.graph_decoder import RoomyLayer, make_cache
from roll.engines.hf_engine import HFEngine
from roll.engines.request import GenerationRequest, SamplingParams
from roll.engines.sampling import transform
from roll.models.linear_head import use_linear_logits

EOS = 2
TOKENIZER = tiny_tokenizer()


def make_engine(family="qwen2", *, eos=(EOS,), linear=False, max_batch_size=None, **overrides):
    model = tiny_model(family, **overrides).eval()
    if linear:
        use_linear_logits(model)
    return HFEngine(
        model,
        pad_token_id=0,
        eos_token_ids=eos,
        decode=TOKENIZER.decode,
        max_batch_size=max_batch_size,
    )


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(4, 99, (length,), generator=generator).tolist()) for length in lengths
    ]


def request_of(prompt, name="r", num_samples=1, keys=None, **sampling):
    sampling.setdefault("max_new_tokens", 12)
    return GenerationRequest(
        name, prompt, SamplingParams(**sampling), num_samples, sample_keys=keys
    )


def requests_of(*lengths, num_samples=1, **sampling):
    return [
        request_of(prompt, f"r{index}", num_samples, **sampling)
        for index, prompt in enumerate(prompts(*lengths))
    ]


def facts(outputs):
    return {(output.request_id, output.sample_index): output for output in outputs}


def one_by_one(engine, requests):
    return facts([output for request in requests for output in engine.generate([request])])


def check_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].token_ids == other[key].token_ids, key
        assert one[key].finish_reason == other[key].finish_reason
        torch.testing.assert_close(
            torch.tensor(one[key].log_probs),
            torch.tensor(other[key].log_probs),
            rtol=1e-6,
            atol=1e-6,
        )


def teacher_forced(model, request, output):
    """Log-probabilities of the output's tokens from one forward over the whole row, token by token
    transformed."""
    given = [*request.prompt_ids, *request.prefix_ids]
    ids = torch.tensor([[*given, *output.token_ids]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float()
    values = []
    for position in range(len(given), ids.shape[1]):
        seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
        seen[0, ids[0, :position]] = True
        final = transform(logits[position - 1][None], request.sampling, seen).log_softmax(-1)
        values.append(final[0, ids[0, position]].item())
    return values


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "cohere", "granite", "qwen3"])
@pytest.mark.parametrize("linear", [False, True])
def test_greedy_tokens_are_those_of_transformers(family, linear):
    engine = make_engine(family, eos=(), linear=linear)
    requests = requests_of(3, 9, 1, 9, temperature=0.0)
    plain = tiny_model(family).eval()
    for request, output in zip(requests, engine.generate(requests), strict=True):
        ids = torch.tensor([request.prompt_ids])
        expected = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
            eos_token_id=-1,
        )
        assert output.token_ids == expected[0, ids.shape[1] :].tolist()
        assert output.finish_reason == "length"


def test_a_sliding_window_is_respected():
    overrides = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    engine = make_engine("qwen2", eos=(), **overrides)
    assert "sliding_attention" in engine.model.config.layer_types
    plain = tiny_model("qwen2", **overrides).eval()
    requests = requests_of(3, 11, temperature=0.0)
    for request, output in zip(requests, engine.generate(requests), strict=True):
        ids = torch.tensor([request.prompt_ids])
        for token in output.token_ids:
            with torch.no_grad():
                assert plain(ids, use_cache=False).logits[0, -1].argmax().item() == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.4},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 0.0},
    ],
)
def test_log_probs_are_those_of_a_teacher_forced_forward(engine, sampling):
    requests = requests_of(4, 7, 1, num_samples=2, **sampling)
    request_named = {request.request_id: request for request in requests}
    for output in engine.generate(requests):
        expected = teacher_forced(engine.model, request_named[output.request_id], output)
        torch.testing.assert_close(
            torch.tensor(output.log_probs), torch.tensor(expected), rtol=0, atol=1e-5
        )


def test_samples_do_not_depend_on_their_neighbours(engine):
    requests = requests_of(4, 4, 9, 1, 6, num_samples=3, temperature=1.2, top_p=0.95)
    together = facts(engine.generate(requests))
    check_same(together, one_by_one(engine, requests))
    shuffled = random.Random(0).sample(requests, len(requests))
    check_same(together, facts(engine.generate(shuffled)))
    engine_of_two = make_engine(max_batch_size=2)
    check_same(together, facts(engine_of_two.generate(requests)))
    # One sample of a group, under its own key.
    single = replace(requests[2], num_samples=1, sample_keys=("r2/1",))
    lone = engine.generate([single])[0]
    assert lone.token_ids == together["r2", 1].token_ids


def test_padding_counts_neither_as_prompt_nor_as_repetition():
    engine = make_engine()
    engine.pad_token_id = 50  # a token like any other; 0 has logit 0, which no penalty changes
    requests = requests_of(1, 9, repetition_penalty=3.0)
    check_same(facts(engine.generate(requests)), one_by_one(engine, requests))


def test_outputs_come_in_order_are_reported_once_and_carry_the_version(engine):
    heard = []
    engine.policy_version = 7
    outputs = engine.generate(requests_of(9, 2, 5, num_samples=2), on_output=heard.append)
    expected = [(f"r{request}", sample) for request in range(3) for sample in range(2)]
    assert [(output.request_id, output.sample_index) for output in outputs] == expected
    assert len(heard) == 6 and set(map(id, heard)) == set(map(id, outputs))
    assert {output.policy_version for output in outputs} == {7}
    assert engine.generate([]) == []


def test_seed_and_key_alone_make_the_sample(engine):
    (prompt,) = prompts(6)
    state = torch.get_rng_state()
    group = engine.generate([request_of(prompt, num_samples=4, keys=("a", "b", "c", "d"))])
    separate = engine.generate([request_of(prompt, f"s{key}", keys=(key,)) for key in "abcd"])
    assert [output.token_ids for output in group] == [output.token_ids for output in separate]
    assert len({tuple(output.token_ids) for output in group}) == 4
    other_seed = engine.generate([request_of(prompt, keys=("a",), seed=1)])[0]
    assert other_seed.token_ids != group[0].token_ids
    assert torch.equal(torch.get_rng_state(), state)


def test_requests_with_different_parameters_share_a_call(engine):
    mixed = [
        replace(request, sampling=replace(request.sampling, **change))
        for request, change in zip(
            requests_of(4, 7, 5, 3),
            [{}, {"temperature": 0.5}, {"top_k": 3, "max_new_tokens": 5}, {"temperature": 0.0}],
            strict=True,
        )
    ]
    together = facts(engine.generate(mixed))
    assert len(together["r2", 0].token_ids) <= 5
    check_same(together, one_by_one(engine, mixed))


# -- ends ------------------------------------------------------------------------------------------


def test_a_response_ends_with_its_end_token(engine):
    requests = requests_of(*[5] * 40, max_new_tokens=60)
    outputs = engine.generate(requests)
    reasons = {output.finish_reason for output in outputs}
    assert reasons == {"stop", "length"}
    for output in outputs:
        assert len(output.token_ids) == len(output.log_probs)
        assert EOS not in output.token_ids[:-1]
        assert (output.token_ids[-1] == EOS) == (output.finish_reason == "stop")
        assert output.finish_reason == "stop" or len(output.token_ids) == 60


def test_rows_that_end_early_do_not_disturb_the_others():
    # Every other token of the vocabulary ends a response: the batch shrinks all the time.
    engine = make_engine(eos=range(0, 100, 8))
    requests = requests_of(*[4, 6, 5] * 8, max_new_tokens=40)
    outputs = engine.generate(requests)
    lengths = {len(output.token_ids) for output in outputs}
    assert len(lengths) > 6
    check_same(facts(outputs), one_by_one(engine, requests))


def test_stop_ids_end_tokens_and_limits_end_a_response():
    engine = make_engine(eos=())
    (prompt,) = prompts(5)
    whole = engine.generate([request_of(prompt)])[0].token_ids
    stop = whole[3]
    output = engine.generate([request_of(prompt, stop_token_ids=(stop,))])[0]
    assert output.token_ids == whole[: whole.index(stop) + 1] and output.finish_reason == "stop"
    output = make_engine(eos=(whole[0],)).generate([request_of(prompt)])[0]
    assert (output.token_ids, output.finish_reason) == (whole[:1], "stop")
    output = engine.generate([request_of(prompt, max_new_tokens=1)])[0]
    assert (output.token_ids, output.finish_reason) == (whole[:1], "length")
    assert len(output.log_probs) == 1


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_end_a_response_across_tokens(include):
    engine = make_engine(eos=())
    (prompt,) = prompts(5)
    whole = engine.generate([request_of(prompt, max_new_tokens=30)])[0]
    text = TOKENIZER.decode(whole.token_ids)
    stop = text[6:9]  # one character a token, so it spans three
    end = text.find(stop) + 3
    options = {"stop_strings": ("never", stop), "include_stop_str_in_output": include}
    output = engine.generate([request_of(prompt, max_new_tokens=30, **options)])[0]
    assert output.finish_reason == "stop"
    assert TOKENIZER.decode(output.token_ids) == text[: end if include else end - 3]
    assert len(output.log_probs) == len(output.token_ids)


# -- requests that cannot be answered --------------------------------------------------------------


def test_bad_requests_fail_alone_and_say_why():
    engine = make_engine(max_position_embeddings=32)
    engine.decode = None
    too_long = "prompt too long: 36 tokens leave no room for an answer, the model takes 32"
    bad = {
        "empty": (request_of((), "empty"), "empty prompt"),
        "long": (request_of(tuple(range(4, 40)), "long"), too_long),
        "foreign": (
            request_of((5, 100), "foreign"),
            "unknown token: id 100, the vocabulary has 100",
        ),
        "stop": (request_of((5, 6), "stop", stop_strings=("x",)), "no decoder"),
        "done": (replace(request_of((5,), "done"), prefix_ids=(6,) * 12), "nothing to generate"),
    }
    good = request_of(tuple(range(4, 10)), "good")
    outputs = facts(engine.generate([good, *(request for request, _ in bad.values())]))
    assert outputs["good", 0].finish_reason in ("stop", "length")
    for name, (_, message) in bad.items():
        assert outputs[name, 0].finish_reason == "error" and outputs[name, 0].token_ids == []
        assert message in outputs[name, 0].error
    with pytest.raises(ValueError, match="same request_id"):
        engine.generate([good, good])


def test_a_response_ends_where_the_model_ends():
    engine = make_engine(max_position_embeddings=32, eos=())
    output = engine.generate([request_of(tuple(range(4, 34)), max_new_tokens=50)])[0]
    assert (len(output.token_ids), output.finish_reason) == (2, "length")


def test_weights_that_are_not_numbers_are_an_error_not_a_sample():
    engine = make_engine()
    with torch.no_grad():
        engine.model.model.norm.weight[0] = float("nan")
    output = engine.generate([request_of((5, 6))])[0]
    assert output.finish_reason == "error" and output.error.startswith("logits are not numbers")


# -- abort -----------------------------------------------------------------------------------------


def abort_in_forward(engine, number, ids=None):
    """Another thread aborts while the engine's model runs its forward pass of this number."""
    forward, count = engine.model.forward, 0

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        if count == number:
            thread = threading.Thread(target=engine.abort, args=(ids,))
            thread.start()
            thread.join()
        return forward(*args, **kwargs)

    engine.model.forward = counting


@pytest.mark.parametrize("forward", [1, 3, 8])
def test_an_aborted_request_goes_on_as_if_nothing_had_happened(forward):
    engine = make_engine()
    sampling = {"max_new_tokens": 20, "temperature": 1.1, "repetition_penalty": 1.2}
    requests = requests_of(4, 7, 5, num_samples=2, **sampling)
    whole = facts(engine.generate(requests))
    interrupted = make_engine()
    abort_in_forward(interrupted, forward)
    parts = interrupted.generate(requests)
    assert {output.finish_reason for output in parts} & {"abort"}
    request_named = {request.request_id: request for request in requests}
    for part in parts:
        expected = whole[part.request_id, part.sample_index]
        assert part.token_ids == expected.token_ids[: len(part.token_ids)]
        if part.finish_reason != "abort":
            continue
        assert len(part.token_ids) == forward - 1
        rest = engine.generate([request_named[part.request_id].resume(part)])[0]
        assert part.token_ids + rest.token_ids == expected.token_ids
        assert rest.finish_reason == expected.finish_reason
        torch.testing.assert_close(
            torch.tensor(part.log_probs + rest.log_probs),
            torch.tensor(expected.log_probs),
            rtol=0,
            atol=1e-5,
        )


def test_an_abort_reaches_the_named_requests_and_those_that_wait_and_no_later_call():
    engine = make_engine(eos=())
    abort_in_forward(engine, 3, ["r1", "unknown"])
    outputs = engine.generate(requests_of(4, 7, 5))
    assert [output.finish_reason for output in outputs] == ["length", "abort", "length"]
    assert len(outputs[1].token_ids) == 2
    engine = make_engine(eos=(), max_batch_size=1)
    abort_in_forward(engine, 2)
    outputs = engine.generate(requests_of(4, 7, 5))
    assert [len(output.token_ids) for output in outputs] == [0, 1, 0]
    assert {output.finish_reason for output in outputs} == {"abort"}
    engine.abort()
    assert engine.generate(requests_of(4))[0].finish_reason == "length"


def test_stop_strings_see_what_came_before_an_interruption():
    engine = make_engine(eos=())
    (prompt,) = prompts(5)
    whole = engine.generate([request_of(prompt)])[0]
    stop = TOKENIZER.decode(whole.token_ids[2:5])
    request = replace(
        request_of(prompt, stop_strings=(stop,)), prefix_ids=tuple(whole.token_ids[:4])
    )
    output = engine.generate([request])[0]
    assert (output.token_ids, output.finish_reason) == (whole.token_ids[4:5], "stop")


def test_the_model_is_read_at_every_call_and_its_mode_restored():
    engine = make_engine()
    engine.model.train()
    request = requests_of(5)
    before = engine.generate(request)[0].token_ids
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.5)
    assert engine.generate(request)[0].token_ids != before
    assert engine.model.training
    assert not any(parameter.grad is not None for parameter in engine.model.parameters())


# -- the cache -------------------------------------------------------------------------------------


def test_a_layer_grows_and_loses_rows_as_a_plain_one_does():
    config = tiny_model().config
    roomy = make_cache(config, room=2)
    plain = type(roomy)(config=config)
    assert isinstance(roomy.layers[0], RoomyLayer)
    generator = torch.Generator().manual_seed(0)
    rows = 3
    for step in range(600):
        if step in (4, 500):
            keep = torch.tensor([2, 0, 0, 1][: 4 if step == 4 else 2])
            roomy.batch_select_indices(keep)
            plain.batch_select_indices(keep)
            rows = len(keep)
        new = torch.randn(2, rows, 2, 5 if step == 0 else 1, 32, generator=generator)
        for layer in range(2):
            results = [cache.update(new[0], new[1], layer) for cache in (roomy, plain)]
            assert torch.equal(results[0][0], results[1][0]) and torch.equal(
                results[0][1], results[1][1]
            )
    assert roomy.get_seq_length() == plain.get_seq_length() == 604


@pytest.mark.parametrize("is_small", [True, False])
def test_a_batch_is_gone_before_the_next_begins(is_small, monkeypatch):
    """Its cache may be most of the memory; the garbage collector would come too late."""
    alive: weakref.WeakSet[hf_engine._Batch] = weakref.WeakSet()
    at_begin = []

    class Watched(hf_engine._Batch):
        def __init__(self, *args):
            at_begin.append(len(alive))
            alive.add(self)
            super().__init__(*args)

    monkeypatch.setattr(hf_engine, "_Batch", Watched)
    monkeypatch.setattr(hf_engine, "can_decode", lambda model: is_small)
    engine = HFEngine(tiny_model().eval(), pad_token_id=0, eos_token_ids=(), max_batch_size=2)
    gc.disable()
    try:
        engine.generate(
            [GenerationRequest(f"r{i}", (5, 6), SamplingParams(max_new_tokens=3)) for i in range(6)]
        )
    finally:
        gc.enable()
    assert at_begin == [0, 0, 0] and not alive


def test_generation_does_not_enter_compiled_blocks(monkeypatch):
    """torch.compile would have to translate the cache of every call, and fail at the kernel of a
    recorded step."""

    def refuse(graph, inputs):
        raise AssertionError("torch.compile was asked for a graph")

    monkeypatch.setattr(
        hf_engine, "can_decode", lambda model: False
    )  # through the modules, as on a GPU
    engine = make_engine()
    requests = requests_of(3, 9, num_samples=2)
    expected = facts(engine.generate(requests))
    compile_ = torch.compile
    monkeypatch.setattr(
        hf_strategy.torch, "compile", lambda function: compile_(function, backend=refuse)
    )
    hf_strategy.compile_layers(engine.model)
    check_same(facts(engine.generate(requests)), expected)
    with pytest.raises(
        Exception, match="asked for a graph"
    ):  # outside of generation they are compiled as ever
        engine.model(torch.tensor([[5, 6, 7]]))
