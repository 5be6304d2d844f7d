"""No setting is silent: a run reads every field. Keys without effect are in a table, and no fields.

Short runs of all pipelines record which fields of which config class the code reads, other than to
check, print or copy a config. `field_effects.TESTS` has the others, with the test of each.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from agentic_setup import STEP, tiny_pipeline_config
from field_effects import TESTS
from pydantic import BaseModel
from rlvr_setup import make_inputs, make_values, write_rows
from tiny_models import make_model_folder

from roll.configs.arguments import GeneratingArguments
from roll.configs.base import ConfigModel
from roll.configs.roll_keys import keys_without_effect
from roll.configs.strategy_info import STRATEGIES
from roll.engines.request import SamplingParams
from roll.pipeline.agentic.agentic_config import AgenticConfig, EnvTemplate
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.registry import CONFIG_CLASSES, load_config, pipeline_class
from roll.pipeline.rlvr.rlvr_config import RewardConfig, RLVRConfig
from roll.pipeline.sft.sft_config import SFTConfig
from roll.rewards.workers import (
    CodeSandboxRewardWorker,
    LLMJudgeRewardWorker,
    MathRuleRewardWorker,
)

ROOT = Path(__file__).parents[2]
# Functions of the configs that read fields to copy, list or check them, and folders that only show
# a config.
NO_USE = {
    "plain_values", "with_max_steps", "all_roles", "allowed_strategies", "missing_for_training", "idle_keys",
    "batch_plans",
}  # fmt: skip
ONLY_SHOW = (
    str(ROOT / "roll/viewer"),
    str(ROOT / "roll/configs/report.py"),
    str(ROOT / "roll/configs/memory.py"),
)


def key_of(cls: type[ConfigModel], name: str) -> str:
    """`rlvr.RewardConfig.reward_fn`. A pipeline's config has all its fields, other classes those
    they declare."""
    if cls not in CONFIG_CLASSES.values():
        cls = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    return f"{cls.__module__.split('.')[-2]}.{cls.__name__}.{name}"


def all_fields() -> set[str]:
    """Every field of all config classes, except those that the table of keys without effect
    names."""
    found: set[str] = set()

    def collect(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, ConfigModel):
            for name, field in kind.model_fields.items():
                if name not in keys_without_effect(kind) and key_of(kind, name) not in found:
                    found.add(key_of(kind, name))
                    collect(field.annotation)
        for inner in get_args(kind):
            collect(inner)

    for cls in (
        *CONFIG_CLASSES.values(),
        *(info.options for info in STRATEGIES.values()),
        EnvTemplate,
    ):
        collect(cls)
    return found


@contextlib.contextmanager
def recorded(reads: set[str]) -> Iterator[None]:
    """Meanwhile, `reads` gets every field that is read of any config, unless that happens while one
    is made."""
    depth = 0
    meta: Any = type(ConfigModel)
    make, plain = meta.__call__, BaseModel.__getattribute__

    def counting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return make(cls, *args, **kwargs)
        finally:
            depth -= 1

    def reading(self: Any, name: str) -> Any:
        if depth == 0 and not name.startswith("_") and name in type(self).model_fields:
            code = sys._getframe(1).f_code
            if code.co_name not in NO_USE and not code.co_filename.startswith(ONLY_SHOW):
                reads.add(key_of(type(self), name))
        return plain(self, name)

    meta.__call__, ConfigModel.__getattribute__ = counting, reading
    try:
        yield
    finally:
        meta.__call__ = make
        del ConfigModel.__getattribute__


def run(config: Any, reads: set[str]) -> None:
    with recorded(reads), pipeline_class(config)(config, progress=False) as pipeline:
        started = [
            config.key_of(cluster.cluster_name).partition(".")[0] for cluster in pipeline._clusters
        ]
        pipeline.run()
    reads |= {key_of(type(config), name) for name in started}


# -- the runs
# ----------------------------------------------------------------------------------------------------------


def role(strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "model_args": {"dtype": "fp32"},
        "training_args": {"per_device_train_batch_size": 4, "learning_rate": 1e-3},
        "strategy_args": {"strategy_name": strategy},
        **more,
    }


def common(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "output"),
        "track_with": "stdout",
        "max_steps": 1,
        "eval_steps": 1,
        **more,
    }


def dpo_runs(folder: Path) -> Iterator[DPOConfig]:
    rows = [{"prompt": f"{a} + 1 = ", "chosen": str(a + 1), "rejected": str(a)} for a in range(8)]
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = common(folder, pretrain=str(make_model_folder(folder / "model")), sequence_length=48)
    values["validation"] = {"data_args": {"file_name": str(data)}}
    data_args = {"data_args": {"file_name": str(data), "template": "base"}}
    yield DPOConfig(**values, actor_train=role("hf_train", **data_args), reference=role("hf_infer"))
    sharded = {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": 1}}
    lora = {"dtype": "fp32", "lora_target": "all", "lora_rank": 2}
    yield DPOConfig(**values, actor_train=role("hf_train", **data_args) | {"model_args": lora})
    reference = role("fsdp2_infer")
    yield DPOConfig(
        **values,
        actor_train=role("hf_train", **data_args) | {"strategy_args": sharded},
        reference=reference,
    )


def sft_runs(folder: Path) -> Iterator[SFTConfig]:
    make_inputs(folder)
    data_args = {
        "file_name": str(folder / "train.jsonl"),
        "prompt": "prompt",
        "response": "ground_truth",
    }
    values = common(
        folder,
        pretrain=str(folder / "model"),
        prompt_length=8,
        response_length=8,
        global_template="base",
    )
    yield SFTConfig(
        **values,
        actor_train=role("hf_train", data_args=data_args),
        validation={"data_args": data_args},
    )


def rlvr_runs(folder: Path) -> Iterator[RLVRConfig]:
    make_inputs(folder)
    write_rows(folder / "train.jsonl", 24, difficulty=0.5)
    values = make_values(folder, **common(folder))
    sampling = values["actor_infer"]["generating_args"]
    values["validation"] = {
        "data_args": {"file_name": str(folder / "test.jsonl")},
        "generating_args": sampling,
    }
    values |= {"reference": role("hf_infer"), "critic": role("hf_train")}
    actor = values.pop("actor_train")
    reward = values.pop("rewards")["reverse"]
    wide = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 64}
    wide |= {"use_dynamic_batching_in_infer": True, "max_tokens_per_microbatch_in_infer": 64}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "init_kl_coef": 0.1, "add_token_level_kl": True}
    clip = {"use_pg_clip_range": True, "dual_clip_loss": True}
    yield RLVRConfig(
        **values | kl | {"adv_estimator": "gae"},
        rewards={"reverse": reward},
        actor_train=actor | wide | {"pg_variant": "topr"},
        train_infer_correction={
            "is_weight": {"enabled": True},
            "filters": [{"enabled": True, "diff_enabled": True}],
        },
        difficulty_loss_weight=True,
        rollout_mock={"enable": True, "dump_dir": str(folder / "dump")},
        rollout_dump_dir=str(folder / "samples"),
    )
    mean = {"type": "mean_filter", "filter_args": {"threshold_down": -1}}
    for variant in ("ppo", "tis", "cispo", "kimi15"):
        yield RLVRConfig(
            **values | clip,
            actor_train=actor | {"pg_variant": variant},
            rewards={"reverse": reward | {"query_filter_config": mean}},
            max_num_gen_batches=1,
            difficulty_mask=variant == "kimi15",
            error_max_len_clip=variant == "kimi15",
        )


def agentic_runs(folder: Path) -> Iterator[Any]:
    manager = {"num_env_groups": 2, "group_size": 2, "tags": ["Good"]}
    values = common(folder, val_batch_size=4, val_env_manager=manager)
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "init_kl_coef": 0.1, "add_token_level_kl": True}
    clip = {"use_pg_clip_range": True, "dual_clip_loss": True}
    yield tiny_pipeline_config(
        folder, {"Good": "GoodEnv"}, **values, **kl, **clip, adv_estimator="gae"
    )
    values |= {
        "rollout_dump_dir": str(folder / "samples"),
        "rollout_mock": {"enable": True, "dump_dir": str(folder)},
    }
    step = {"env_type": "bad_envs:GoodEnv", "env_manager_cls": STEP, "max_steps": 3}
    yield tiny_pipeline_config(folder, {"Good": step}, **values, adv_estimator="gigpo")
    failing = {"env_type": "bad_envs:SometimesRaisingEnv", "max_steps": 3}
    yield tiny_pipeline_config(
        folder, {"Good": failing}, **values | {"eval_steps": 0}, adv_estimator="reinforce"
    )


RUNS: dict[str, Any] = {
    "dpo": dpo_runs,
    "sft": sft_runs,
    "rlvr": rlvr_runs,
    "agentic": agentic_runs,
}


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """The fields that all runs together read."""
    import torch.distributed

    found: set[str] = set()
    for name, configs in RUNS.items():
        for config in configs(tmp_path_factory.mktemp(name)):
            run(config, found)
    yield found
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- the tests
# ---------------------------------------------------------------------------------------------------------


def test_every_field_is_read_by_a_run_or_has_a_test(reads):
    silent = all_fields() - reads - TESTS.keys()
    assert sorted(silent) == [], (
        "no run reads them: make them work, move them to WITHOUT_EFFECT, or name the test of each"
    )
    assert sorted(TESTS.keys() - all_fields()) == [], "no field with an effect has this name"
    assert sorted(TESTS.keys() & reads) == [], "a run reads them, so they need no entry"


def source_of(test: str) -> str:
    """The source of a test function with its decorators; `test` is `path::name`."""
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    pytest.fail(f"there is no test {test}")


@pytest.mark.parametrize(("key", "test"), TESTS.items(), ids=TESTS)
def test_the_named_test_exists_and_is_about_the_field(key, test):
    assert key.rpartition(".")[2] in source_of(test)


def test_what_no_run_reads_is_read_somewhere():
    """Without its declaration: as an attribute, or by its name."""
    nodes = [
        node
        for path in (ROOT / "roll").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    ]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {key.rpartition(".")[2] for key in TESTS} <= attributes | texts


@pytest.mark.parametrize(("pipeline", "cls"), CONFIG_CLASSES.items())
def test_a_setting_without_effect_is_named_when_it_is_written(pipeline, cls, tmp_path):
    keys = [key for key, why in keys_without_effect(cls).items() if isinstance(why, str)]
    path = tmp_path / "a.yaml"
    text = "".join(f"{key}: anything\n" for key in keys)
    path.write_text(f"pipeline: {pipeline}\nsequence_length: 2048\n{text}")
    assert load_config(path, warn=False).ignored == tuple(keys)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", False),
        ("temperature", 0.3),
        ("top_p", 0.2),
        ("top_k", 3),
        ("min_p", 0.2),
        ("max_new_tokens", 3),
        ("repetition_penalty", 1.5),
        ("stop_strings", ["."]),
        ("include_stop_str_in_output", False),
    ],
)
def test_sampling_arguments_reach_the_engine(name, value):
    changed = SamplingParams.from_config(GeneratingArguments(**{name: value}))
    assert changed != SamplingParams.from_config(GeneratingArguments())


def test_the_longest_sequence_limits_the_sample():
    short, long = (GeneratingArguments(max_new_tokens=0, max_length=limit) for limit in (8, 16))
    assert SamplingParams.from_config(short) != SamplingParams.from_config(long)


@pytest.mark.parametrize(
    ("worker", "name"),
    [
        (LLMJudgeRewardWorker, "judge_prompt"),
        (LLMJudgeRewardWorker, "judge_model_name"),
        (LLMJudgeRewardWorker, "judge_api_url"),
        (LLMJudgeRewardWorker, "judge_api_key"),
        (MathRuleRewardWorker, "format_pattern"),
        (CodeSandboxRewardWorker, "reward_type"),
    ],
)
def test_options_of_a_reward_reach_its_function(worker, name):
    assert worker.options_of(RewardConfig(**{name: "other"})) != worker.options_of(RewardConfig())


@pytest.mark.parametrize(
    ("cls", "values", "follows"),
    [
        *(
            (cls, values, follows)
            for cls in CONFIG_CLASSES.values()
            for values, follows in (
                ({"prompt_length": 40}, "sequence_length"),
                ({"response_length": 24}, "sequence_length"),
                ({"pretrain": "some/model"}, "actor_train.model_args.model_name_or_path"),
                ({"system_envs": {"A": "1"}}, "actor_train.system_envs"),
            )
        ),
        (
            RLVRConfig,
            {"sequence_length": 64, "response_length": None},
            "actor_infer.generating_args.max_new_tokens",
        ),
        (
            RLVRConfig,
            {"val_sequence_length": 50, "val_prompt_length": 9},
            "validation.generating_args.max_new_tokens",
        ),
        (RLVRConfig, {"reward_pretrain": "other/model"}, "critic.model_args.model_name_or_path"),
        (AgenticConfig, {"reward_pretrain": "other/model"}, "critic.model_args.model_name_or_path"),
        (
            RLVRConfig,
            {"force_disable_old_logprobs_recompute": True},
            "enable_old_logprobs_recompute",
        ),
        (
            AgenticConfig,
            {"force_disable_old_logprobs_recompute": True},
            "enable_old_logprobs_recompute",
        ),
    ],
)
def test_fields_that_others_follow(cls, values, follows):
    base = {
        "prompt_length": 32,
        "response_length": 16,
        "validation": {},
        "val_batch_size": -1,
        "eval_steps": 1,
    }
    base = {key: value for key, value in base.items() if key in cls.model_fields}

    def found(config):
        for name in follows.split("."):
            config = getattr(config, name)
        return config

    assert found(cls(**base | values)) != found(cls(**base))
