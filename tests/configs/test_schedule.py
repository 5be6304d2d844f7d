"""learning_rate_at gives the numbers of transformers' schedulers."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from roll.configs import TrainingArguments
from roll.configs.schedule import learning_rate_at

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
    ours = [learning_rate_at(args, step, total) for step in range(total)]
    assert ours == pytest.approx(rates_of_transformers(args, total), rel=1e-12, abs=1e-18)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.floats(0, 0.99), st.floats(1e-6, 1e-2))
def test_warmup_ratios(kind, total, ratio, rate):
    args = TrainingArguments(lr_scheduler_type=kind, learning_rate=rate, warmup_ratio=ratio)
    assume(kind != "polynomial" or args.get_warmup_steps(total) < total)
    ours = [learning_rate_at(args, step, total) for step in range(total)]
    assert ours == pytest.approx(rates_of_transformers(args, total), rel=1e-9, abs=1e-18)


def test_by_hand():
    args = TrainingArguments(lr_scheduler_type="linear", learning_rate=1.0, warmup_steps=2)
    assert [learning_rate_at(args, step, 6) for step in range(6)] == [
        0.0,
        0.5,
        1.0,
        0.75,
        0.5,
        0.25,
    ]
    assert learning_rate_at(args, 100, 6) == 0.0
