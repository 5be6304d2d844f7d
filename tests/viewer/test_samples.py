"""The samples of a step on their way to the page."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import HOSTILE, tokens_of, write_rollouts

from roll.viewer.run_data import rollout_files
from roll.viewer.samples import PIECE_SAMPLES, StepData, read_step, significant


def step_of(
    folder: Path, records: list[dict[str, Any]], problems: list[str] | None = None
) -> StepData:
    write_rollouts(folder, 3, records)
    return read_step(rollout_files(folder)[0], [].append if problems is None else problems.append)


def record(**changes: Any) -> dict[str, Any]:
    tokens = {
        "ids": [7, 8, 9],
        "text": ["a", " b", " c"],
        "mask": [0, 1, 1],
        "old_log_probs": [None, -0.5, -1.25],
        "infer_log_probs": [None, -0.50043, -1.25],
        "advantages": [None, 1.5004, 1.5],
        "returns": [None, 1.23456e-6, -9.8e-7],
    }
    base = {"sample": "s", "group": "g", "prompt": "a", "response": " b c", "score": 1.0}
    return {**base, "tokens": tokens, **changes}


def numbers_of(columns: dict[str, Any]) -> dict[str, list[float | None]]:
    """The numbers of a sample as the page reads them."""
    numbers: dict[str, list[float | None]] = {}
    for name, column in columns.items():
        near = numbers.get(column.get("base"), [])
        numbers[name] = [
            None if value is None else value * column["unit"] + (near[i] if near else 0)
            for i, value in enumerate(column["values"])
        ]
    return numbers


def test_a_sample_and_its_numbers(tmp_path: Path) -> None:
    facts = {"ground_truth": "c", "policy_version": 4, "finish_reason": "stop"}
    step = step_of(tmp_path, [record(rewards={"answer": 1.0}, **facts)])
    assert step.listing["rows"] == [
        {
            "group": 0, "sample": "s", "score": 1.0, "advantage": None, "tokens": 2,
            "finish": "stop", "dropped": None, "tag": None, "domain": None, "ranked": None,
            "preview": "b c", "piece": 0, "index": 0,
        }
    ]  # fmt: skip
    assert step.listing["vocabulary"] == [[[7, 8, 9], ["a", " b", " c"]]]
    assert step.listing["groups"] == [{"id": "g", "prompt": "a"}]
    (sample,) = step.pieces[0]["samples"]
    columns = numbers_of(sample.pop("columns"))
    about = {"truth": "c", "parts": {"answer": 1.0}, "version": 4}
    assert sample == {**about, "words": [0, 1, 2], "mask": [0, 1, 1]}
    expected = {
        "old_log_probs": [None, -0.5, -1.25],
        "infer_log_probs": [None, -0.50043, -1.25],
        "advantages": [None, 1.5, 1.5],
        "returns": [None, 1.235e-6, -9.8e-7],  # small numbers keep four digits
    }
    assert columns.keys() == expected.keys()
    for name, values in expected.items():
        assert columns[name][0] is None and columns[name][1:] == pytest.approx(values[1:], rel=1e-9)
    assert step.stats.gap == 0.000215 and step.stats.score == 1.0


def test_a_number_missing_among_others_is_null_and_a_nan_is_counted(tmp_path: Path) -> None:
    tokens = record()["tokens"] | {"advantages": [None, None, "NaN"], "entropy": [None] * 3}
    step = step_of(tmp_path, [record(tokens=tokens)])
    columns = step.pieces[0]["samples"][0]["columns"]
    values = columns["advantages"]["values"]
    assert values[:2] == [None, None] and np.isnan(values[2])
    assert "entropy" not in columns
    assert step.stats.odd == {"advantages": 1}


def test_many_samples_come_in_pieces_and_long_ones_alone(tmp_path: Path) -> None:
    step = step_of(tmp_path, [record(sample=str(i), group=str(i // 8)) for i in range(70)])
    assert [len(piece["samples"]) for piece in step.pieces] == [PIECE_SAMPLES, PIECE_SAMPLES, 6]
    assert step.listing["rows"][-1]["piece"] == 2 and step.listing["rows"][-1]["index"] == 5
    assert len(step.listing["groups"]) == 9
    texts = [{"sample": str(i), "prompt": "", "response": "x" * 600_000} for i in range(3)]
    assert len(step_of(tmp_path, texts).pieces) == 3


def test_statistics_of_a_step(tmp_path: Path) -> None:
    records = [
        {"group": "flat", "score": 1.0, "finish_reason": "length", "rewards": {"a": 1, "b": "NaN"}},
        {"group": "flat", "score": 1.0, "finish_reason": "stop", "rewards": {"a": 3.0}},
        {"group": "mixed", "score": 0.0, "finish_reason": "stop", "samples_in_step": 64},
        {"group": "mixed", "score": 2.0},
        {"group": "alone", "score": 5.0},
        {"group": "mixed", "score": "NaN", "dropped": "timeout\ntraceback"},
    ]
    stats = step_of(tmp_path, records).stats
    assert (stats.samples, stats.in_step, stats.dropped) == (6, 64, {"timeout": 1})
    assert (stats.finished, stats.truncated, stats.groups, stats.flat_groups) == (3, 1, 2, 1)
    assert stats.parts == {"a": (2, 1.0, 3.0, 2.0)} and stats.score == 1.8
    empty = step_of(tmp_path, [])
    assert empty.pieces == [] and empty.stats.samples == 0


def test_records_that_make_no_sense_are_shown_as_far_as_they_do(tmp_path: Path) -> None:
    problems: list[str] = []
    odd = {"prompt": None, "response": 7, "rewards": [1], "score": "high", "turns": "none"}
    tokens = {"text": ["a", 5], "ids": [1], "mask": None, "advantages": [1.0]}
    records = [
        {},
        {"tokens": 5, **odd},
        record(tokens={**tokens, "entropy": ["x", 1e400]}),
        record(turns=[{"role": "response", "start": 5, "end": 9}]),
    ]
    write_rollouts(tmp_path, 3, records)
    path = rollout_files(tmp_path)[0].path
    path.write_text(path.read_text() + '{"sample": \n[1]\n{"sam')
    step = read_step(rollout_files(tmp_path)[0], problems.append)
    samples = step.pieces[0]["samples"]
    assert samples[0] == {} and samples[1]["response"] == "7" and len(samples[2]["words"]) == 2
    assert samples[2]["columns"]["entropy"]["values"] == [None, np.inf]
    assert "turns" not in samples[3], "turns that lie outside the tokens are left out"
    lines = [problem.split(": ", 1)[0] for problem in problems]
    assert lines == [f"step-000003.jsonl, line {n}" for n in (2, 3, 5, 6)]


def test_turns(tmp_path: Path) -> None:
    turns = [
        {"role": "observation", "start": 0, "end": 1},
        {"role": "response", "start": 1, "end": 3, "reward": 0.5},
    ]
    (sample,) = step_of(tmp_path, [record(turns=turns)]).pieces[0]["samples"]
    assert sample["turns"] == [[0, 0, 1, None], [1, 1, 3, 0.5]]


def test_hostile_texts_arrive_as_they_are(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    records = []
    for name, text in HOSTILE.items():
        records.append({"sample": name, "tokens": tokens_of(random, [], [text])})
    listing = step_of(tmp_path, records).listing
    assert listing["vocabulary"][0][1] == list(HOSTILE.values())


def test_significant_digits() -> None:
    assert significant(1.23456789, 4) == 1.235 and significant(None) is None
    assert np.isnan(significant(np.nan))
