"""The batch arithmetic, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.batch_plan import BatchPlan, division_problems
from roll.configs.worker_config import WorkerConfig


def role(
    ranks: int = 1, per_device: int = 8, accumulation: int = 1, **training_args
) -> WorkerConfig:
    sizes = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    strategy = {"strategy_name": "hf_train"}
    return WorkerConfig(
        name="actor_train",
        world_size=ranks,
        strategy_args=strategy,
        training_args={**sizes, **training_args},
    )


def plan(config: WorkerConfig, **values) -> BatchPlan:
    return BatchPlan(
        role=config,
        **{"prompts": 64, "samples_per_prompt": 8, "sequence_length": 1024, "steps": 500, **values},
    )


def test_the_example_of_the_docstring():
    result = plan(role(ranks=4, per_device=2, accumulation=16))
    assert (result.samples, result.rows, result.ranks, result.rows_per_rank) == (512, 512, 4, 128)
    assert (result.rows_per_micro_batch, result.micro_batches_per_optimizer_step) == (2, 16)
    assert (result.optimizer_steps_per_batch, result.total_optimizer_steps) == (4, 2000)
    assert result.tokens_per_step == 512 * 1024
    assert result.problems("rollout_batch_size") == []


def test_epochs_multiply_optimizer_steps():
    assert plan(role(per_device=512), epochs=3).optimizer_steps_per_batch == 3


def test_pairs_are_two_rows_of_one_sample():
    result = plan(
        role(per_device=4, accumulation=2), prompts=8, samples_per_prompt=1, rows_per_sample=2
    )
    assert (result.rows, result.rows_per_micro_batch, result.optimizer_steps_per_batch) == (
        16,
        8,
        1,
    )


def test_turns_round_up():
    assert (
        plan(
            role(per_device=100), prompts=20, samples_per_prompt=1, rows_are_turns=True
        ).optimizer_steps_per_batch
        == 1
    )


def test_learning_rates_at_first_middle_and_last_step():
    config = role(per_device=512, learning_rate=1.0, lr_scheduler_type="linear")
    assert plan(config, steps=4).learning_rates() == (1.0, 0.5, 0.25)
    assert plan(config, steps=1).learning_rates() == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("prompts", "samples", "ranks", "per_device", "accumulation", "low", "high"),
    [
        (100, 8, 4, 8, 4, 96, 112),  # steps of 128 samples are 16 prompts
        (100, 1, 1, 8, 1, 96, 104),
        (3, 4, 1, 8, 1, 2, 4),
        (1, 1, 1, 8, 1, 8, 16),  # less than one optimizer step
        (50, 8, 1, 8, 16, 48, 64),
    ],
)
def test_what_does_not_divide_names_the_two_nearest_values(
    prompts, samples, ranks, per_device, accumulation, low, high
):
    result = plan(
        role(ranks, per_device, accumulation), prompts=prompts, samples_per_prompt=samples
    )
    (problem,) = result.problems("rollout_batch_size")
    assert problem.key == "rollout_batch_size"
    assert problem.message.startswith(f"found {prompts} (int), expected a multiple of ")
    assert problem.message.endswith(f"; use {low} or {high}")
    for value in (low, high):
        assert (
            plan(
                role(ranks, per_device, accumulation), prompts=value, samples_per_prompt=samples
            ).problems("x")
            == []
        )


def test_a_polynomial_schedule_needs_steps_after_its_warmup():
    config = role(per_device=512, lr_scheduler_type="polynomial", warmup_steps=4)
    assert plan(config, steps=5).schedule_problems("actor_train") == []
    (problem,) = plan(config, steps=4).schedule_problems("actor_train")
    assert problem.key == "actor_train.training_args.warmup_steps"
    assert (
        problem.message
        == "found 4 (int), expected fewer than the 4 optimizer steps of the run for a polynomial schedule"
    )


def test_the_message_shows_the_arithmetic():
    (problem,) = plan(role(4, 8, 4), prompts=100).problems("rollout_batch_size")
    assert str(problem) == (
        "rollout_batch_size: found 100 (int), expected a multiple of 16, so that 100 x 8 samples fill the optimizer "
        "steps of actor_train (128 = 4 ranks x per_device_train_batch_size 8 x gradient_accumulation_steps 4); "
        "use 96 or 112"
    )


def test_a_second_condition_is_met_by_the_values_too():
    (problem,) = plan(role(per_device=8), prompts=100, samples_per_prompt=1).problems(
        "rollout_batch_size", multiple_of=12
    )
    assert problem.message.endswith("; use 96 or 120")


def test_values_that_suit_all_roles_are_proposed():
    actor, critic = (
        plan(role(per_device=12), prompts=100, samples_per_prompt=1),
        plan(role(per_device=50), prompts=100),
    )
    (problem,) = division_problems([critic, actor], "rollout_batch_size")
    assert problem.message.startswith("found 100 (int), expected a multiple of 300,")
    assert problem.message.endswith("; use 300 or 600")
    assert division_problems([critic], "rollout_batch_size") == []
    assert division_problems([], "rollout_batch_size") == []


@settings(max_examples=50, deadline=None)
@given(*[st.integers(1, size) for size in (64, 8, 8, 8, 8)])
def test_plans_without_problems_use_every_row_exactly_once(
    prompts, samples, ranks, per_device, accumulation
):
    result = plan(
        role(ranks, per_device, accumulation), prompts=prompts, samples_per_prompt=samples
    )
    divides = prompts * samples % (ranks * per_device * accumulation) == 0
    assert (result.problems("x") == []) == divides
    if divides:
        per_step = (
            result.ranks * result.rows_per_micro_batch * result.micro_batches_per_optimizer_step
        )
        assert result.optimizer_steps_per_batch * per_step == result.rows
