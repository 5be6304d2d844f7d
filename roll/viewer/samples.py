"""The samples of one step, turned into what the page loads.

A listing holds what a row of the sample browser shows, and the step's vocabulary (token id and
text, once each). Pieces hold the tokens of up to 32 samples, so that opening one loads little.
`StepStats` is what the health rules look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from roll.viewer.run_data import RolloutFile, as_number, as_whole, json_lines

PIECE_SAMPLES, PIECE_SIZE = 32, 1_000_000  # a token counts as 25 characters
PREVIEW = 80  # characters

# Columns of numbers per token: the unit that they are whole multiples of, and the column that they
# are written relative to. The trainer's and the sampler's log-probs differ by little, and that
# little is what people look at: as a difference it has a finer unit and fewer digits.
COLUMNS: dict[str, tuple[float, str | None]] = {
    "old_log_probs": (1e-3, None),
    "infer_log_probs": (1e-4, "old_log_probs"),
    "log_probs": (1e-4, "old_log_probs"),
    "ref_log_probs": (1e-3, "old_log_probs"),
    "advantages": (1e-3, None),
    "returns": (1e-3, None),
    "values": (1e-3, None),
    "rewards": (1e-3, None),
    "ratio": (1e-4, None),
    "entropy": (1e-2, None),
}


@dataclass
class StepStats:
    """Counts and averages of one step's samples."""

    step: int
    split: str
    samples: int = 0
    in_step: int = 0  # samples that the step had; the run folder may hold a part of them
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    finished: int = 0  # samples that say why they ended
    truncated: int = 0  # of these those that hit the length limit
    groups: int = 0  # of two or more scored samples
    flat_groups: int = 0  # of these those whose scores are all equal
    gap: float | None = None  # mean |log-prob of trainer - of sampler| over trained tokens
    ratio: float | None = None
    odd: dict[str, int] = field(default_factory=dict)  # numbers that are not finite, by column
    # Reward part -> (samples, smallest, largest, mean).
    parts: dict[str, tuple[int, float, float, float]] = field(default_factory=dict)
    score: float | None = None


@dataclass
class StepData:
    """What is written for one step: JSON values."""

    listing: dict[str, Any]
    pieces: list[dict[str, Any]]
    stats: StepStats


def significant(value: float | None, digits: int = 6) -> float | None:
    """Rounded to that many significant digits."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else value


def read_step(file: RolloutFile, problem: Callable[[str], None]) -> StepData:
    """Read a file of samples; what is wrong with single lines is told to `problem`."""
    records: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    pieces: list[dict[str, Any]] = []
    size = 0
    stats = StepStats(file.step, file.split)
    groups: dict[str, int] = {}
    prompts: list[str] = []
    vocabulary: dict[tuple[int, str], int] = {}
    gaps: list[np.ndarray] = []
    for number, record in json_lines(file.path):
        where = f"{file.path.name}, line {number}: "
        if isinstance(record, str):
            problem(where + record)
            continue
        records.append(record)
        tokens = _tokens(record.get("tokens"), lambda text, at=where: problem(at + text))
        sample = _details(record, len(tokens["texts"]) if tokens else None)
        prompt, response = _text(record, "prompt"), _text(record, "response")
        num_trained = None
        if tokens:
            words = zip(tokens["ids"], tokens["texts"], strict=True)
            sample["words"] = [vocabulary.setdefault(word, len(vocabulary)) for word in words]
            sample["mask"] = tokens["mask"]
            sample["columns"] = _columns(tokens, stats, gaps)
            num_trained = sum(tokens["mask"])
            weight = 25 * len(tokens["texts"]) + sum(map(len, tokens["texts"]))
        else:
            sample |= {"prompt": prompt, "response": response}
            sample = {key: value for key, value in sample.items() if value != ""}
            weight = len(prompt) + len(response)
        is_full = not pieces or len(pieces[-1]["samples"]) == PIECE_SAMPLES
        if is_full or size + weight > PIECE_SIZE:
            pieces.append({"samples": []})
            size = 0
        pieces[-1]["samples"].append(sample)
        size += weight
        name = record.get("group")
        group = groups.setdefault(prompt if name is None else str(name), len(groups))
        if group == len(prompts):
            prompts.append("")
        prompts[group] = prompts[group] or prompt[-4 * PREVIEW :]
        row: dict[str, Any] = {
            "group": group,
            "sample": _text(record, "sample")[: 2 * PREVIEW],
            "score": significant(as_number(record.get("score")), 4),
            "advantage": significant(as_number(record.get("advantage")), 4),
            "tokens": num_trained,
            "finish": _text(record, "finish_reason")[:PREVIEW] or None,
            "preview": " ".join(response[: 2 * PREVIEW].split())[:PREVIEW],
            "piece": len(pieces) - 1,
            "index": len(pieces[-1]["samples"]) - 1,
        }
        for key in ("dropped", "tag", "domain", "ranked"):
            row[key] = _text(record, key)[:PREVIEW] or None
        rows.append(row)
    _count(records, gaps, stats)
    listing = {
        "rows": rows,
        "groups": [{"id": key[:PREVIEW], "prompt": prompts[i]} for key, i in groups.items()],
        "vocabulary": [list(map(list, zip(*vocabulary, strict=True)))] if vocabulary else [],
    }
    return StepData(listing, pieces, stats)


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    return "" if value is None else str(value)


def _tokens(raw: Any, problem: Callable[[str], None]) -> dict[str, Any] | None:
    """`ids`, `texts`, `mask` and the known columns of a sample, if its lists fit together."""
    texts = raw.get("text") if isinstance(raw, dict) else None
    if not isinstance(texts, list) or not texts:
        if raw:
            problem("tokens without a list of texts; the sample is shown without tokens")
        return None
    length = len(texts)
    ids, mask = raw.get("ids"), raw.get("mask")
    if not isinstance(ids, list) or len(ids) != length:
        ids = [-1] * length
    if not isinstance(mask, list) or len(mask) != length:
        mask = [0] * length
    tokens: dict[str, Any] = {
        "texts": [str(text) for text in texts],
        "ids": [token_id if type(token_id) is int else as_whole(token_id) or 0 for token_id in ids],
        "mask": [1 if flag else 0 for flag in mask],
    }
    for name in COLUMNS:
        values = raw.get(name)
        if isinstance(values, list) and len(values) == length:
            tokens[name] = values
        elif values is not None:
            problem(f"tokens.{name} has no entry for each of {length} tokens; it is left out")
    return tokens


def _columns(
    tokens: dict[str, Any], stats: StepStats, gaps: list[np.ndarray]
) -> dict[str, dict[str, Any]]:
    """`values` of each column in multiples of its `unit`, relative to its `base` if it has one.

    None where there is no number. Counts those that are not finite, and adds the gap of log-probs.
    """
    columns: dict[str, dict[str, Any]] = {}
    numbers: dict[str, np.ndarray] = {}
    for name, (unit, base) in COLUMNS.items():
        if name not in tokens:
            continue
        given = tokens[name]
        try:
            column = np.array(given, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            given = [as_number(value) for value in given]
            column = np.array(given, dtype=np.float64)
        if all(value is None for value in given):
            continue
        numbers[name] = column
        if base in numbers:
            near = numbers[base]
            column = np.where(np.isfinite(near), column - near, column)
        finite = np.isfinite(column)
        largest = float(np.abs(column[finite]).max(initial=0.0))
        if 0 < largest < 100 * unit:  # small numbers keep four digits
            unit = 10.0 ** (math.floor(math.log10(max(largest, 1e-30))) - 3)
        values: list[Any] = [int(value) for value in np.round(np.where(finite, column, 0) / unit)]
        for i in np.flatnonzero(~finite).tolist():
            values[i] = None
            if given[i] is not None:
                values[i] = float(column[i])
                stats.odd[name] = stats.odd.get(name, 0) + 1
        columns[name] = {"unit": unit, "values": values}
        if base in numbers:
            columns[name]["base"] = base
    if "old_log_probs" in numbers and "infer_log_probs" in numbers:
        gap = numbers["old_log_probs"] - numbers["infer_log_probs"]
        gaps.append(gap[np.isfinite(gap) & (np.array(tokens["mask"]) == 1)])
    return columns


def _details(record: dict[str, Any], num_tokens: int | None) -> dict[str, Any]:
    """What a sample shows beside its tokens; what is empty is left out."""
    rewards = record.get("rewards")
    parts = rewards.items() if isinstance(rewards, dict) else ()
    # Turns: [is response, start, end, reward], in order and inside the sample, or none at all.
    turns: list[list[Any]] = []
    listed = record.get("turns") if num_tokens else None
    for turn in listed if isinstance(listed, list) else ():
        values = turn if isinstance(turn, dict) else {}
        start, end = as_whole(values.get("start")), as_whole(values.get("end"))
        previous = turns[-1][2] if turns else 0
        if start is None or end is None or not previous <= start <= end <= (num_tokens or 0):
            turns = []
            break
        reward = significant(as_number(values.get("reward")))
        turns.append([int(values.get("role") == "response"), start, end, reward])
    details: dict[str, Any] = {
        "truth": record.get("ground_truth"),
        "reward": significant(as_number(record.get("reward"))),
        "parts": {str(key): significant(as_number(value)) for key, value in parts},
        "version": record.get("policy_version"),
        "turns": turns,
        "dropped": _text(record, "dropped"),
    }
    return {key: value for key, value in details.items() if value not in (None, {}, [], "")}


def _count(records: list[dict[str, Any]], gaps: list[np.ndarray], stats: StepStats) -> None:
    gap = np.concatenate(gaps) if gaps else np.zeros(0)
    if gap.size:
        stats.gap = significant(float(np.abs(gap).mean()))
        stats.ratio = significant(float(np.exp(np.minimum(gap, 50)).mean()))
    scores: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for record in records:
        stats.in_step = max(stats.in_step, as_whole(record.get("samples_in_step")) or 0)
        if reason := _text(record, "dropped").partition("\n")[0][:PREVIEW]:
            stats.dropped[reason] = stats.dropped.get(reason, 0) + 1
        if finish := _text(record, "finish_reason"):
            stats.finished += 1
            stats.truncated += finish == "length"
        score = as_number(record.get("score"))
        if score is not None and math.isfinite(score) and not record.get("dropped"):
            scores.setdefault(str(record.get("group")), []).append(score)
        rewards = record.get("rewards")
        for name, value in rewards.items() if isinstance(rewards, dict) else ():
            number = as_number(value)
            if number is not None and math.isfinite(number):
                parts.setdefault(str(name), []).append(number)
    stats.samples = len(records)
    stats.in_step = max(stats.in_step, stats.samples)
    every = list(chain.from_iterable(scores.values()))
    stats.score = significant(sum(every) / len(every)) if every else None
    groups = [values for key, values in scores.items() if len(values) > 1 and key != "None"]
    stats.groups = len(groups)
    stats.flat_groups = sum(max(values) == min(values) for values in groups)
    stats.parts = {name: (len(v), min(v), max(v), sum(v) / len(v)) for name, v in parts.items()}
