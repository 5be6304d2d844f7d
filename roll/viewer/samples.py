"""The samples of one step, turned into what the page loads: a list of all of them, and their tokens in small pieces.

The list holds what a row of the sample browser shows, and the step's vocabulary (token id and text, once each). Pieces
hold up to 32 samples, so that opening one costs a few dozen kilobytes. `StepStats` is what the health rules look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np

from roll.viewer.packing import Packer, pack_json, significant
from roll.viewer.run_data import RolloutFile, as_number, as_whole, json_lines

PIECE_SAMPLES, PIECE_TOKENS, PIECE_CHARACTERS = 32, 40_000, 1_000_000
PREVIEW = 80

# Column -> (the rounding step, the column that it lies near and is stored as the difference to). The trainer's and the
# sampler's log-probs differ by little, and that little is what people look at; so it has a finer step.
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
    in_step: int = 0
    """How many samples the step had; the run folder may hold a part of them."""

    dropped: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    """Samples that say why they ended, and of these those that hit the length limit."""

    truncated: int = 0
    groups: int = 0
    """Groups of two or more scored samples, and of these those whose scores are all equal."""

    flat_groups: int = 0
    gap: float | None = None
    """Mean of |log-prob of the trainer - log-prob of the sampler| over trained tokens."""

    ratio: float | None = None
    odd: dict[str, int] = field(default_factory=dict)
    """Token numbers that are NaN or infinite, by column."""

    parts: dict[str, tuple[int, float, float, float]] = field(default_factory=dict)
    """Reward part -> (samples, smallest, largest, mean)."""

    score: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class PackedStep:
    """What is written for one step."""

    listing: str
    pieces: list[str]
    stats: StepStats


@dataclass
class _Tokens:
    ids: list[int]
    texts: list[str]
    mask: list[int]
    columns: dict[str, list[Any]]


def pack_step(file: RolloutFile, problem: Callable[[str], None]) -> PackedStep:
    """Read a file of samples; what is wrong with single lines is told to `problem`."""
    records = []
    for number, record in json_lines(file.path):
        if isinstance(record, str):
            problem(f"{file.path.name}, line {number}: {record}")
        else:
            records.append(
                (
                    record,
                    _tokens_of(
                        record,
                        lambda text, n=number: problem(f"{file.path.name}, line {n}: {text}"),
                    ),
                )
            )
    stats = _stats(file, [record for record, _ in records])
    groups: dict[str, int] = {}
    vocabulary: dict[tuple[int, str], int] = {}
    rows: list[list[Any]] = []
    pieces: list[str] = []
    gaps: list[np.ndarray] = []
    for piece in _pieces(records):
        for index, (record, tokens) in enumerate(piece):
            name = record.get("group")
            key = str(name) if name is not None else _text(record, "prompt")
            rows.append(
                [groups.setdefault(key, len(groups)), *_row(record, tokens), len(pieces), index]
            )
        pieces.append(_pack_piece(piece, vocabulary, stats, gaps))
    if gaps:
        gap = np.concatenate(gaps)
        stats.gap, stats.ratio = (
            significant(float(np.abs(gap).mean())),
            significant(float(np.exp(np.minimum(gap, 50)).mean())),
        )
    prompts = dict.fromkeys(range(len(groups)), "")
    for row, (record, _) in zip(rows, records, strict=True):
        prompts[row[0]] = prompts[row[0]] or _text(record, "prompt")[-4 * PREVIEW :]
    listing = {
        "fields": [
            "group",
            "sample",
            "score",
            "advantage",
            "tokens",
            "finish",
            "dropped",
            "tag",
            "domain",
            "ranked",
            "preview",
            "piece",
            "index",
        ],
        "rows": list(map(list, zip(*rows, strict=True))),
        "groups": [{"id": key[:PREVIEW], "prompt": prompts[i]} for key, i in groups.items()],
        "vocabulary": [list(map(list, zip(*vocabulary, strict=True)))] if vocabulary else [],
        "stats": stats.as_json(),
    }
    return PackedStep(pack_json(listing), pieces, stats)


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else "" if value is None else str(value)


def _tokens_of(record: dict[str, Any], problem: Callable[[str], None]) -> _Tokens | None:
    """The tokens of a record if its lists fit together."""
    raw = record.get("tokens")
    if raw is None:
        return None
    texts = raw.get("text") if isinstance(raw, dict) else None
    if not isinstance(texts, list) or not texts:
        if raw:
            problem("tokens without a list of texts; the sample is shown without tokens")
        return None
    if set(map(type, texts)) != {str}:
        texts = [str(text) for text in texts]
    length = len(texts)
    ids, mask = raw.get("ids"), raw.get("mask")
    if not isinstance(ids, list) or len(ids) != length:
        ids = [-1] * length
    if not isinstance(mask, list) or len(mask) != length:
        mask = [0] * length
    columns = {}
    for name in COLUMNS:
        values = raw.get(name)
        if values is None:
            continue
        if isinstance(values, list) and len(values) == length:
            columns[name] = values
        else:
            problem(
                f"tokens.{name} does not have one entry for each of {length} tokens; it is left out"
            )
    if set(map(type, ids)) != {int}:
        ids = [as_whole(i) or 0 for i in ids]
    return _Tokens(ids, texts, [1 if m else 0 for m in mask], columns)


def _pieces(
    records: list[tuple[dict[str, Any], _Tokens | None]],
) -> Iterator[list[tuple[dict[str, Any], _Tokens | None]]]:
    piece: list[tuple[dict[str, Any], _Tokens | None]] = []
    num_tokens = num_characters = 0
    for record, tokens in records:
        size = len(tokens.texts) if tokens else 0
        characters = (
            sum(map(len, tokens.texts))
            if tokens
            else len(_text(record, "prompt")) + len(_text(record, "response"))
        )
        full = len(piece) == PIECE_SAMPLES or num_tokens + size > PIECE_TOKENS
        if piece and (full or num_characters + characters > PIECE_CHARACTERS):
            yield piece
            piece, num_tokens, num_characters = [], 0, 0
        piece.append((record, tokens))
        num_tokens, num_characters = num_tokens + size, num_characters + characters
    if piece:
        yield piece


def _row(record: dict[str, Any], tokens: _Tokens | None) -> list[Any]:
    preview = " ".join(_text(record, "response")[: 2 * PREVIEW].split())[:PREVIEW]
    trained = sum(tokens.mask) if tokens else None
    return [
        _text(record, "sample")[: 2 * PREVIEW],
        significant(as_number(record.get("score")), 4),
        significant(as_number(record.get("advantage")), 4),
        trained,
        *(
            _text(record, key)[:PREVIEW] or None
            for key in ("finish_reason", "dropped", "tag", "domain", "ranked")
        ),
        preview,
    ]


def _pack_piece(
    piece: list[tuple[dict[str, Any], _Tokens | None]],
    vocabulary: dict[tuple[int, str], int],
    stats: StepStats,
    gaps: list[np.ndarray],
) -> str:
    """Samples back to back: one column of token numbers, and the numbers of tokens that have any."""
    packer = Packer()
    with_tokens = [tokens for _, tokens in piece if tokens]
    words = [
        vocabulary.setdefault(pair, len(vocabulary))
        for tokens in with_tokens
        for pair in zip(tokens.ids, tokens.texts, strict=True)
    ]
    packer.add_whole("words", words)
    names = [name for name in COLUMNS if any(name in tokens.columns for tokens in with_tokens)]
    columns, missing = {}, {}
    for name in names:
        flat = list(
            chain.from_iterable(t.columns.get(name) or [None] * len(t.texts) for t in with_tokens)
        )
        columns[name], missing[name] = _floats(flat)
    known = ~np.logical_and.reduce(list(missing.values())) if names else np.zeros(len(words), bool)
    mask = np.fromiter(chain.from_iterable(t.mask for t in with_tokens), bool, len(words))
    differences = {}
    for name in names:
        odd = ~missing[name] & ~np.isfinite(columns[name])
        if odd.any():
            stats.odd[name] = stats.odd.get(name, 0) + int(odd.sum())
        finest, base = COLUMNS[name]
        values = columns[name][known]
        if base in names and base != name:
            near = columns[base][known]
            differences[name] = base
            values = np.where(np.isfinite(near), values - near, values)
        packer.add_numbers(name, values, finest)
    if "old_log_probs" in names and "infer_log_probs" in names:
        gap = (columns["old_log_probs"] - columns["infer_log_probs"])[mask]
        gaps.append(gap[np.isfinite(gap)])
    bounds = [0, *accumulate(len(tokens.texts) for tokens in with_tokens)]
    position = 0
    samples = []
    for record, tokens in piece:
        details = _details(record, tokens)
        if tokens:
            part = slice(bounds[position], bounds[position + 1])
            details |= {
                "length": len(tokens.texts),
                "mask": _runs(mask[part]),
                "known": _runs(known[part]),
            }
            position += 1
        samples.append(details)
    nulls = {name: np.flatnonzero(missing[name][known]).tolist() for name in names}
    nulls = {name: where for name, where in nulls.items() if where}
    return packer.pack(samples=samples, nulls=nulls, differences=differences)


def _floats(values: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers with NaN for what is missing, and where something is missing."""
    try:
        numbers = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = [as_number(value) for value in values]
        numbers = np.array(values, dtype=np.float64)
    missing = np.zeros(len(values), bool)
    where = [i for i in np.flatnonzero(np.isnan(numbers)).tolist() if values[i] is None]
    missing[where] = True
    return numbers, missing


def _runs(flags: np.ndarray) -> list[int]:
    """Lengths of runs, the first of them of False: [0, 0, 1, 1, 1] -> [2, 3]; [1] -> [0, 1]."""
    runs = [len(list(run)) for _, run in groupby(flags.tolist())]
    return [0, *runs] if len(flags) and flags[0] else runs


def _details(record: dict[str, Any], tokens: _Tokens | None) -> dict[str, Any]:
    """What a sample shows beside its tokens; what is empty is left out."""
    rewards = record.get("rewards")
    details: dict[str, Any] = {
        "truth": record.get("ground_truth"),
        "reward": significant(as_number(record.get("reward"))),
        "parts": {str(k): significant(as_number(v)) for k, v in rewards.items()}
        if isinstance(rewards, dict)
        else {},
        "version": record.get("policy_version"),
        "turns": _turns(record.get("turns"), len(tokens.texts)) if tokens else [],
        "dropped": _text(record, "dropped"),
    }
    if tokens is None:
        details |= {"prompt": _text(record, "prompt"), "response": _text(record, "response")}
    return {key: value for key, value in details.items() if value not in (None, {}, [], "")}


def _turns(turns: Any, length: int) -> list[list[Any]]:
    """[is response, start, end, reward] of turns that lie inside the sample, in order; [] if they make no sense."""
    result: list[list[Any]] = []
    for turn in turns if isinstance(turns, list) else ():
        if not isinstance(turn, dict):
            return []
        start, end = as_whole(turn.get("start")), as_whole(turn.get("end"))
        previous = result[-1][2] if result else 0
        if start is None or end is None or not previous <= start <= end <= length:
            return []
        result.append(
            [
                int(turn.get("role") == "response"),
                start,
                end,
                significant(as_number(turn.get("reward"))),
            ]
        )
    return result


def _stats(file: RolloutFile, records: list[dict[str, Any]]) -> StepStats:
    stats = StepStats(file.step, file.split, samples=len(records))
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
        if score is not None and np.isfinite(score) and not record.get("dropped"):
            scores.setdefault(str(record.get("group")), []).append(score)
        rewards = record.get("rewards")
        for name, value in rewards.items() if isinstance(rewards, dict) else ():
            number = as_number(value)
            if number is not None and np.isfinite(number):
                parts.setdefault(str(name), []).append(number)
    stats.in_step = max(stats.in_step, stats.samples)
    every = list(chain.from_iterable(scores.values()))
    stats.score = significant(sum(every) / len(every)) if every else None
    groups = [values for key, values in scores.items() if len(values) > 1 and key != "None"]
    stats.groups, stats.flat_groups = (
        len(groups),
        sum(max(values) == min(values) for values in groups),
    )
    stats.parts = {name: (len(v), min(v), max(v), sum(v) / len(v)) for name, v in parts.items()}
    return stats
