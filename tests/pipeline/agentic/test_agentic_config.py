"""AgenticConfig: ROLL's defaults, environments, groups and their arithmetic."""

import subprocess
import sys

import pytest

from roll.configs.worker_config import WorkerConfig
from roll.exceptions import ConfigError
from roll.pipeline.agentic.agentic_config import (
    PROMPTS_ARE_WHOLE,
    AgenticConfig,
    EnvManagerConfig,
    LLMProxyConfig,
    RewardNormalizationConfig,
)
from roll.pipeline.registry import load_config
from roll.utils.import_utils import safe_import_class

MANAGERS = "roll.pipeline.agentic.env_manager"
TRAJ = f"{MANAGERS}.traj_env_manager.TrajEnvManager"
STEP = f"{MANAGERS}.step_env_manager.StepEnvManager"


def agentic(**values) -> AgenticConfig:
    return AgenticConfig(**{"sequence_length": 512, **values})


def trained(**sizes) -> WorkerConfig:
    return WorkerConfig(strategy_args={"strategy_name": "hf_train"}, training_args=sizes)


def test_defaults_are_rolls():
    config = agentic()
    expected = {
        "custom_envs": {},
        "batch_adjust_mode": "copy",
        "episode_reward_weight": 1.0,
        "step_reward_weight": 1.0,
        "step_reward_gamma": 0.95,
        "ratio_type": "token",
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert LLMProxyConfig().model_dump() == {"proxy_type": "policy", "proxy_config": {}}
    assert config.actor_train.worker_cls == "roll.pipeline.base_worker.ActorWorker"
    assert config.reference.worker_cls == "roll.pipeline.base_worker.ActorWorker"
    assert config.actor_infer.worker_cls == "roll.pipeline.base_worker.InferWorker"


def test_defaults_of_environment_managers_are_rolls():
    manager = EnvManagerConfig()
    expected = {
        "num_env_groups": 128,
        "group_size": 1,
        "group_size_redundancy": 0,
        "tags": ["SimpleSokoban"],
        "num_groups_partition": [128],
        "max_traj_per_env": -1,
        "worker_cls": "roll.pipeline.agentic.environment_worker.EnvironmentWorker",
        "group_filter_cls": "roll.pipeline.agentic.agentic_pipeline.GroupFilter",
        "max_env_num_per_worker": 128,  # all in one worker
        "world_size": 1,
    }
    assert {key: getattr(manager, key) for key in expected} == expected
    assert (agentic().train_env_manager.name, agentic().val_env_manager.name) == (
        "train_env",
        "val_env",
    )


def test_workers_follow_from_environments():
    manager = EnvManagerConfig(
        num_env_groups=4, group_size=8, group_size_redundancy=2, max_env_num_per_worker=16
    )
    assert (manager.final_group_size, manager.num_envs, manager.world_size) == (10, 40, 3)


def test_groups_are_shared_equally_unless_a_partition_is_given():
    tags = ["a", "b", "c"]
    assert EnvManagerConfig(num_env_groups=8, tags=tags).num_groups_partition == [3, 3, 2]
    assert EnvManagerConfig(
        num_env_groups=8, tags=tags, num_groups_partition=[6, 2, 0]
    ).num_groups_partition == [
        6,
        2,
        0,
    ]
    with pytest.raises(
        ConfigError,
        match=r"num_groups_partition: found \[6, 1, 0\] .* add up to num_env_groups = 8, not 7",
    ):
        EnvManagerConfig(num_env_groups=8, tags=tags, num_groups_partition=[6, 1, 0])
    with pytest.raises(ConfigError, match=r"one number for each of the 3 tags"):
        EnvManagerConfig(num_env_groups=8, tags=tags, num_groups_partition=[8])


def test_trajectories_per_environment():
    config = agentic(
        rollout_batch_size=64,
        train_env_manager={"num_env_groups": 4, "group_size": 8},
        val_batch_size=256,
    )
    assert config.train_env_manager.max_traj_per_env == 2
    assert config.val_env_manager.max_traj_per_env == 2
    assert agentic(val_batch_size=-1).val_env_manager.max_traj_per_env == sys.maxsize
    assert (
        agentic(train_env_manager={"max_traj_per_env": 5}).train_env_manager.max_traj_per_env == 5
    )
    ahead = agentic(train_env_manager={"max_traj_per_env": 5}, async_generation_ratio=1)
    assert ahead.train_env_manager.max_traj_per_env == 1


def test_sampling_arguments_come_from_generation_or_from_the_training_environments():
    sampling = {"max_new_tokens": 9, "num_return_sequences": 4}
    for config in (
        agentic(actor_infer={"generating_args": sampling}),
        agentic(train_env_manager={"generating_args": sampling}),
    ):
        for role in (config.actor_infer, config.train_env_manager, config.val_env_manager):
            assert (
                role.generating_args.max_new_tokens,
                role.generating_args.num_return_sequences,
            ) == (9, 1)


@pytest.mark.parametrize(
    ("values", "types"),
    [
        ({}, (None, None)),
        ({"method": "mean"}, ("batch", None)),
        ({"method": "mean_std"}, ("batch", "batch")),
        ({"method": "asym_clip", "grouping": "tags"}, ("group", "group")),
        ({"method": "mean", "grouping": "traj_group_id"}, ("group", None)),
        ({"method": "mean_std", "norm_std_type": None}, ("batch", None)),  # ROLL cannot say this
        ({"norm_mean_type": "group", "grouping": "tags"}, ("group", None)),
    ],
)
def test_normalisation_types_follow_the_method_unless_written_down(values, types):
    config = RewardNormalizationConfig(**values)
    assert (config.norm_mean_type, config.norm_std_type) == types
    assert RewardNormalizationConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rollout_batch_size": 100, "train_env_manager": {"group_size": 8}},
            "rollout_batch_size: found 100 .* a multiple of 8, because train_env_manager.group_size is 8; use 96",
        ),
        (
            {
                "rollout_batch_size": 100,
                "train_env_manager": {"group_size": 8},
                "actor_train": trained(per_device_train_batch_size=12),
            },
            "rollout_batch_size: found 100 .* a multiple of 24, .*; use 96 or 120",
        ),
        (
            {"val_batch_size": 100},
            "val_batch_size: found 100 .* the environments of val_env_manager; use 128 or 256",
        ),
        ({"val_batch_size": 0}, "val_batch_size: found 0 .* a positive number, or -1"),
        (
            {"rollout_batch_size": 256, "train_env_manager": {"max_traj_per_env": 1}},
            "train_env_manager.max_traj_per_env: found 1 .* at least 2, for rollout_batch_size = 256 on 128",
        ),
        (
            {"custom_envs": {"SimpleSokoban": {}}, "train_env_manager": {"tags": ["SimpleSokobn"]}},
            'train_env_manager.tags: found "SimpleSokobn" .* names of custom_envs: SimpleSokoban; did you mean',
        ),
        (
            {"custom_envs": {"A": {}}, "train_env_manager": {"tags": ["A"]}},
            "val_env_manager.tags: found .SimpleSokoban",
        ),
        (
            {"reward_normalization": {"method": "std"}},
            "reward_normalization.method: found .* identity, mean, mean_std",
        ),
        ({"ratio_type": "word"}, "ratio_type: found .* expected one of token, segment, seq"),
        (
            {"batch_adjust_mode": "drop"},
            "batch_adjust_mode: found .* copy, delete, auto, random_sample",
        ),
        ({"custom_envs": {"A": 3}}, "custom_envs.A: found 3 .* expected a mapping"),
    ],
)
def test_values_that_do_not_fit(values, message):
    with pytest.raises(ConfigError, match=message):
        agentic(**values)


def test_validation_that_never_happens_is_not_checked():
    config = agentic(
        custom_envs={"A": {}}, train_env_manager={"tags": ["A"]}, eval_steps=0, val_batch_size=100
    )
    assert "val_env" not in config.active_roles()


def test_turns_as_rows_need_not_divide():
    sizes = trained(per_device_train_batch_size=100)
    config = agentic(actor_train=sizes, adv_estimator="gigpo")
    assert config.rows_are_turns and config.max_turns is None
    with pytest.raises(ConfigError, match=r"rollout_batch_size: found 128 .* use 100 or 200"):
        agentic(actor_train=sizes, adv_estimator="grpo")
    step = {"SimpleSokoban": {"env_manager_cls": STEP, "max_steps": 7}}
    config = agentic(actor_train=sizes, adv_estimator="grpo", custom_envs=step)
    assert config.rows_are_turns and config.max_turns == 7


def with_manager(manager: str, **values) -> AgenticConfig:
    return agentic(
        adv_estimator="grpo", custom_envs={"SimpleSokoban": {"env_manager_cls": manager}}, **values
    )


def test_rows_are_turns_if_the_class_of_the_manager_says_so(tmp_path, monkeypatch):
    (tmp_path / "stepan").mkdir()
    (tmp_path / "stepan" / "code.py").write_text(
        f"from {TRAJ.rpartition('.')[0]} import TrajEnvManager as Base\n"
        f"from {STEP.rpartition('.')[0]} import StepEnvManager\n"
        "class TrajEnvManager(Base): ...\n"
        "class Walker(StepEnvManager): ...\n"
        "class Joined(StepEnvManager):\n"
        "    prompts_are_whole = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert not with_manager("stepan.code.TrajEnvManager").rows_are_turns, (
        "whatever its name and package"
    )
    assert with_manager("stepan.code.Walker").rows_are_turns, "a subclass of StepEnvManager"
    assert not with_manager("stepan.code.Joined").rows_are_turns, "unless it says otherwise"
    assert with_manager(STEP).rows_are_turns and not with_manager(TRAJ).rows_are_turns


def test_managers_that_are_known_without_an_import_are_what_their_classes_say():
    found = {path: safe_import_class(path) for path in PROMPTS_ARE_WHOLE}
    assert found[STEP] is not None and found[TRAJ] is not None
    for path, manager in found.items():
        assert manager is None or manager.prompts_are_whole is PROMPTS_ARE_WHOLE[path]


def test_to_know_whether_rows_are_turns_takes_no_torch():
    script = (
        "import sys; from roll.pipeline.agentic.agentic_config import AgenticConfig\n"
        f"envs = {{'SimpleSokoban': {{'env_manager_cls': {STEP!r}}}}}\n"
        "assert AgenticConfig(sequence_length=512, adv_estimator='grpo', custom_envs=envs).rows_are_turns\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_a_manager_that_is_not_there_is_among_the_problems():
    with pytest.raises(ConfigError) as caught:
        with_manager("no_such_package.StepEnvManager", val_batch_size=0)
    assert "custom_envs.SimpleSokoban.env_manager_cls: 'no_such_package.StepEnvManager'" in str(
        caught.value
    )
    assert "there is no module 'no_such_package'" in str(caught.value) and "val_batch_size" in str(
        caught.value
    )
    with pytest.raises(
        ConfigError,
        match=r"'collections\.OrderedDict' is no environment manager; expected a subclass",
    ):
        with_manager("collections.OrderedDict")


def test_a_judge_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"reward: found .* not built yet: a role that judges .* set it to null"
    ):
        agentic(reward={"llm_proxy": {"proxy_type": "openai"}})


def test_environments_are_missing_for_training():
    assert [
        problem.key
        for problem in agentic(adv_estimator="grpo", init_kl_coef=0).missing_for_training()
    ] == [
        "actor_train.strategy_args",
        "actor_infer.strategy_args",
        "custom_envs",
    ]


@pytest.mark.parametrize(
    ("values", "cautions"),
    [
        (
            {"adv_estimator": "grpo", "reward_normalization": {"method": "mean_std"}},
            [],
        ),  # it does as it is told
        (
            {
                "adv_estimator": "dr_grpo",
                "reward_normalization": {"grouping": "tags", "method": "mean"},
            },
            [],
        ),
        (
            {
                "adv_estimator": "rloo",
                "reward_normalization": {"grouping": "batch", "method": "mean_std"},
            },
            [
                "without effect: reward_normalization.norm_mean_type: batch, reward_normalization.norm_std_type: "
                "batch; adv_estimator: rloo normalises rewards by its own rule (mean: leave_one_out, std: none)",
                "without effect: reward_normalization.grouping: batch; adv_estimator: rloo compares the rows of a "
                "group, by traj_group_id",
            ],
        ),
        ({"adv_estimator": "grpo", "norm_mean_type": "group"}, []),  # WITHOUT_EFFECT has it
        (
            {"adv_estimator": "agentic_reinforce", "ratio_type": "seq", "gamma": 0.9},
            [
                "ratio_type: seq trains every token on the mean advantage of the row, and gamma: 0.9 gives tokens "
                "advantages of their own; ratio_type: seq_token keeps those"
            ],
        ),
        (
            {"adv_estimator": "agentic_reinforce", "ratio_type": "segment", "gamma": 0.9},
            [],
        ),  # one for each turn
        ({"adv_estimator": "agentic_reinforce", "ratio_type": "seq_token", "gamma": 0.9}, []),
    ],
)
def test_settings_that_others_override_are_named(values, cautions):
    assert agentic(**values).cautions() == cautions


def played(**entry) -> dict[str, object]:
    return {
        "custom_envs": {"A": {"env_type": "sokoban"}, "B": {"env_type": "sokoban", **entry}},
        "train_env_manager": {"tags": ["A"]},
        "val_env_manager": {"tags": ["B"]},
        "eval_steps": 1,
        "val_batch_size": -1,
    }


def test_an_agent_runner_and_tools_may_be_null():
    config = agentic(**played(agent_runner_cls=None, tool_wrapper=None))
    assert config.tags_in_use() == ["A", "B"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"tool_wrapper": {"tool_configs": []}},
            "custom_envs.B.tool_wrapper: not built yet: tools around",
        ),
        ({"agent_runner_cls": "a.B"}, "custom_envs.B.agent_runner_cls: not built yet: programs"),
        (
            {"env_type": "webshop"},
            'custom_envs.B.env_type: the environment "webshop" is not built yet',
        ),
        (
            {"env_manager_cls": f"{MANAGERS}.agent_native_env_manager.AgentNativeStepEnvManager"},
            "custom_envs.B.env_manager_cls: not supported: AgentNativeStepEnvManager",
        ),
    ],
)
def test_what_is_not_built_is_refused_where_it_is_played(entry, message):
    with pytest.raises(ConfigError, match=message):
        agentic(**played(**entry))
    config = agentic(**{**played(**entry), "eval_steps": 0})  # only A is played
    assert config.tags_in_use() == ["A"]


def test_variables_of_rolls_env_files_are_no_unknown_keys(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("pipeline: agentic\nsequence_length: 64\ndefault_history_length: 5\n")
    assert load_config(path, warn=False).ignored == ("default_history_length",)
    text = "custom_envs: {A: {history_length: '${default_history_length}'}}\n"
    path.write_text(path.read_text() + text + "train_env_manager: {tags: [A]}\neval_steps: 0\n")
    loaded = load_config(path, warn=False)
    assert loaded.ignored == () and loaded.config.env_template("A").history_length == 5
