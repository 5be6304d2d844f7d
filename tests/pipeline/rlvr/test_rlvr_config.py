"""RLVRConfig: ROLL's defaults and derived values, rewards and their domains."""

import pytest

from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError
from roll.models.tiny import character_tokenizer
from roll.pipeline.data import load_data
from roll.pipeline.rlvr.rlvr_config import (
    RewardConfig,
    RewardFilterConfig,
    RLVRConfig,
)

REWARD = {"worker_cls": "my.rewards.Math"}


def rlvr(**values) -> RLVRConfig:
    return RLVRConfig(**{"prompt_length": 100, "response_length": 28, **values})


def test_defaults_are_rolls():
    config = rlvr()
    expected = {
        "global_template": None,
        "tag_to_template": {},
        "num_return_sequences_in_group": 1,
        "validation": None,
        "rewards": {},
        "difficulty_loss_weight": False,
        "length_loss_weight": False,
        "rl_loss_coef": 1.0,
        "importance_sampling": "token",
        "val_greedy": False,
        "val_n_sample": 1,
        "max_len_mask": False,
        "difficulty_mask": False,
        "difficulty_low_threshold": 0.0,
        "difficulty_high_threshold": 1.0,
        "error_max_len_clip": False,
        "error_max_len_threshold": 9999999999,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert {
        name: getattr(config, name).worker_cls
        for name in ("actor_train", "actor_infer", "reference", "critic")
    } == {
        "actor_train": "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "actor_infer": "roll.pipeline.base_worker.InferWorker",
        "reference": "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "critic": "roll.pipeline.base_worker.CriticWorker",
    }


def test_defaults_of_rewards_are_rolls():
    config = RewardConfig()
    expected = {
        "judge_prompt": None,
        "judge_model_type": None,
        "judge_model_name": None,
        "judge_api_url": None,
        "judge_api_key": None,
        "format_pattern": None,
        "reward_type": None,
        "response_length_penalty_coef": 0.0,
        "tag_included": [],
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.query_filter_config == RewardFilterConfig(type="no_filter", filter_args={})


def test_lengths_and_samples_reach_the_sampling_arguments():
    config = rlvr(
        num_return_sequences_in_group=4, validation={}, val_prompt_length=10, val_sequence_length=15
    )
    assert (config.sequence_length, config.response_length) == (128, 28)
    sampling = config.actor_infer.generating_args
    assert (sampling.max_new_tokens, sampling.num_return_sequences) == (28, 4)
    assert config.validation.generating_args.max_new_tokens == 5
    assert RLVRConfig(prompt_length=100, sequence_length=128).response_length == 28


def test_sampling_arguments_that_were_given_keep_the_rest():
    given = WorkerConfig(
        generating_args={"temperature": 0.5, "max_new_tokens": 7, "num_return_sequences": 2}
    )
    config = rlvr(actor_infer=given, num_return_sequences_in_group=4)
    sampling = config.actor_infer.generating_args
    assert (sampling.temperature, sampling.max_new_tokens, sampling.num_return_sequences) == (
        0.5,
        28,
        4,
    )
    assert given.generating_args.max_new_tokens == 7


def test_asynchronous_generation():
    config = rlvr(async_generation_ratio=1, num_return_sequences_in_group=2)
    assert config.async_pipeline
    with pytest.raises(
        ConfigError, match=r"async_generation_ratio: found 0.5 .* expected 0, or at least 1"
    ):
        rlvr(async_generation_ratio=0.5)
    assert config.execution_backend == "ray" and config.enable_old_logprobs_recompute
    with pytest.raises(ConfigError, match=r'backend: found "local" .* expected "ray" or "auto"'):
        rlvr(async_generation_ratio=1, backend="local")


def test_domains_and_tags():
    config = rlvr(
        rewards={
            "math": {**REWARD, "tag_included": ["a", "b"]},
            "code": {**REWARD, "tag_included": ["c"]},
        }
    )
    assert config.domain_2_tag == {"math": {"a", "b"}, "code": {"c"}}
    assert config.tag_2_domain == {"a": "math", "b": "math", "c": "code"}
    assert config.rewards["math"].name == "reward-math"
    assert config.rewards["math"].training_args.seed == 42
    assert list(config.active_roles()) == [
        "actor_train", "actor_infer", "reference", "critic", "reward-math", "reward-code"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rewards": {"math": {}}}, "rewards.math.reward_fn: missing; name a function"),
        (
            {
                "rewards": {
                    "a": {**REWARD, "tag_included": ["x"]},
                    "b": {**REWARD, "tag_included": ["x"]},
                }
            },
            'rewards.b.tag_included: found "x" .* tags of one domain only; "x" also belongs to a',
        ),
        (
            {
                "rewards": {"math": REWARD},
                "actor_train": {"data_args": {"domain_interleave_probs": {"maths": 1}}},
            },
            'domain_interleave_probs: found "maths" .* expected a domain of rewards: math; did you mean "math"',
        ),
        (
            {"rewards": {"math": {**REWARD, "query_filter_config": {"type": "mean"}}}},
            "rewards.math.query_filter_config.type: found .* expected one of no_filter, mean_filter, std_filter",
        ),
        (
            {"rewards": {"math": {**REWARD, "strategy_args": {"strategy_name": "hf_train"}}}},
            "rewards.math.strategy_args.strategy_name: found .* expected one of hf_infer",
        ),
        (
            {"sequence_length": 100, "response_length": None},
            "prompt_length: found 100 .* less than sequence_length = 100",
        ),
        (
            {"importance_sampling": "sentence"},
            "importance_sampling: found .* expected one of token, seq, segment",
        ),
    ],
)
def test_values_that_do_not_fit(values, message):
    with pytest.raises(ConfigError, match=message):
        rlvr(**values)


def test_batches_that_do_not_divide_are_refused_where_a_model_is_trained():
    role = {
        "strategy_args": {"strategy_name": "hf_train"},
        "training_args": {"gradient_accumulation_steps": 4},
    }
    values = {"num_return_sequences_in_group": 8, "rollout_batch_size": 101}
    with pytest.raises(
        ConfigError,
        match=r"rollout_batch_size: found 101 .* expected a multiple of 4, .*; use 100 or 104",
    ):
        rlvr(actor_train=role, **values)
    assert rlvr(**values).rollout_batch_size == 101  # nothing is trained, so nothing has to divide
    assert (
        rlvr(
            actor_train=role, **{**values, "rollout_batch_size": 100}
        ).actor_train.training_args.max_steps
        == 500 * 25
    )


def test_what_is_missing_for_training():
    keys = [
        problem.key for problem in rlvr(adv_estimator="grpo", init_kl_coef=0).missing_for_training()
    ]
    assert keys == [
        "actor_train.strategy_args",
        "actor_infer.strategy_args",
        "actor_train.data_args.file_name",
        "rewards",
    ]
    judge = {**REWARD, "strategy_args": {"strategy_name": "hf_infer"}}
    keys = [problem.key for problem in rlvr(rewards={"judge": judge}).missing_for_training()]
    assert "rewards.judge.model_args.model_name_or_path" in keys


def test_a_reference_is_the_policy_without_its_adapter():
    assert "reference" in rlvr().active_roles()
    assert (
        "reference" not in rlvr(actor_train={"model_args": {"lora_target": "all"}}).active_roles()
    )
    assert "reference" not in rlvr(init_kl_coef=0).active_roles()


@pytest.mark.parametrize("scope", ["seq", "segment"])
@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"adv_estimator": "gae"}, "adv_estimator: gae"),
        (
            {"add_token_level_kl": True, "init_kl_coef": 0.1},
            "add_token_level_kl: true with init_kl_coef: 0.1",
        ),
        ({"gamma": 0.9}, "gamma: 0.9"),
        ({"whiten_rewards": True}, "whiten_rewards: true"),
        ({"whiten_rewards": True, "gamma": 0.5}, "gamma: 0.5 and whiten_rewards: true"),
        ({"add_token_level_kl": True, "init_kl_coef": 0}, None),
        ({"init_kl_coef": 0.1}, None),
        (
            {"gamma": 0.9, "actor_train": {"pg_variant": "cispo"}},
            None,
        ),  # its gradient is each token's own
        ({}, None),
    ],
)
def test_a_shared_ratio_that_meets_advantages_of_tokens_is_named(scope, values, cause):
    values = {"adv_estimator": "grpo", "num_return_sequences_in_group": 8, **values}
    found = rlvr(importance_sampling=scope, **values).cautions()
    assert len(found) == (cause is not None)
    if cause:
        assert found[0].startswith(
            f"importance_sampling: {scope} trains every token on the mean advantage"
        )
        assert (
            f"and {cause} gives tokens advantages of their own; importance_sampling: {scope}_token"
            in found[0]
        )
    for other in ("token", f"{scope}_token"):
        assert rlvr(importance_sampling=other, **values).cautions() == []


def test_a_template_for_a_tag_that_nothing_has_is_named(tmp_path, caplog):
    def cautions(**rewards):
        return rlvr(tag_to_template={"math": "base", "mth": "base"}, rewards=rewards).cautions()

    listed = {"reward_fn": "my.py:score", "tag_included": ["math"]}
    (sentence,) = cautions(a=listed)
    assert sentence.startswith("without effect, unless rows name their domain in a column: ")
    assert "tag_to_template.mth; no rewards.DOMAIN.tag_included has this tag; did you" in sentence
    # A domain that takes any tag: the data decides.
    assert cautions(a=listed, b={"reward_fn": "my.py:score"}) == []
    (tmp_path / "data.jsonl").write_text('{"prompt": "1", "tag": "math"}\n')
    config = rlvr(
        tag_to_template={"math": "base", "mth": "base"},
        rewards={"a": {"reward_fn": "my.py:score"}},
        actor_train={"data_args": {"file_name": str(tmp_path / "data.jsonl")}},
        global_template="base",
    )
    with caplog.at_level("WARNING", "roll"):
        load_data(config, "actor_train", character_tokenizer())
    (warning,) = caplog.messages
    assert warning.startswith("without effect: tag_to_template.mth; ")
    assert warning.endswith('data.jsonl has no such row; did you mean "math"?')
