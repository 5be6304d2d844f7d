"""Requests, sampling parameters, stop strings on tokens, and a second chance for what fails."""

import pytest
from tiny_models import tiny_tokenizer
from tiny_tokenizer import bpe_tokenizer

from roll.configs import GeneratingArguments
from roll.engines.request import (
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
    cut_at_stop_string,
    end_tokens,
    generate_with_retry,
)


def test_parameters_come_from_generating_arguments():
    args = GeneratingArguments(
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        max_new_tokens=12,
        stop_strings=["\n"],
        repetition_penalty=1.1,
    )
    params = SamplingParams.from_config(args, seed=5)
    assert params == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        max_new_tokens=12,
        stop_strings=("\n",),
        repetition_penalty=1.1,
        include_stop_str_in_output=True,
        seed=5,
    )
    assert SamplingParams.from_config(args.to_dict(), seed=5) == params
    assert hash(params)


def test_the_whole_length_limits_the_response_where_its_own_limit_is_off():
    args = GeneratingArguments(max_new_tokens=0, max_length=20)
    assert SamplingParams.from_config(args, prompt_length=6).max_new_tokens == 14
    with pytest.raises(ValueError, match="max_new_tokens is -1, expected at least 1"):
        SamplingParams.from_config(args, prompt_length=21)


def test_no_sampling_is_temperature_zero():
    assert SamplingParams.from_config(
        {"do_sample": False, "temperature": 0.9, "max_new_tokens": 3}
    ).is_greedy
    assert not SamplingParams.from_config({"max_new_tokens": 3}).is_greedy


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, expected at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"top_p": 1.1}, "top_p is 1.1, expected above 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2, expected"),
        ({"min_p": 1.0}, "min_p is 1.0, expected"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"stop_strings": ("", "x")}, "empty text"),
    ],
)
def test_wrong_parameters_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_beams_are_refused():
    with pytest.raises(ValueError, match=r"num_beams: found 4, expected 1"):
        SamplingParams.from_config({"num_beams": 4})


def test_a_resumed_request_continues_one_sample_under_its_key():
    request = GenerationRequest("r", (1, 2), SamplingParams(), num_samples=2, prefix_ids=())
    output = GenerationOutput("r", 1, [7, 8], [-1.0, -1.0], "abort", 0)
    rest = request.resume(output)
    assert (rest.prefix_ids, rest.num_samples, rest.keys) == ((7, 8), 1, ("r/1",))
    again = rest.resume(GenerationOutput("r", 0, [9], [-1.0], "abort", 0))
    assert (again.prefix_ids, again.keys) == ((7, 8, 9), ("r/1",))


def test_keys_and_samples_must_match():
    with pytest.raises(ValueError, match="1 sample_keys for 2 samples"):
        GenerationRequest("r", (1,), SamplingParams(), num_samples=2, sample_keys=("a",))
    with pytest.raises(ValueError, match="num_samples is 0"):
        GenerationRequest("r", (1,), SamplingParams(), num_samples=0)


PIECES = ["a", "b<", "/x>", "c", "</x>"]


def decode(ids):
    return "".join(PIECES[token] for token in ids)


@pytest.mark.parametrize(
    ("ids", "stops", "included", "excluded"),
    [
        ([0, 1, 2, 3], ["</x>"], 3, 1),  # the stop string begins inside "b<", which goes as a whole
        ([0, 3], ["</x>"], None, None),
        ([0, 4, 3], ["</x>"], 2, 1),
        ([4], ["</x>"], 1, 0),
        ([0, 3, 0, 3], ["ca"], 3, 1),
        ([0, 3, 0, 3], ["aca", "c"], 2, 1),  # complete first
        ([0, 3, 0, 3], ["c", "ac"], 2, 0),  # complete at the same time: the longer one
        ([0, 0, 0], ["aa"], 2, 0),
    ],
)
def test_a_response_ends_at_the_first_stop_string(ids, stops, included, excluded):
    assert cut_at_stop_string(ids, decode, stops, include=True) == included
    assert cut_at_stop_string(ids, decode, stops, include=False) == excluded


def test_stop_strings_are_found_across_tokens_of_a_real_tokenizer():
    tokenizer = bpe_tokenizer()
    ids = tokenizer.encode("7 plus 3 = 10 10", add_special_tokens=False)
    pieces = [tokenizer.decode([token]) for token in ids]
    assert " 10" in pieces  # "= 1" ends in the middle of a token
    kept = cut_at_stop_string(ids, tokenizer.decode, ["= 1"], include=True)
    assert tokenizer.decode(ids[:kept]) == "7 plus 3 = 10"
    kept = cut_at_stop_string(ids, tokenizer.decode, ["= 1"], include=False)
    assert tokenizer.decode(ids[:kept]) == "7 plus 3 "


def test_end_tokens_are_those_of_tokenizer_and_generation_config():
    class Config:
        eos_token_id = (7, 9)

    tokenizer = tiny_tokenizer()
    assert end_tokens(tokenizer) == {2}
    assert end_tokens(tokenizer, Config) == {2, 7, 9}
    Config.eos_token_id = 5
    assert end_tokens(tokenizer, Config) == {2, 5}


class Flaky:
    """Fails the samples of a request as often as told."""

    policy_version = 0

    def __init__(self, failures):
        self.failures = dict(failures)
        self.calls = []

    def generate(self, requests, *, on_output=None):
        self.calls.append([request.request_id for request in requests])
        outputs = []
        for request in requests:
            fails = self.failures.get(request.request_id, 0) > 0
            self.failures[request.request_id] = self.failures.get(request.request_id, 0) - 1
            for index in range(request.num_samples):
                error = "out of luck: details" if fails and index == 0 else None
                reason = "error" if error else "stop"
                outputs.append(
                    GenerationOutput(request.request_id, index, [], [], reason, 0, error)
                )
                if on_output:
                    on_output(outputs[-1])
        return outputs

    def abort(self, request_ids=None): ...

    def reset_prefix_cache(self): ...


def test_failed_requests_get_a_second_chance_and_are_then_dropped_with_their_reason():
    requests = [GenerationRequest(name, (1,), SamplingParams(), num_samples=2) for name in "abc"]
    engine = Flaky({"a": 1, "c": 2})
    heard = []
    result = generate_with_retry(engine, requests, on_output=heard.append)
    assert engine.calls == [["a", "b", "c"], ["a", "c"]]
    assert [(output.request_id, output.sample_index) for output in result.all_outputs] == [
        (name, index) for name in "abc" for index in (0, 1)
    ]
    assert [output.request_id for output in result.all_outputs if output.error] == ["c"]
    assert result.reasons == {"out of luck": 1}
    assert result.num_retried == 2
    assert sorted((output.request_id, output.sample_index) for output in heard) == [
        (name, index) for name in "abc" for index in (0, 1)
    ]


def test_without_failures_there_is_one_call():
    engine = Flaky({})
    assert (
        generate_with_retry(engine, [GenerationRequest("a", (1,), SamplingParams())]).reasons == {}
    )
    assert engine.calls == [["a"]]
