"""The config of a run beside the defaults."""

from pathlib import Path

import pytest

from roll.pipeline.registry import load_config
from roll.viewer.config_diff import config_rows

GOOD = Path(__file__).parents[1] / "configs" / "data" / "good"


def kinds(pipeline: str) -> dict[str, tuple[str, object, object]]:
    values = load_config(GOOD / f"{pipeline}.yaml", warn=False).config.to_dict()
    return {row.key: (row.kind, row.value, row.default) for row in config_rows(values, pipeline)}


def test_what_a_file_changes_is_told_from_what_it_leaves() -> None:
    rows = kinds("rlvr")
    assert rows["max_steps"] == ("changed", 100, 500)
    assert rows["actor_train.training_args.learning_rate"] == ("changed", 1e-6, 5e-5)
    assert rows["seed"] == ("default", 42, 42)
    assert rows["actor_train.worker_cls"][0] == "default", (
        "what every config of this pipeline derives is no change"
    )
    assert rows["pretrain"] == ("set", "some/model", None)
    assert rows["rewards.math_rule.query_filter_config.type"] == (
        "changed",
        "mean_filter",
        "no_filter",
    )


def test_a_value_that_follows_the_top_is_told_apart() -> None:
    rows = kinds("dpo")
    assert rows["seed"] == ("changed", 1, 42) and rows["actor_train.training_args.seed"][0] in (
        "follows",
        "default",
    )


@pytest.mark.parametrize("pipeline", ["dpo", "rlvr", "agentic"])
def test_few_of_many_keys_differ(pipeline: str) -> None:
    rows = kinds(pipeline)
    different = [key for key, (kind, _, _) in rows.items() if kind in ("changed", "set")]
    assert 5 < len(different) < 0.25 * len(rows)
    assert all(kind != "unknown" for kind, _, _ in rows.values())


def test_an_unknown_pipeline_has_nothing_to_compare_with() -> None:
    rows = config_rows({"a": {"b": 1, "c": {}}, "d": [1]}, "knitting")
    assert [(row.key, row.value, row.kind) for row in rows] == [
        ("a.b", 1, "unknown"),
        ("a.c", {}, "unknown"),
        ("d", [1], "unknown"),
    ]


def test_a_config_that_no_longer_fits_its_class_still_has_rows() -> None:
    rows = {
        row.key: row.kind
        for row in config_rows({"max_steps": 7, "gone": {"x": 1}, "rewards": 5}, "rlvr")
    }
    assert rows["max_steps"] == "changed" and rows["gone.x"] == "set"
