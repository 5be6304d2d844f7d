"""DPOConfig: ROLL's defaults, pairs that stay pairs, options that exclude each other."""

import pytest

from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError
from roll.pipeline.dpo.dpo_config import DPOConfig


def dpo(**values) -> DPOConfig:
    return DPOConfig(**{"sequence_length": 512, **values})


def trained(**training_args) -> WorkerConfig:
    return WorkerConfig(strategy_args={"strategy_name": "hf_train"}, training_args=training_args)


def test_defaults_are_rolls():
    config = dpo()
    expected = {
        "global_template": None,
        "max_grad_norm": 1.0,
        "pretrain": None,
        "ipo": False,
        "beta": 0.1,
        "label_smoothing": 0.0,
        "chosen_key": "chosen",
        "rejected_key": "rejected",
        "loss_type": "sigmoid",
        "reference_free": False,
        "reference_log_probs": "live",
    }
    assert {key: getattr(config, key) for key in expected} == expected
    for role in (config.actor_train, config.reference):
        assert role.worker_cls == "roll.pipeline.dpo.actor_worker.ActorWorker"
    assert (config.actor_train.name, config.reference.name, config.validation.name) == (
        "actor_train",
        "reference",
        "validation",
    )


def test_two_configs_from_the_same_roles_are_equal_and_the_roles_unchanged():
    # ROLL doubles the batch sizes of the objects it is given, once more for every config that is
    # built from them.
    actor, reference = trained(per_device_train_batch_size=4), WorkerConfig(infer_batch_size=6)
    before = actor.model_copy(deep=True), reference.model_copy(deep=True)
    first, second = (dpo(actor_train=actor, reference=reference, seed=9) for _ in range(2))
    assert first == second
    assert (actor, reference) == before
    assert first.actor_train.training_args.per_device_train_batch_size == 4
    assert first.reference.infer_batch_size == 6
    again = dpo(actor_train=first.actor_train, reference=first.reference, seed=9)
    assert again == first


def test_sizes_count_pairs_and_rows_are_twice_as_many():
    role = WorkerConfig(
        strategy_args={"strategy_name": "fsdp2_train"},
        device_mapping=[0, 1],
        training_args={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    )
    config = dpo(actor_train=role, max_steps=7)
    assert (config.pairs_per_step, config.rows_per_step) == (24, 48)
    assert (
        config.actor_train.training_args.max_steps == 7
    )  # one optimizer step per batch, on any number of ranks
    plan = config.batch_plans()["actor_train"]
    assert (plan.rows, plan.rows_per_rank, plan.rows_per_micro_batch) == (48, 24, 8)


def test_roles_without_a_model_take_pretrain():
    config = dpo(pretrain="base", reference={"model_args": {"model_name_or_path": "other"}})
    assert config.actor_train.model_args.model_name_or_path == "base"
    assert config.reference.model_args.model_name_or_path == "other"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 0}, "beta: found 0 .* greater than 0"),
        ({"label_smoothing": 0.5}, "label_smoothing: found 0.5 .* less than 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing: found -0.1 .* or equal to 0"),
        (
            {"ipo": True, "loss_type": "hinge"},
            'loss_type: found "hinge" .* expected ipo_sum, because ipo is on; keep one',
        ),
        (
            {"ipo": True, "label_smoothing": 0.1},
            "label_smoothing: found 0.1 .* the ipo_sum loss does not use it",
        ),
        (
            {"loss_type": "hinge", "label_smoothing": 0.1},
            "the hinge loss does not use it; or use one of sigmoid",
        ),
        (
            {"loss_type": "exo_pair"},
            "label_smoothing: found 0.0 .* more than 0 for the exo_pair loss; 0.001 is usual",
        ),
        ({"loss_type": "dpo"}, "loss_type: found .* expected one of sigmoid, ipo, ipo_sum, hinge"),
        (
            {"reference_free": True, "reference_log_probs": "precompute"},
            "reference_log_probs: .* expected live",
        ),
        (
            {"actor_train": {"strategy_args": {"strategy_name": "vllm"}}},
            "expected one of hf_train, fsdp2_train",
        ),
    ],
)
def test_values_that_do_not_fit(values, message):
    with pytest.raises(ConfigError, match=message):
        dpo(**values)


def test_losses_that_fit():
    for loss in (
        "ipo",
        "hinge",
        "robust",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "aot",
    ):
        assert dpo(loss_type=loss).loss_type == loss
    for loss in ("aot_unpaired", "discopop", "sigmoid_norm"):
        assert dpo(loss_type=loss).loss_type == loss
    assert dpo(ipo=True, loss_type="ipo_sum").ipo
    assert dpo(loss_type="exo_pair", label_smoothing=0.01).label_smoothing == 0.01


def test_a_reference_is_started_only_where_one_is_needed():
    assert list(dpo().active_roles()) == ["actor_train", "reference"]
    assert list(dpo(reference_free=True).active_roles()) == ["actor_train"]
    assert list(dpo(actor_train={"model_args": {"lora_target": "all"}}).active_roles()) == [
        "actor_train"
    ]


def test_what_is_missing_for_training():
    config = dpo(pretrain="base", actor_train=trained())
    assert [problem.key for problem in config.missing_for_training()] == [
        "reference.strategy_args",
        "actor_train.data_args.file_name",
    ]


def test_the_chat_template_in_effect():
    assert dpo().template == "native"
    assert dpo(actor_train={"data_args": {"template": "qwen3"}}).template == "qwen3"
    assert (
        dpo(global_template="chatml", actor_train={"data_args": {"template": "qwen3"}}).template
        == "chatml"
    )
