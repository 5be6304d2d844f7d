"""The four blocks of a role, device lists, and learning rates beside those of transformers."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from roll.configs import DataArguments, GeneratingArguments, ModelArguments, TrainingArguments
from roll.configs.arguments import parse_device_mapping
from roll.exceptions import ConfigError


def test_defaults_are_rolls():
    assert DataArguments().model_dump() == {
        **{"template": "native", "tag": "tag", "response": "solution"},
        **dict.fromkeys(["domain_interleave_probs", "file_name", "prompt", "messages"]),
        "custom_data_kwargs_func": None,
    }
    assert GeneratingArguments().model_dump() == {
        **{"do_sample": True, "temperature": 0.95, "top_p": 0.7, "top_k": 50},
        "min_p": 0.0,  # off
        **{"max_length": 8192, "max_new_tokens": 8192, "repetition_penalty": 1.0},
        **{"num_return_sequences": 1, "stop_strings": None, "include_stop_str_in_output": None},
    }
    assert ModelArguments().model_dump() == {
        **{"additional_target": None, "autocast_adapter_dtype": True, "lora_alpha": 16},
        **{"lora_dropout": 0.0, "lora_rank": 8, "lora_target": None, "model_name_or_path": None},
        **{"random_init": False, "trust_remote_code": False, "adapter_name_or_path": None},
        **{"attn_implementation": None, "disable_gradient_checkpointing": False},
        **{"gradient_checkpointing_use_reentrant": None, "dtype": "bf16", "model_type": None},
        **{"num_labels": 1, "model_config_kwargs": {}, "freeze_module_prefix": None},
        "model_max_length": None,
    }
    assert TrainingArguments().model_dump() == {
        **{"output_dir": "", "max_steps": -1, "num_train_epochs": 1.0, "learning_rate": 5e-5},
        **{"lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta1": 0.9},
        **{"adam_beta2": 0.999, "per_device_train_batch_size": 8, "seed": 42, "data_seed": None},
        **{"gradient_accumulation_steps": 1, "fp16": False, "bf16": False},
        **{"warmup_ratio": 0.0, "warmup_steps": 0},
    }


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (
            DataArguments,
            {"prompt": "p", "messages": "m"},
            r'messages: found "m" .*, expected null, because prompt is "p"; keep one of them',
        ),
        (
            DataArguments,
            {"domain_interleave_probs": {"a": 0.5, "b": 0.4}},
            "shares that add up to 1, not 0.9",
        ),
        (TrainingArguments, {"fp16": True, "bf16": True}, "fp16: found True .* because bf16 is on"),
        (
            TrainingArguments,
            {"lr_scheduler_type": "polynomial", "learning_rate": 1e-8},
            "learning_rate: found 1e-08 .* expected more than 1e-07",
        ),
        (
            ModelArguments,
            {"dtype": "bfloat16"},
            r'dtype: found "bfloat16" .* expected one of fp32, bf16, fp16; did you mean',
        ),
        *(
            (GeneratingArguments, {key: value}, f"{key}: found .* expected (greater|less) than")
            for key, value in [
                ("temperature", -0.1),
                ("top_p", 0),
                ("top_p", 1.1),
                ("top_k", -2),
                ("min_p", 1),
            ]
        ),
        *(
            (TrainingArguments, {key: value}, f"{key}: found .* expected (greater|less) than")
            for key, value in [
                ("per_device_train_batch_size", 0),
                ("gradient_accumulation_steps", 0),
                ("max_steps", -2),
                ("warmup_ratio", 1.0),
                ("warmup_steps", -1),
                ("learning_rate", -1e-6),
                ("weight_decay", -0.1),
            ]
        ),
    ],
)
def test_values_that_do_not_fit(cls, values, message):
    with pytest.raises(ConfigError, match=message):
        cls(**values)


def test_values_at_the_edge_and_numbers_written_as_text():
    assert DataArguments(domain_interleave_probs={"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.1, "e": 0.1})
    args = GeneratingArguments(temperature=0, top_k=-1, top_p=1)
    assert (args.temperature, args.top_k, args.top_p) == (0, -1, 1)
    # ${oc.env:STEPS} gives text.
    assert TrainingArguments(max_steps="20", learning_rate="1e-6").max_steps == 20


def test_files_is_a_list_however_it_was_written():
    assert DataArguments().files == []
    assert DataArguments(file_name="a.jsonl").files == ["a.jsonl"]  # not the letters of the name
    assert DataArguments(file_name=["a.jsonl", "b.jsonl"]).files == ["a.jsonl", "b.jsonl"]


def test_a_generator_gets_one_length_limit_and_no_undecided_key():
    values = GeneratingArguments(max_new_tokens=7).to_dict()
    assert values["max_new_tokens"] == 7
    assert "max_length" not in values and "include_stop_str_in_output" not in values
    args = GeneratingArguments(max_new_tokens=0, max_length=9, include_stop_str_in_output=True)
    values = args.to_dict()
    assert values["max_length"] == 9 and "max_new_tokens" not in values
    assert values["include_stop_str_in_output"] is True


def test_lora_names_are_split_at_commas_and_a_regular_expression_is_not():
    names = {"lora_target": "q_proj, v_proj", "additional_target": "lm_head"}
    args = ModelArguments(**names, freeze_module_prefix="embed,head")
    assert args.lora_target == ["q_proj", "v_proj"] and args.is_lora
    assert args.additional_target == ["lm_head"]
    assert args.freeze_module_prefix == ["embed", "head"]
    pattern = r".*\.(q_proj|v_proj)$"
    assert ModelArguments(lora_target=pattern).lora_target == pattern
    assert ModelArguments(lora_target=["a", "b"]).lora_target == ["a", "b"]
    assert ModelArguments(lora_rank=64).lora_alpha == 128
    assert ModelArguments(lora_rank=64, lora_alpha=32).lora_alpha == 32
    assert not ModelArguments().is_lora


def test_names_of_attention_and_precision():
    assert ModelArguments(attn_implementation="fa2").attn_implementation == "flash_attention_2"
    assert ModelArguments(attn_implementation="sdpa").attn_implementation == "sdpa"
    names = [ModelArguments(dtype=dtype).compute_dtype for dtype in ("fp32", "bf16", "fp16")]
    assert names == ["float32", "bfloat16", "float16"]


# device_mapping is read as data: nothing is ever run


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("list(range(0,8))", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("list(range(0, 8, 2))", [0, 2, 4, 6]),
        ("list(range(3))", [0, 1, 2]),
        ("range(2, 4)", [2, 3]),
        ("[0, 1]", [0, 1]),
        ("0, 1", [0, 1]),
        (" [5] ", [5]),
        ("list(range(0,2)) + [6, 7]", [0, 1, 6, 7]),
        ("list(range(0,1)) + list(range(4,6)) + [9]", [0, 4, 5, 9]),
        ("list([1, 2])", [1, 2]),
        ([3, 1], [3, 1]),
        ((0, 1), [0, 1]),
    ],
)
def test_forms_that_roll_files_use(written, devices):
    assert parse_device_mapping(written) == devices


@pytest.mark.parametrize(
    "written",
    [
        *("all", "0-3", "3", 3, {"a": 1}, ["a"], [1.5], [True], [-1], "", "1 + 2"),
        *("list(range('8'))", "list(8)", "[0, 'a']", "[-1]", "[[0]]", "list(range(0, 8, 0))"),
        *("list(range(0,8)", "open('x')", "__import__('os').system('false')"),
        "[i for i in range(8)]",
    ],
)
def test_what_is_no_list_of_numbers_says_how_to_write_one(written):
    with pytest.raises(
        ValueError, match=r"expected a list of GPU numbers; write \[0, 1\], list\(range\(0,8\)\)"
    ):
        parse_device_mapping(written)


def test_empty_repeated_and_absurd_lists():
    with pytest.raises(ValueError, match=r"at least one GPU number; leave the key out"):
        parse_device_mapping("list(range(4,4))")
    with pytest.raises(ValueError, match=r"every GPU once; 1 is named twice"):
        parse_device_mapping("[0, 1] + [1]")
    with pytest.raises(ValueError, match=r"at most 65536 GPUs, not 1000000000000"):
        parse_device_mapping("list(range(0, 10**12))".replace("10**12", "1000000000000"))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 5))
def test_ranges_mean_what_python_means(start, length, step):
    stop = start + length
    assert parse_device_mapping(f"list(range({start},{stop},{step}))") == list(
        range(start, stop, step)
    )


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_any_text_gives_a_list_or_a_value_error(text):
    try:
        devices = parse_device_mapping(text)
    except ValueError:
        return
    assert devices and all(type(device) is int and device >= 0 for device in devices)


# schedules


def test_warmup_steps_win_over_the_ratio_which_rounds_up():
    assert TrainingArguments(warmup_steps=7, warmup_ratio=0.5).get_warmup_steps(100) == 7
    assert TrainingArguments(warmup_ratio=0.05).get_warmup_steps(101) == 6
    assert TrainingArguments().get_warmup_steps(100) == 0


KINDS = [
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]


def rates_of_transformers(args: TrainingArguments, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(total),
        num_training_steps=total,
    )
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (3, 20), (5, 6), (20, 20)])
def test_every_step_of_every_schedule(kind, warmup, total):
    if kind == "polynomial" and warmup == total:
        return  # transformers divides by zero; a config with this schedule is refused
    args = TrainingArguments(lr_scheduler_type=kind, learning_rate=3e-4, warmup_steps=warmup)
    ours = [args.learning_rate_at(step, total) for step in range(total)]
    assert ours == pytest.approx(rates_of_transformers(args, total), rel=1e-12, abs=1e-18)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.floats(0, 0.99), st.floats(1e-6, 1e-2))
def test_warmup_ratios(kind, total, ratio, rate):
    args = TrainingArguments(lr_scheduler_type=kind, learning_rate=rate, warmup_ratio=ratio)
    assume(kind != "polynomial" or args.get_warmup_steps(total) < total)
    ours = [args.learning_rate_at(step, total) for step in range(total)]
    assert ours == pytest.approx(rates_of_transformers(args, total), rel=1e-9, abs=1e-18)


def test_by_hand():
    args = TrainingArguments(lr_scheduler_type="linear", learning_rate=1.0, warmup_steps=2)
    assert [args.learning_rate_at(step, 6) for step in range(6)] == [
        0.0,
        0.5,
        1.0,
        0.75,
        0.5,
        0.25,
    ]
    assert args.learning_rate_at(100, 6) == 0.0
