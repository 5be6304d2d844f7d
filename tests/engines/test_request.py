import pytest

from roll.configs.arguments import GeneratingArguments
from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams


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
    "wrong",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.0},
        {"max_new_tokens": 0},
    ],
)
def test_wrong_parameters_are_named(wrong):
    with pytest.raises(ValueError, match=f"sampling: {next(iter(wrong))} is .*, expected"):
        SamplingParams(**wrong)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty text"):
        SamplingParams(stop_strings=("", "x"))


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
