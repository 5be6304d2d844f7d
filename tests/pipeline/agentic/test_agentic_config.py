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
    assert agentic().train_env_manager.name == "train_env"
    assert agentic().val_env_manager.name == "val_env"


def test_workers_follow_from_environments():
    sizes = {"num_env_groups": 4, "group_size": 8, "group_size_redundancy": 2}
    manager = EnvManagerConfig(max_env_num_per_worker=16, **sizes)
    assert (manager.final_group_size, manager.num_envs, manager.world_size) == (10, 40, 3)


def test_groups_are_shared_equally_unless_a_partition_is_given():
    def partition(**values):
        config = EnvManagerConfig(num_env_groups=8, tags=["a", "b", "c"], **values)
        return config.num_groups_partition

    assert partition() == [3, 3, 2]
    assert partition(num_groups_partition=[6, 2, 0]) == [6, 2, 0]
    wrong_sum = r"num_groups_partition: found \[6, 1, 0\] .* add up to num_env_groups = 8, not 7"
    with pytest.raises(ConfigError, match=wrong_sum):
        partition(num_groups_partition=[6, 1, 0])
    with pytest.raises(ConfigError, match=r"one number for each of the 3 tags"):
        partition(num_groups_partition=[8])


def test_trajectories_per_environment():
    groups = {"num_env_groups": 4, "group_size": 8}
    config = agentic(rollout_batch_size=64, train_env_manager=groups, val_batch_size=256)
    assert config.train_env_manager.max_traj_per_env == 2
    assert config.val_env_manager.max_traj_per_env == 2
    assert agentic(val_batch_size=-1).val_env_manager.max_traj_per_env == sys.maxsize
    five = {"train_env_manager": {"max_traj_per_env": 5}}
    assert agentic(**five).train_env_manager.max_traj_per_env == 5
    ahead = agentic(**five, async_generation_ratio=1)
    assert ahead.train_env_manager.max_traj_per_env == 1


def test_sampling_arguments_come_from_generation_or_from_the_training_environments():
    sampling = {"max_new_tokens": 9, "num_return_sequences": 4}
    for key in ("actor_infer", "train_env_manager"):
        config = agentic(**{key: {"generating_args": sampling}})
        for role in (config.actor_infer, config.train_env_manager, config.val_env_manager):
            found = role.generating_args
            assert (found.max_new_tokens, found.num_return_sequences) == (9, 1)


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


EIGHT, TWELVE = {"group_size": 8}, trained(per_device_train_batch_size=12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rollout_batch_size": 100, "train_env_manager": EIGHT},
            "rollout_batch_size: found 100 .* a multiple of 8, because train_env_manager.group_size",
        ),
        (
            {"rollout_batch_size": 100, "train_env_manager": EIGHT, "actor_train": TWELVE},
            "rollout_batch_size: found 100 .* a multiple of 24, .*; use 96 or 120",
        ),
        ({"val_batch_size": 100}, "found 100 .* of val_env_manager; use 128 or 256"),
        ({"val_batch_size": 0}, "val_batch_size: found 0 .* a positive number, or -1"),
        (
            {"rollout_batch_size": 256, "train_env_manager": {"max_traj_per_env": 1}},
            "max_traj_per_env: found 1 .* at least 2, for rollout_batch_size = 256 on 128",
        ),
        (
            {"custom_envs": {"SimpleSokoban": {}}, "train_env_manager": {"tags": ["SimpleSokobn"]}},
            'tags: found "SimpleSokobn" .* names of custom_envs: SimpleSokoban; did you mean',
        ),
        (
            {"custom_envs": {"A": {}}, "train_env_manager": {"tags": ["A"]}},
            "val_env_manager.tags: found .SimpleSokoban",
        ),
        (
            {"reward_normalization": {"method": "std"}},
            "ion.method: found .* identity, mean, mean_s",
        ),
        ({"ratio_type": "word"}, "ratio_type: found .* expected one of token, segment, seq"),
        ({"batch_adjust_mode": "drop"}, "found .* copy, delete, auto, random_sample"),
        ({"custom_envs": {"A": 3}}, "custom_envs.A: found 3 .* expected a mapping"),
        ({"reward": {"llm_proxy": {}}}, "reward: .* not built yet: a role that judges .* to null"),
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
    envs = {"SimpleSokoban": {"env_manager_cls": manager}}
    return agentic(adv_estimator="grpo", custom_envs=envs, **values)


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
    for name, expected in {"TrajEnvManager": False, "Walker": True, "Joined": False}.items():
        assert with_manager(f"stepan.code.{name}").rows_are_turns is expected
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
        "config = AgenticConfig(sequence_length=9, adv_estimator='grpo', custom_envs=envs)\n"
        "assert config.rows_are_turns\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_a_manager_that_is_not_there_is_among_the_problems():
    with pytest.raises(ConfigError) as caught:
        with_manager("no_such_package.StepEnvManager", val_batch_size=0)
    said = str(caught.value)
    assert "custom_envs.SimpleSokoban.env_manager_cls: 'no_such_package.StepEnvManager'" in said
    assert "there is no module 'no_such_package'" in said and "val_batch_size" in said
    message = r"'collections\.OrderedDict' is no environment manager; expected a subclass"
    with pytest.raises(ConfigError, match=message):
        with_manager("collections.OrderedDict")


def test_environments_are_missing_for_training():
    missing = agentic(adv_estimator="grpo", init_kl_coef=0).missing_for_training()
    expected = ["actor_train.strategy_args", "actor_infer.strategy_args", "custom_envs"]
    assert [problem.key for problem in missing] == expected


@pytest.mark.parametrize(
    ("estimator", "values", "cautions"),
    [
        ("grpo", {"reward_normalization": {"method": "mean_std"}}, []),  # it does as it is told
        ("dr_grpo", {"reward_normalization": {"grouping": "tags", "method": "mean"}}, []),
        (
            "rloo",
            {"reward_normalization": {"grouping": "batch", "method": "mean_std"}},
            [
                "without effect: reward_normalization.norm_mean_type: batch, "
                "reward_normalization.norm_std_type: batch; adv_estimator: rloo normalises rewards "
                "by its own rule (mean: leave_one_out, std: none)",
                "without effect: reward_normalization.grouping: batch; adv_estimator: rloo compares "
                "the rows of a group, by traj_group_id",
            ],
        ),
        ("grpo", {"norm_mean_type": "group"}, []),  # WITHOUT_EFFECT has it
        (
            "agentic_reinforce",
            {"ratio_type": "seq", "gamma": 0.9},
            [
                "ratio_type: seq trains every token on the mean advantage of the row, and gamma: "
                "0.9 gives tokens advantages of their own; ratio_type: seq_token keeps those"
            ],
        ),
        ("agentic_reinforce", {"ratio_type": "segment", "gamma": 0.9}, []),  # one for each turn
        ("agentic_reinforce", {"ratio_type": "seq_token", "gamma": 0.9}, []),
    ],
)
def test_settings_that_others_override_are_named(estimator, values, cautions):
    assert agentic(adv_estimator=estimator, **values).cautions() == cautions


def played(**entry) -> dict[str, object]:
    return {
        "custom_envs": {"A": {"env_type": "sokoban"}, "B": {"env_type": "sokoban", **entry}},
        "train_env_manager": {"tags": ["A"]},
        "val_env_manager": {"tags": ["B"]},
        "eval_steps": 1,
        "val_batch_size": -1,
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"tool_wrapper": {"tool_configs": []}}, "B.tool_wrapper: not built yet: tools around"),
        ({"agent_runner_cls": "a.B"}, "custom_envs.B.agent_runner_cls: not built yet: programs"),
        ({"env_type": "webshop"}, 'B.env_type: the environment "webshop" is not built yet'),
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
    config = agentic(**played(agent_runner_cls=None, tool_wrapper=None))
    assert config.tags_in_use() == ["A", "B"]


def test_variables_of_rolls_env_files_are_no_unknown_keys(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("pipeline: agentic\nsequence_length: 64\ndefault_history_length: 5\n")
    assert load_config(path, warn=False).ignored == ("default_history_length",)
    text = "custom_envs: {A: {history_length: '${default_history_length}'}}\n"
    path.write_text(path.read_text() + text + "train_env_manager: {tags: [A]}\neval_steps: 0\n")
    loaded = load_config(path, warn=False)
    assert loaded.ignored == () and loaded.config.env_template("A").history_length == 5
