"""From files to config objects: composition, what is ignored, what is a variable, what is wrong."""

import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from roll.configs.load import ConfigWarning, compose, dump_yaml, load_yaml
from roll.exceptions import ConfigError
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.registry import load_config
from roll.pipeline.rlvr.rlvr_config import RLVRConfig

DATA = Path(__file__).parent / "data"
DPO, RLVR, AGENTIC = (DATA / "good" / f"{name}.yaml" for name in ("dpo", "rlvr", "agentic"))


def write_all(folder: Path, **files: str) -> Path:
    """Write `name.yaml` for each (`__` separates folders); returns the path of the last."""
    for name, text in files.items():
        path = write(folder, text, f"{name.replace('__', '/')}.yaml")
    return path


def write(folder: Path, text: str, name: str = "main.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def error_of(path: Path, *overrides: str, load=load_config) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def compose_error(path: Path, *overrides: str) -> str:
    return error_of(path, *overrides, load=load_yaml)


# defaults


def test_bases_come_first_and_the_file_over_them(tmp_path):
    path = write_all(
        tmp_path,
        config__one="a: 1\nb: {x: 1, y: 1}\nlist: [1, 2]",
        config__two="a: 2\nb: {y: 2}",
        runs__main="""
defaults:
  - ../config/one@_here_
  - ../config/two@_here_
hydra: {run: {dir: .}}
b: {z: 3}
list: [3]
""",
    )
    assert load_yaml(path) == {"a": 2, "b": {"x": 1, "y": 2, "z": 3}, "list": [3]}


def test_self_says_where_the_file_itself_comes(tmp_path):
    path = write_all(tmp_path, base="a: base", main="defaults: [_self_, base]\na: main\nb: main")
    assert load_yaml(path) == {"a": "base", "b": "main"}
    path = write_all(tmp_path, base="a: base", main="defaults: [base, _self_]\na: main")
    assert load_yaml(path) == {"a": "main"}


def test_bases_have_bases_relative_to_themselves(tmp_path):
    path = write_all(
        tmp_path,
        config__deep__root="a: 1\nb: 1\nc: 1",
        config__middle="defaults: [deep/root]\nb: 2\nc: 2",
        main="defaults: [config/middle.yaml@_here_]\nc: 3",
    )
    assert load_yaml(path) == {"a": 1, "b": 2, "c": 3}


def test_the_same_base_twice_is_no_circle(tmp_path):
    path = write_all(
        tmp_path,
        root="a: 1",
        left="defaults: [root]",
        right="defaults: [root]",
        main="defaults: [left, right]",
    )
    assert load_yaml(path) == {"a": 1}


def test_a_circle_is_shown(tmp_path):
    write_all(tmp_path, one="defaults: [two]", two="defaults: [one]")
    message = compose_error(tmp_path / "one.yaml")
    assert "the defaults lists form a circle: " in message
    assert message.endswith(f"{tmp_path}/one.yaml -> {tmp_path}/two.yaml -> {tmp_path}/one.yaml")


def test_a_missing_base_names_both_files_and_the_nearest_one(tmp_path):
    path = write_all(tmp_path, config__traj_envs="a: 1", main="defaults: [config/traj_env@_here_]")
    assert compose_error(path) == (
        f"{tmp_path}/config/traj_env.yaml: no such file (named in the defaults of {path}); "
        f'did you mean "{tmp_path}/config/traj_envs.yaml"?'
    )


@pytest.mark.parametrize("entry", ["{a: 1, b: 2}", "3", "[x]", "{model: small}", "base@some.key"])
def test_entries_that_are_no_file_names(tmp_path, entry):
    path = write_all(tmp_path, main=f"defaults: [{entry}]")
    assert f"{path}: defaults: found" in compose_error(path)
    path = write_all(tmp_path, main="defaults: base")
    assert compose_error(path) == f"{path}: defaults: expected a list of files, such as `- base`"


# reading


def test_a_missing_file(tmp_path):
    write_all(tmp_path, train="a: 1")
    path = tmp_path / "trian.yaml"
    assert compose_error(path) == f'{path}: no such file; did you mean "{tmp_path}/train.yaml"?'
    assert (
        compose_error(tmp_path / "nowhere" / "x.yaml") == f"{tmp_path}/nowhere/x.yaml: no such file"
    )
    assert compose_error(tmp_path) == f"{tmp_path}: this is a folder, expected a YAML file"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: [1, 2\nb: 3\n", ":2:2", "not valid YAML: expected ',' or ']', but got ':'"),
        (
            "a: 1\n\tb: 2\n",
            ":2:1",
            "not valid YAML: found character '\\t' that cannot start any token",
        ),
        ("a: 1\nb: 2\na: 3\n", ":3:1", "not valid YAML: found duplicate key a"),
        ("a: *x\n", ":1:4", "not valid YAML: found undefined alias 'x'"),
        ("a: b: c\n", ":1:5", "not valid YAML: mapping values are not allowed here"),
    ],
)
def test_syntax_errors_name_file_line_and_column(tmp_path, text, where, what):
    path = write_all(tmp_path, main=text)
    assert compose_error(path) == f"{path}{where}: {what}"


def test_files_that_hold_no_mapping(tmp_path):
    path = write_all(tmp_path, main="- 1\n- 2")
    assert (
        compose_error(path) == f"{path}: expected a mapping (key: value) at the top, found a list"
    )
    path.write_bytes(b"a: \xff\xfe")
    assert compose_error(path) == f"{path}: not a text file in UTF-8 (byte 3); expected YAML"
    assert load_yaml(write_all(tmp_path, empty="")) == {}


# interpolation


def test_references_see_the_final_values(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLL_TEST_NAME", "from outside")
    path = write_all(
        tmp_path,
        base="length: 128\nenv: {steps: '${length}', name: 'walk-${length}'}",
        main="""
defaults: [base]
length: 64
envs: {Walk: "${env}"}
key: Walk
picked: ${envs.${key}.steps}
outside: ${oc.env:ROLL_TEST_NAME}
missing: ${oc.env:ROLL_TEST_NOT_SET,fallback}
plain: \\${length}
""",
    )
    values = load_yaml(path)
    assert values["envs"]["Walk"] == {"steps": 64, "name": "walk-64"}
    assert (values["picked"], values["outside"], values["missing"], values["plain"]) == (
        64,
        "from outside",
        "fallback",
        "${length}",
    )


def test_now_is_a_date_and_loading_twice_registers_once(tmp_path):
    path = write_all(tmp_path, main="name: run-${now:%Y}-${now:%m}")
    first, second = load_yaml(path), load_yaml(path)
    assert first == second and first["name"].startswith("run-2")
    assert OmegaConf.has_resolver("now")


def test_each_unresolved_reference_names_its_key_and_line(tmp_path):
    path = write_all(
        tmp_path,
        base="shared: ${nowhere.at.all}",
        main="""defaults: [base]
a:
  b: ${missing}
  c: [1, '${also.missing}']
d: ${oc.env:ROLL_TEST_NOT_SET}
e: ${f}
f: ${e}
g: ???
""",
    )
    assert compose_error(path).splitlines() == [
        f"{tmp_path}/base.yaml:1: shared: ${{nowhere.at.all}} does not resolve, because there is no key nowhere.at.all",
        f"{path}:3: a.b: ${{missing}} does not resolve, because there is no key missing",
        f"{path}:4: a.c.1: ${{also.missing}} does not resolve, because there is no key also.missing",
        f"{path}:5: d: the environment variable ROLL_TEST_NOT_SET is not set; set it, or give a default: "
        "${oc.env:ROLL_TEST_NOT_SET,default}",
        f"{path}:6: e: does not resolve: Recursive interpolation detected",
        f"{path}:7: f: does not resolve: Recursive interpolation detected",
        f'{path}:8: g: is "???", which stands for a value to be given; set it, here or on the command line',
    ]


def test_malformed_and_unknown_resolvers(tmp_path):
    path = write_all(tmp_path, main="a:\n  b: ${x")
    assert compose_error(path).startswith(f"{path}:2: a.b: the ${{...}} in it is malformed: ")
    path = write_all(tmp_path, main="a: ${eval:1+1}")
    assert (
        compose_error(path) == f"{path}:1: a: does not resolve: Unsupported interpolation type eval"
    )


def test_a_bad_reference_from_the_command_line_is_located_there(tmp_path):
    path = write_all(tmp_path, main="a: 1")
    assert (
        compose_error(path, "a=${nope}")
        == "command line: a: ${nope} does not resolve, because there is no key nope"
    )


# overrides


def test_overrides(tmp_path):
    path = write_all(tmp_path, main="a: 1\nb: {x: 1, y: 2}\nlist: [1, 2]\nref: ${a}")
    overrides = [
        "a=5",
        "b.x=1e-6",
        "+b.new=[0, 1]",
        "++c.d=text",
        "list.1=9",
        "list[0]=8",
        "~b.y",
        "e={k: v}",
        "f=null",
    ]
    assert load_yaml(path, overrides) == {
        "a": 5,
        "b": {"x": 1e-6, "new": [0, 1]},
        "list": [8, 9],
        "ref": 5,
        "c": {"d": "text"},
        "e": {"k": "v"},
        "f": None,
    }
    assert load_yaml(path, ["d=list(range(0,8))", "g=a=b"])["g"] == "a=b"
    assert load_yaml(path, ["a=7", "g=${a}"])["g"] == 7


def test_an_override_below_a_reference_changes_one_value_of_a_copy(tmp_path):
    path = write_all(
        tmp_path, main="env: {Walk: {steps: 1, name: '${n}'}}\nenvs: {Walk: '${env.Walk}'}\nn: w"
    )
    values = load_yaml(path, ["envs.Walk.steps=5"])
    assert values["envs"]["Walk"] == {"steps": 5, "name": "w"}
    assert values["env"]["Walk"]["steps"] == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps", 'command line: found "max_steps", expected key=value, such as max_steps=10'),
        ("=3", 'command line: found "=3", expected key=value'),
        ("a..b=3", 'command line: found "a..b=3", expected key=value'),
        ("a=[1", "command line: a=[1: "),
        ("~nope", "command line: ~nope: there is no key nope to remove"),
        ("~a.b", "command line: ~a.b: there is no key a.b to remove"),
        ("list[7]=1", "command line: list[7]=1: "),
    ],
)
def test_malformed_overrides(tmp_path, override, message):
    path = write_all(tmp_path, main="a: 1\nlist: [1]")
    assert compose_error(path, override).startswith(message)


# what the composition knows


def test_variables_bases_and_lines(tmp_path):
    path = write_all(
        tmp_path,
        base="shared: {x: 1}\nother: 1",
        main="defaults: [base]\nname: n\na:\n  b: ${name}\n  c: ${.b}",
    )
    composition = compose(path, ["a.c=2"])
    assert composition.referenced == {"name"}
    assert composition.inherited == {"shared", "other"}
    assert composition.locate("a.b") == f"{path}:4"
    assert composition.locate("a.zzz") == f"{path}:3"
    assert composition.locate("shared.x") == f"{tmp_path}/base.yaml:1"
    assert composition.locate("a.c") == "command line"
    assert composition.locate("nowhere") == str(path)


# writing


# files as ROLL's examples are written


def test_a_dpo_file():
    loaded = load_config(DPO, warn=False)
    config = loaded.config
    assert isinstance(config, DPOConfig)
    assert (config.beta, config.actor_train.device_mapping, config.reference.device_mapping) == (
        0.2,
        [0, 1],
        [2, 3],
    )
    assert config.actor_train.strategy_config["zero_optimization"]["stage"] == 3
    assert config.actor_train.training_args.per_device_train_batch_size == 4  # pairs, as written
    assert config.actor_train.system_envs == {"OMP_NUM_THREADS": "2"}
    assert loaded.ignored == (
        "checkpoint_config",
        "track_name",
        "train_batch_size",
        "val_batch_size",
        "local_rank",
        "actor_train.model_args.flash_attn",
        "actor_train.data_args.dataset_dir",
        "actor_train.data_args.preprocessing_num_workers",
    )
    assert loaded.replaced == ()


def test_an_rlvr_file():
    loaded = load_config(RLVR, warn=False)
    config = loaded.config
    assert isinstance(config, RLVRConfig)
    assert config.exp_name == "rlvr-ppo"  # the variable is no key of the config
    assert config.actor_train.pg_variant == "ppo"
    assert config.actor_infer.generating_args.num_return_sequences == 8
    assert config.tag_2_domain == {
        "deepmath_103k": "math_rule",
        "aime": "math_rule",
        "RLVR": "llm_judge",
    }
    assert config.rewards["llm_judge"].device_mapping == [6, 7]
    assert config.actor_train.strategy_config == {"fsdp_size": 4}
    assert loaded.ignored == (
        "logging_dir",
        "reward_norm",
        "reward_shift",
        "reward_scale",
        "use_reward_scaling",
        "validation.eval_steps",
        "actor_train.data_args.dataset_dir",
        "actor_train.data_args.interleave_probs",
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size",
        "actor_train.strategy_args.strategy_config.moe_grouped_gemm",
    )
    assert [str(item) for item in loaded.replaced] == [
        "actor_infer.generating_args.max_new_tokens: 1000 became 4096"
    ]


def test_values_that_follow_from_others_are_named(tmp_path):
    text = """
pipeline: rlvr
sequence_length: 64
prompt_length: 32
seed: 7
actor_train:
  name: me
  world_size: 3
  device_mapping: [0, 1]
  model_args: {dtype: fp16, attn_implementation: fa2}
  training_args: {seed: 1, output_dir: mine, bf16: true, fp16: false}
"""
    prefix = "actor_train.training_args"
    assert sorted(map(str, load_config(write(tmp_path, text), warn=False).replaced)) == [
        "actor_train.name: me became actor_train",
        f"{prefix}.bf16: True became False",
        f"{prefix}.fp16: False became True",
        f"{prefix}.output_dir: mine became ./output",
        f"{prefix}.seed: 1 became 7",
        "actor_train.world_size: 3 became 2",
    ]


@pytest.mark.parametrize(
    ("pipeline", "text", "idle"),
    [
        ("dpo", "prompt_length: 16", "prompt_length (sequence_length is the limit)"),
        (
            "dpo",
            "track_with: none\ntracker_kwargs: {project: p}",
            "tracker_kwargs (no tracker of track_with takes op",
        ),
        ("rlvr", "kl_loss_coef: 0.1", "kl_loss_coef (use_kl_loss is off)"),
        ("rlvr", "adv_estimator: grpo\nlambd: 0.5", "lambd (adv_estimator grpo has no critic)"),
        ("rlvr", "actor_train: {kimi15_tau: 3}", "actor_train.kimi15_tau (pg_variant is ppo)"),
        (
            "rlvr",
            "difficulty_low_threshold: 0.3",
            "difficulty_low_threshold (difficulty_mask is off)",
        ),
        (
            "sft",
            "actor_train: {max_tokens_per_microbatch_in_train: 99}",
            "(use_dynamic_batching_in_train is off)",
        ),
    ],
)
def test_a_key_that_another_one_switches_off_is_named(tmp_path, pipeline, text, idle):
    size = "sequence_length: 2048"
    loaded = load_config(write(tmp_path, f"pipeline: {pipeline}\n{size}\n{text}"), warn=False)
    assert idle in ", ".join(loaded.ignored)
    again = load_config(write(tmp_path, f"pipeline: {pipeline}\n{size}", "plain.yaml"), warn=False)
    assert again.ignored == ()


def test_settings_that_change_nothing_in_one_pipeline_are_named_there(tmp_path):
    text = "pipeline: {}\nsequence_length: 2048\nrollout_batch_size: 64"
    assert load_config(write(tmp_path, text.format("dpo")), warn=False).ignored == (
        "rollout_batch_size",
    )
    assert load_config(write(tmp_path, text.format("rlvr")), warn=False).ignored == ()


def test_keys_of_an_environment_without_effect_are_named(tmp_path):
    text = "pipeline: agentic\nsequence_length: 64\neval_steps: 0\ncustom_envs: {SimpleSokoban: {use_thread_lock: true}}"
    assert load_config(write(tmp_path, text), warn=False).ignored == (
        "custom_envs.SimpleSokoban.use_thread_lock",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{type: mean_filter, filter_args: {treshold_up: 1}}",
            'treshold_up: unknown key; did you mean "threshold_up"?',
        ),
        ("{type: std_filter, filter_args: {threshold_up: 1}}", "threshold_up: unknown key"),
        ("{type: std_filter, filter_args: {std_threshold: low}}", "std_threshold: found"),
    ],
)
def test_options_of_a_filter_are_checked(tmp_path, text, message):
    rewards = f"rewards: {{math: {{reward_fn: 'a.py:f', query_filter_config: {text}}}}}"
    path = write(tmp_path, f"pipeline: rlvr\nsequence_length: 2048\n{rewards}")
    assert f"rewards.math.query_filter_config.filter_args.{message}" in error_of(path)


def test_code_runs_on_this_machine(tmp_path):
    text = "pipeline: rlvr\nsequence_length: 2048\nrewards: {code: {reward_fn: 'a.py:f', code_url: 'http://x'}}"
    assert load_config(write(tmp_path, text), warn=False).ignored == ("rewards.code.code_url",)
    message = "rewards.code.use_local: found False (bool); not built yet: running code at code_url"
    assert message in error_of(
        write(tmp_path, text.replace("code_url: 'http://x'", "use_local: false"))
    )


def test_an_agentic_file():
    config = load_config(AGENTIC, warn=False).config
    assert isinstance(config, AgenticConfig)
    walk = config.custom_envs["Walk"]
    assert (walk["max_steps"], walk["max_tokens_per_step"]) == (
        6,
        16,
    )  # one variable of the base, one replaced here
    assert walk["env_config"]["symbols"] == {0: "#", 1: "."}
    assert config.train_env_manager.generating_args.max_new_tokens == 16
    assert config.train_env_manager.world_size == 8


@pytest.mark.parametrize("path", [DPO, RLVR, AGENTIC], ids=lambda path: path.stem)
def test_a_resolved_config_loads_again_to_an_equal_one(path, tmp_path):
    first = load_config(path, warn=False)
    second = load_config(write(tmp_path, dump_yaml(first.config), "config.yaml"), warn=False)
    assert second.config == first.config
    assert dump_yaml(second.config) == dump_yaml(first.config)
    assert second.replaced == ()
    assert set(second.ignored) <= set(first.ignored)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["gae", "grpo", "rloo"]),
    st.sampled_from([0, 1, 2.5]),
    st.text(alphabet="a${}\\", max_size=6),
    st.booleans(),
)
def test_dump_and_load_is_a_fixpoint(
    tmp_path_factory, ranks, samples, estimator, ahead, name, lora
):
    strategy = {"strategy_name": "fsdp2_train"}
    model = {"lora_target": "q_proj,v_proj"} if lora else {}
    config = RLVRConfig(
        response_length=8,
        exp_name=name,
        num_return_sequences_in_group=samples,
        adv_estimator=estimator,
        async_generation_ratio=ahead,
        system_envs={"A": name},
        actor_train={"strategy_args": strategy, "world_size": ranks, "model_args": model},
        critic={"strategy_args": strategy},
        rewards={"math": {"worker_cls": "a.B", "tag_included": ["x"]}},
    )
    path = write(tmp_path_factory.mktemp("fixpoint"), dump_yaml(config))
    assert load_config(path, warn=False).config == config


# what is named once, and what is no mistake


def test_all_keys_without_effect_are_in_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config(DPO)
    (warning,) = caught
    assert warning.category is ConfigWarning
    beginning = "accepted without effect: checkpoint_config, track_name, train_batch_size, val_batch_size, local_rank, "
    assert beginning in str(warning.message)


def test_a_clean_file_gives_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_config(write(tmp_path, "pipeline: dpo\nsequence_length: 8", "my_run.yaml"))
    assert loaded.config.exp_name == "my_run"
    assert loaded.warnings() == []


def test_variables_of_the_file_are_no_keys_of_the_config(tmp_path):
    path = write(tmp_path, "pipeline: dpo\nlength: 99\nsequence_length: ${length}")
    assert load_config(path).config.sequence_length == 99


def test_a_variable_that_nothing_refers_to_is_an_unknown_key(tmp_path):
    path = write(tmp_path, "pipeline: dpo\nsequence_length: 8\nmy_length: 99")
    assert error_of(path) == f'{path}:3: my_length: unknown key; did you mean "prompt_length"?'


def test_a_misspelt_key_is_no_variable_even_if_something_refers_to_it(tmp_path):
    path = write(tmp_path, "pipeline: dpo\nsequence_length: 8\nmax_stepss: 9\nseed: ${max_stepss}")
    assert error_of(path) == f'{path}:3: max_stepss: unknown key; did you mean "max_steps"?'


def test_a_misspelt_key_of_a_base_file_is_found_there(tmp_path):
    base = write(tmp_path, "sequence_lengt: 1032\ntemplates: {a: 1}\nspare: text", "base.yaml")
    path = write(tmp_path, "defaults: [base]\npipeline: dpo\nresponse_length: 8")
    assert (
        error_of(path) == f'{base}:1: sequence_lengt: unknown key; did you mean "sequence_length"?'
    )


def test_an_empty_section_is_the_default(tmp_path):
    path = write(
        tmp_path, "pipeline: dpo\nsequence_length: 8\nactor_train:\n  training_args:\nreference:\n"
    )
    assert (
        load_config(path).config
        == load_config(write(tmp_path, "pipeline: dpo\nsequence_length: 8")).config
    )


# what is wrong, and where


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bta: 0.1", 'bta: unknown key; did you mean "beta"?'),
        (
            "max_steps: many",
            'max_steps: found "many" (str), expected a valid integer',
        ),
        ("loss_type: sigmoidal", 'did you mean "sigmoid"?'),
        ("beta: 0", "beta: found 0 (int), expected greater than 0; the default is 0.1"),
        (
            "actor_train: {device_mapping: all}",
            'actor_train.device_mapping: found "all" (str), expected a list of GPU numbers',
        ),
        ("actor_train: 3", "actor_train: found 3 (int), expected a mapping (key: value)"),
        (
            "validation: {data_args: {prompt: a, messages: b}}",
            "validation.data_args.messages: found",
        ),
        (
            "actor_train: {strategy_args: {strategy_name: megatron_train}}",
            '"megatron_train" is not supported; the nearest one is',
        ),
    ],
)
def test_one_problem_is_one_line_with_file_line_and_key(tmp_path, line, expected):
    path = write(tmp_path, f"pipeline: dpo\nsequence_length: 8\n{line}\n")
    message = error_of(path)
    assert message.startswith(f"{path}:3: ") and expected in message
    assert "\n" not in message


def test_several_problems_are_several_lines(tmp_path):
    path = write(
        tmp_path,
        "pipeline: dpo\nsequence_length: long\nactor_train:\n  trainin_args: {}\n  model_args: {dtype: int8}",
    )
    number = "expected a valid integer"
    assert sorted(error_of(path, "seed=x").splitlines()) == [
        f'{path}:2: sequence_length: found "long" (str), {number}',
        f'{path}:4: actor_train.trainin_args: unknown key; did you mean "training_args"?',
        f'{path}:5: actor_train.model_args.dtype: found "int8" (str), expected one of fp32, bf16, '
        "fp16; the default is bf16",
        f'command line: seed: found "x" (str), {number}; the default is 42',
    ]


def test_what_does_not_divide_is_an_error_with_the_two_nearest_values():
    message = error_of(RLVR, "rollout_batch_size=17", "critic.strategy_args=null")
    assert message.startswith(
        "command line: rollout_batch_size: found 17 (int), expected a multiple of 4,"
    )
    assert message.endswith("; use 16 or 20")


def test_megatron_files_load_with_the_nearest_strategy():
    strategy = "actor_train.strategy_args.strategy_name"
    assert f'{strategy}: the strategy "megatron_train" is not supported' in error_of(
        RLVR, f"{strategy}=megatron_train"
    )
    assert (
        load_config(RLVR, [f"{strategy}=fsdp2_train"], warn=False).config.actor_train.strategy_name
        == "fsdp2_train"
    )


def test_unsupported_parts_come_first_and_hide_nothing(tmp_path):
    text = (
        "rewards: {}\npretrain: Qwen/Qwen2.5-VL-7B\nbta: 1\n"
        "actor_train: {strategy_args: {strategy_name: megatron_train}}\n"
    )
    path = write(tmp_path, text)
    vision = (
        f'{path}:2: pretrain: not supported: "Qwen/Qwen2.5-VL-7B" is a vision or audio model; '
        "only text models are trained"
    )
    lines = error_of(path).splitlines()
    assert lines[0] == vision and len(lines) == 3
    assert (
        "actor_train.strategy_args.strategy_name" in lines[1]
        and f"{path}:3: bta: unknown key" in lines[2]
    )
    # Alone, and where nobody can say which pipeline the rest is for.
    assert (
        error_of(
            write(tmp_path, "rewards: {}\npretrain: Qwen/Qwen2.5-VL-7B\nsequence_length: 2048")
        )
        == vision
    )
    assert error_of(write(tmp_path, "\npretrain: Qwen/Qwen2.5-VL-7B")) == vision
    # A key that both would name is named once; another pipeline's file is not judged as one of
    # ours.
    assert error_of(write(tmp_path, "rewards: {}\nvision_dp: true")).count("vision_dp") == 1
    assert (
        error_of(write(tmp_path, "student: {}\nbta: 1"))
        == f"{path}:1: student: not supported: distillation"
    )


def test_values_that_yaml_cannot_express_are_an_error():
    config = DPOConfig(sequence_length=8, tracker_kwargs={"a": object()})
    with pytest.raises(ConfigError, match=r"a value that YAML cannot express: <object object"):
        dump_yaml(config)


def test_load_yaml_is_the_plain_mapping():
    values = load_yaml(AGENTIC, ["seed=3", "hydra.run.dir=x"])
    assert values["seed"] == 3 and "hydra" not in values and "defaults" not in values
    assert values["custom_envs"]["Talk"]["max_steps"] == 6
