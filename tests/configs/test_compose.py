"""Composition: defaults lists, overrides, interpolation, and the errors of each with file and line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from roll.configs.compose import compose, escape
from roll.configs.loader import load_yaml
from roll.exceptions import ConfigError


def write(folder: Path, **files: str) -> Path:
    """Write `name.yaml` for each argument (`__` is a folder separator); returns the path of the last."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_yaml(path, overrides)
    return str(caught.value)


# defaults


def test_bases_come_first_and_the_file_over_them(tmp_path):
    path = write(
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
    path = write(tmp_path, base="a: base", main="defaults: [_self_, base]\na: main\nb: main")
    assert load_yaml(path) == {"a": "base", "b": "main"}
    path = write(tmp_path, base="a: base", main="defaults: [base, _self_]\na: main")
    assert load_yaml(path) == {"a": "main"}


def test_bases_have_bases_relative_to_themselves(tmp_path):
    path = write(
        tmp_path,
        config__deep__root="a: 1\nb: 1\nc: 1",
        config__middle="defaults: [deep/root]\nb: 2\nc: 2",
        main="defaults: [config/middle.yaml@_here_]\nc: 3",
    )
    assert load_yaml(path) == {"a": 1, "b": 2, "c": 3}


def test_packages_and_groups_go_under_their_key(tmp_path):
    path = write(
        tmp_path,
        opt="lr: 1",
        model__small="layers: 2",
        main="defaults: [opt@train.optimizer, {model: small}, {other: null}, optional nothing]\nmodel: {heads: 4}",
    )
    assert load_yaml(path) == {
        "train": {"optimizer": {"lr": 1}},
        "model": {"layers": 2, "heads": 4},
    }


def test_the_same_base_twice_is_no_circle(tmp_path):
    path = write(
        tmp_path,
        root="a: 1",
        left="defaults: [root]",
        right="defaults: [root]",
        main="defaults: [left, right]",
    )
    assert load_yaml(path) == {"a": 1}


def test_a_circle_is_shown(tmp_path):
    write(tmp_path, one="defaults: [two]", two="defaults: [one]")
    message = error_of(tmp_path / "one.yaml")
    assert "the defaults lists form a circle: " in message
    assert message.endswith(f"{tmp_path}/one.yaml -> {tmp_path}/two.yaml -> {tmp_path}/one.yaml")


def test_a_missing_base_names_both_files_and_the_nearest_one(tmp_path):
    path = write(tmp_path, config__traj_envs="a: 1", main="defaults: [config/traj_env@_here_]")
    assert error_of(path) == (
        f"{tmp_path}/config/traj_env.yaml: no such file (named in the defaults of {path}); "
        f'did you mean "{tmp_path}/config/traj_envs.yaml"?'
    )


@pytest.mark.parametrize("entry", ["{a: 1, b: 2}", "3", "[x]"])
def test_entries_that_are_no_file_names(tmp_path, entry):
    path = write(tmp_path, main=f"defaults: [{entry}]")
    assert f"{path}: defaults: found" in error_of(path)
    path = write(tmp_path, main="defaults: base")
    assert error_of(path) == f"{path}: defaults: expected a list of files, such as `- base`"


# reading


def test_a_missing_file(tmp_path):
    write(tmp_path, train="a: 1")
    path = tmp_path / "trian.yaml"
    assert error_of(path) == f'{path}: no such file; did you mean "{tmp_path}/train.yaml"?'
    assert error_of(tmp_path / "nowhere" / "x.yaml") == f"{tmp_path}/nowhere/x.yaml: no such file"
    assert error_of(tmp_path) == f"{tmp_path}: this is a folder, expected a YAML file"


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
    path = write(tmp_path, main=text)
    assert error_of(path) == f"{path}{where}: {what}"


def test_files_that_hold_no_mapping(tmp_path):
    path = write(tmp_path, main="- 1\n- 2")
    assert error_of(path) == f"{path}: expected a mapping (key: value) at the top, found a list"
    path.write_bytes(b"a: \xff\xfe")
    assert error_of(path) == f"{path}: not a text file in UTF-8 (byte 3); expected YAML"
    assert load_yaml(write(tmp_path, empty="")) == {}


# interpolation


def test_references_see_the_final_values(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLL_TEST_NAME", "from outside")
    path = write(
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
    path = write(tmp_path, main="name: run-${now:%Y}-${now:%m}")
    first, second = load_yaml(path), load_yaml(path)
    assert first == second and first["name"].startswith("run-2")
    assert OmegaConf.has_resolver("now")


def test_each_unresolved_reference_names_its_key_and_line(tmp_path):
    path = write(
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
    assert error_of(path).splitlines() == [
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
    path = write(tmp_path, main="a:\n  b: ${x")
    assert error_of(path).startswith(f"{path}:2: a.b: the ${{...}} in it is malformed: ")
    path = write(tmp_path, main="a: ${eval:1+1}")
    assert error_of(path) == f"{path}:1: a: does not resolve: Unsupported interpolation type eval"


def test_a_bad_reference_from_the_command_line_is_located_there(tmp_path):
    path = write(tmp_path, main="a: 1")
    assert (
        error_of(path, "a=${nope}")
        == "command line: a: ${nope} does not resolve, because there is no key nope"
    )


# overrides


def test_overrides(tmp_path):
    path = write(tmp_path, main="a: 1\nb: {x: 1, y: 2}\nlist: [1, 2]\nref: ${a}")
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
    path = write(
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
    path = write(tmp_path, main="a: 1\nlist: [1]")
    assert error_of(path, override).startswith(message)


# what the composition knows


def test_variables_bases_and_lines(tmp_path):
    path = write(
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["\\", "${", "}", "$", "a", ":", "."]), max_size=8).map("".join))
@example("\\${a}")
@example("\\\\${a} and \\ and ${b}\\")
def test_escaped_text_reads_back_unchanged(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("escape") / "x.yaml"
    path.write_text(yaml.safe_dump(escape({"a": text, "b": [text]})), encoding="utf-8")
    assert load_yaml(path) == {"a": text, "b": [text]}
