"""Which rows a run draws from, as its config says."""

from types import SimpleNamespace

import pytest
from tiny_models import tiny_tokenizer

from roll.configs.data_args import DataArguments
from roll.datasets.tables import Table
from roll.exceptions import ConfigError
from roll.pipeline.data import encode_table, make_sampler


def config(**data_args):
    training_args = SimpleNamespace(data_seed=None)
    role = SimpleNamespace(data_args=DataArguments(**data_args), training_args=training_args)
    rewards = {name: SimpleNamespace(tag_included=[]) for name in ("math", "code")}
    return SimpleNamespace(
        pipeline="rlvr",
        seed=1,
        template="base",
        tag_to_template={},
        rewards=rewards,
        tag_2_domain={},
        actor_train=role,
    )


def test_a_domain_without_a_share_is_not_drawn_from():
    shares = {"math": 1.0, "code": 0.0}
    rows = [{"prompt": f"q{i}", "domain": "math"} for i in range(4)]
    made = config(domain_interleave_probs=shares)
    table = Table("data.jsonl", rows)
    dataset = encode_table(made, made.actor_train.data_args, table, tiny_tokenizer(), 9)
    draw = make_sampler(made, dataset)
    assert draw.shares == {"math": 1.0}
    assert sorted(prompt.index for prompt in draw.batch(4)) == [0, 1, 2, 3]


def test_options_of_the_template_come_from_a_function():
    made = config(custom_data_kwargs_func="roll.datasets.encoding.LABEL_PAD")
    table = Table("data.jsonl", [{"prompt": "q"}])
    with pytest.raises(
        ConfigError, match=r"custom_data_kwargs_func: .* is not a function of a row"
    ):
        encode_table(made, made.actor_train.data_args, table, tiny_tokenizer(), 9)
