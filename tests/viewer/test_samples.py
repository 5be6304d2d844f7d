"""The samples of a step on their way to the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from report_reader import unpack
from synthetic_run import HOSTILE, tokens_of, write_rollouts

from roll.viewer.run_data import rollout_files
from roll.viewer.samples import PIECE_SAMPLES, PackedStep, _runs, pack_step


def packed(
    folder: Path, records: list[dict[str, Any]], problems: list[str] | None = None
) -> PackedStep:
    write_rollouts(folder, 3, records)
    return pack_step(rollout_files(folder)[0], [].append if problems is None else problems.append)


def record(**changes: Any) -> dict[str, Any]:
    tokens = {
        "ids": [7, 8, 9],
        "text": ["a", " b", " c"],
        "mask": [0, 1, 1],
        "old_log_probs": [None, -0.5, -1.25],
        "infer_log_probs": [None, -0.5004, -1.25],
        "advantages": [None, 1.5, 1.5],
    }
    base = {
        "sample": "s",
        "group": "g",
        "prompt": "a",
        "response": " b c",
        "score": 1.0,
        "tokens": tokens,
    }
    return {**base, **changes}


def test_a_sample_and_its_numbers(tmp_path: Path) -> None:
    step = packed(
        tmp_path,
        [record(rewards={"answer": 1.0}, ground_truth="c", policy_version=4, finish_reason="stop")],
    )
    listing, piece = unpack(step.listing), unpack(step.pieces[0])
    row = {
        field: column[0] for field, column in zip(listing["fields"], listing["rows"], strict=True)
    }
    assert row == {
        "group": 0, "sample": "s", "score": 1.0, "advantage": None, "tokens": 2, "finish": "stop", "dropped": None,
        "tag": None, "domain": None, "ranked": None, "preview": "b c", "piece": 0, "index": 0,
    }  # fmt: skip
    assert listing["vocabulary"] == [[[7, 8, 9], ["a", " b", " c"]]] and listing["groups"] == [
        {"id": "g", "prompt": "a"}
    ]
    assert piece["samples"] == [
        {
            "truth": "c",
            "parts": {"answer": 1.0},
            "version": 4,
            "length": 3,
            "mask": [1, 2],
            "known": [1, 2],
        }
    ]
    assert piece["columns"]["words"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(piece["columns"]["old_log_probs"], [-0.5, -1.25], atol=1e-9)
    np.testing.assert_allclose(piece["columns"]["infer_log_probs"], [-0.5004, -1.25], atol=1e-9)
    np.testing.assert_allclose(piece["columns"]["advantages"], [1.5, 1.5], atol=1e-9)
    assert step.stats.gap == 0.0002 and step.stats.score == 1.0


def test_a_number_missing_among_others_is_null_and_a_nan_is_a_nan(tmp_path: Path) -> None:
    tokens = record()["tokens"] | {"advantages": [None, None, "NaN"]}
    step = packed(tmp_path, [record(tokens=tokens)])
    piece = unpack(step.pieces[0])
    assert piece["nulls"] == {"advantages": [0]} and np.isnan(piece["columns"]["advantages"][1])
    assert step.stats.odd == {"advantages": 1}


def test_many_samples_come_in_pieces(tmp_path: Path) -> None:
    step = packed(tmp_path, [record(sample=str(i), group=str(i // 8)) for i in range(70)])
    assert [len(unpack(piece)["samples"]) for piece in step.pieces] == [
        PIECE_SAMPLES,
        PIECE_SAMPLES,
        6,
    ]
    listing = unpack(step.listing)
    assert (
        listing["rows"][listing["fields"].index("piece")][-1] == 2 and len(listing["groups"]) == 9
    )


def test_long_samples_come_alone(tmp_path: Path) -> None:
    step = packed(
        tmp_path, [{"sample": str(i), "prompt": "", "response": "x" * 600_000} for i in range(3)]
    )
    assert len(step.pieces) == 3


def test_statistics_of_a_step(tmp_path: Path) -> None:
    plain = {"prompt": "p", "response": "r"}
    records = [
        {
            **plain,
            "group": "flat",
            "score": 1.0,
            "finish_reason": "length",
            "rewards": {"a": 1.0, "b": "NaN"},
        },
        {**plain, "group": "flat", "score": 1.0, "finish_reason": "stop", "rewards": {"a": 3.0}},
        {**plain, "group": "mixed", "score": 0.0, "finish_reason": "stop", "samples_in_step": 64},
        {**plain, "group": "mixed", "score": 2.0},
        {**plain, "group": "alone", "score": 5.0},
        {**plain, "group": "mixed", "score": "NaN", "dropped": "timeout\ntraceback"},
    ]
    stats = packed(tmp_path, records).stats
    assert (stats.samples, stats.in_step, stats.dropped) == (6, 64, {"timeout": 1})
    assert (stats.finished, stats.truncated, stats.groups, stats.flat_groups) == (3, 1, 2, 1)
    assert stats.parts == {"a": (2, 1.0, 3.0, 2.0)} and stats.score == 1.8


def test_records_that_make_no_sense_are_shown_as_far_as_they_do(tmp_path: Path) -> None:
    problems: list[str] = []
    records = [
        {},
        {
            "tokens": 5,
            "prompt": None,
            "response": 7,
            "rewards": [1],
            "score": "high",
            "turns": "none",
        },
        record(
            tokens={
                "text": ["a", 5],
                "ids": [1],
                "mask": None,
                "advantages": [1.0],
                "entropy": ["x", 1e400],
            }
        ),
        record(turns=[{"role": "response", "start": 5, "end": 9}]),
    ]
    write_rollouts(tmp_path, 3, records)
    path = rollout_files(tmp_path)[0].path
    path.write_text(path.read_text() + '{"sample": \n[1]\n{"sam')
    step = pack_step(rollout_files(tmp_path)[0], problems.append)
    samples = unpack(step.pieces[0])["samples"]
    assert samples[0] == {} and samples[1]["response"] == "7" and samples[2]["length"] == 2
    assert "turns" not in samples[3], "turns that lie outside the tokens are left out"
    assert [problem.split(": ", 1)[0] for problem in problems] == [
        f"step-000003.jsonl, line {n}" for n in (2, 3, 5, 6)
    ]


def test_turns(tmp_path: Path) -> None:
    turns = [
        {"role": "observation", "start": 0, "end": 1},
        {"role": "response", "start": 1, "end": 3, "reward": 0.5},
    ]
    piece = unpack(packed(tmp_path, [record(turns=turns)]).pieces[0])
    assert piece["samples"][0]["turns"] == [[0, 0, 1, None], [1, 1, 3, 0.5]]


def test_hostile_texts_arrive_as_they_are(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    records = [
        {"sample": name, "tokens": tokens_of(random, [], [text])} for name, text in HOSTILE.items()
    ]
    listing = unpack(packed(tmp_path, records).listing)
    assert listing["vocabulary"][0][1] == list(HOSTILE.values())


def test_runs_of_flags() -> None:
    assert (
        _runs(np.array([0, 0, 1, 1, 1], bool)) == [2, 3]
        and _runs(np.array([1], bool)) == [0, 1]
        and _runs(np.zeros(0, bool)) == []
    )


def test_an_empty_file(tmp_path: Path) -> None:
    step = packed(tmp_path, [])
    assert step.pieces == [] and json.dumps(step.stats.as_json())
