"""GeneratingArguments: ROLL's defaults and what a generator is given."""

import pytest

from roll.configs import GeneratingArguments
from roll.exceptions import ConfigError


def test_defaults_are_rolls_and_min_p_is_off():
    assert GeneratingArguments().model_dump() == {
        "do_sample": True,
        "temperature": 0.95,
        "top_p": 0.7,
        "top_k": 50,
        "min_p": 0.0,
        "num_beams": 1,
        "max_length": 8192,
        "max_new_tokens": 8192,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "num_return_sequences": 1,
        "stop_strings": None,
        "include_stop_str_in_output": None,
        "logprobs": 0,
    }


def test_to_dict_has_one_length_limit_and_no_undecided_key():
    values = GeneratingArguments(max_new_tokens=7).to_dict()
    assert values["max_new_tokens"] == 7
    assert "max_length" not in values and "include_stop_str_in_output" not in values
    values = GeneratingArguments(
        max_new_tokens=0, max_length=9, include_stop_str_in_output=True
    ).to_dict()
    assert values["max_length"] == 9 and "max_new_tokens" not in values
    assert values["include_stop_str_in_output"] is True


def test_a_beam_search_is_not_built():
    with pytest.raises(
        ConfigError, match=r"num_beams: found 3 \(int\); not built yet: beam search; .* set it to 1"
    ):
        GeneratingArguments(num_beams=3)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1},
        {"num_beams": 0},
    ],
)
def test_ranges(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))}: found .* expected a number"):
        GeneratingArguments(**values)


def test_the_values_that_switch_sampling_filters_off():
    args = GeneratingArguments(temperature=0, top_k=-1, top_p=1)
    assert (args.temperature, args.top_k, args.top_p) == (0, -1, 1)
