"""A strategy is one class, named by its dotted path; what it says of itself is what configs
check."""

from dataclasses import replace

import pytest
import torch
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.configs.strategy_info import STRATEGIES, HfTrainOptions, StrategyNames, strategy_class
from roll.distributed.strategy.hf_strategy import HfTrainStrategy
from roll.exceptions import ConfigError


class SlowOptions(HfTrainOptions):
    factor: float = 0.5


class SlowStrategy(HfTrainStrategy):
    """Makes every gradient smaller."""

    info = replace(HfTrainStrategy.info, options=SlowOptions, scales_loss=True)

    def reduce_gradients(self):
        for parameter in self.model.parameters():
            parameter.grad *= self.options.factor


class NoStrategy:
    pass


NAME = f"{__name__}.SlowStrategy"


def test_a_strategy_of_the_users_own_trains(tmp_path):
    folder, gradients = make_model_folder(tmp_path), []
    for options in ({}, {"strategy": NAME, "strategy_config": {"factor": 0.25}}):
        config = make_config("dpo", folder, **options)
        worker = PROBES["dpo"](config.actor_train)
        worker.initialize(config)
        gradients.append(worker.gradients(make_batch("dpo"))[0])
    assert worker.strategy.strategy_name == NAME
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], 0.25 * gradient)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "no_package.Strategy"},
            r"the strategy no_package.Strategy cannot be imported",
        ),
        ({"strategy": f"{__name__}.Absent"}, r"cannot be imported.*Absent"),
        ({"strategy": f"{__name__}.NoStrategy"}, r"NoStrategy is no strategy: expected a class"),
        ({"strategy": "hf_trian"}, r'found "hf_trian".*did you mean "hf_train"'),
        ({"strategy": NAME, "strategy_config": {"factr": 1}}, r"strategy_config.factr.*factor"),
        ({"strategy": NAME, "strategy_config": {"factor": "x"}}, r"strategy_config.factor"),
        ({"strategy": "hf_infer"}, r"actor_train.strategy_args.strategy_name.*hf_train"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_a_model_is_loaded(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        make_config("dpo", tmp_path, **options)


def test_the_built_in_classes_and_their_abilities():
    for name, info in STRATEGIES.items():
        if info.package is None:
            assert strategy_class(name).info is info
    assert StrategyNames("trains") == ("hf_train", "fsdp2_train", "deepspeed_train")
    assert StrategyNames("infers") == ("hf_infer", "fsdp2_infer", "deepspeed_infer")
    assert StrategyNames("generates") == ("hf_infer", "vllm")
    assert NAME in StrategyNames("trains") and NAME not in StrategyNames("infers", "generates")
    assert None not in StrategyNames("trains")


def test_fp16_is_for_strategies_that_scale_the_loss(tmp_path):
    half = {"model_args": {"dtype": "fp16"}}
    problems = make_config("dpo", tmp_path, **half).actor_train.start_problems()
    assert [problem.key for problem in problems] == ["model_args.dtype"]
    assert make_config("dpo", tmp_path, strategy=NAME, **half).actor_train.start_problems() == []
