"""TrainingArguments: ROLL's defaults, ranges, warm-up."""

import pytest

from roll.configs import TrainingArguments
from roll.exceptions import ConfigError


def test_defaults_are_rolls():
    assert TrainingArguments().model_dump() == {
        "output_dir": "",
        "max_steps": -1,
        "num_train_epochs": 1.0,
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "seed": 42,
        "data_seed": None,
        "dataloader_num_workers": 0,
        "fp16": False,
        "bf16": False,
        "tf32": None,
        "warmup_ratio": 0.0,
        "warmup_steps": 0,
        "save_hf_model": False,
    }


def test_warmup_steps_win_over_the_ratio_which_rounds_up():
    assert TrainingArguments(warmup_steps=7, warmup_ratio=0.5).get_warmup_steps(100) == 7
    assert TrainingArguments(warmup_ratio=0.05).get_warmup_steps(101) == 6
    assert TrainingArguments().get_warmup_steps(100) == 0


def test_one_precision_at_a_time():
    with pytest.raises(ConfigError, match=r"fp16: found True .* because bf16 is on"):
        TrainingArguments(fp16=True, bf16=True)


@pytest.mark.parametrize(
    "values",
    [
        *(
            {"per_device_train_batch_size": 0},
            {"gradient_accumulation_steps": 0},
            {"max_steps": -2},
        ),
        *(
            {"warmup_ratio": 1.0},
            {"warmup_steps": -1},
            {"learning_rate": -1e-6},
            {"weight_decay": -0.1},
        ),
    ],
)
def test_ranges(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))}: found .* expected a number"):
        TrainingArguments(**values)


def test_numbers_written_as_text_are_read_as_numbers():
    # ${oc.env:STEPS} gives text.
    assert TrainingArguments(max_steps="20", learning_rate="1e-6").max_steps == 20
