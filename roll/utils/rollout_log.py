"""The samples of a run on disk: RUN/rollouts/step-000012.jsonl, one JSON object a line, and val-000012.jsonl.

    {"step": 12, "split": "train", "sample": "17_0", "group": "17", "prompt": "...", "response": "...", "score": 1.0,
     "rewards": {"answer": 1.0}, "dropped": null, ...,
     "tokens": {"ids": [...], "text": [...], "mask": [...], "advantages": [...], "old_log_probs": [...], ...},
     "turns": [{"role": "observation", "start": 0, "end": 7, "reward": null}, ...]}

Padding is left out, and entry i of every list under "tokens" speaks of token i (the columns of a batch speak of token
t+1 in column t). A number is null where the model generated nothing; a number that is not finite is written as "NaN",
"Infinity" or "-Infinity", as in metrics.jsonl.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.utils.token_texts import TokenTexts

if TYPE_CHECKING:
    from roll.distributed.scheduler.protocol import DataProto

_log = logging.getLogger(__name__)

# Column of the batch -> name in the record. A column that is not there is left out.
TOKEN_COLUMNS = {
    "infer_logprobs": "infer_log_probs",
    "old_log_probs": "old_log_probs",
    "log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "reference_log_probs": "ref_log_probs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "entropy": "entropy",
    "ratio": "ratio",
    "token_level_rewards": "rewards",
}
_MASKS = ("final_response_mask", "response_mask", "origin_response_mask")


@dataclass(frozen=True)
class DroppedSample:
    """A sample that was generated and not trained on."""

    prompt: str
    response: str
    reason: str
    tag: str | None = None
    domain: str | None = None
    token_ids: Sequence[int] = ()
    group: str | None = None
    score: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str | None = None


MAX_DROPPED = 64  # dropped samples of a step that are kept at least: each has a reason that someone may look for


class RolloutLog:
    """Writes the samples of each step to the run folder.

    Args:
        run_dir: the run folder; the files go to its `rollouts/`.
        tokenizer: for the text of each token; anything with `decode(ids)` will do.
        max_samples_per_step: how many samples of a step to keep, and as many dropped ones (but up to 64 of those).
            Whole groups are kept, spread evenly over the batch. None keeps all.
    """

    def __init__(
        self, run_dir: str | Path, tokenizer: Any, max_samples_per_step: int | None = 16
    ) -> None:
        if max_samples_per_step is not None and max_samples_per_step < 1:
            raise ValueError(
                f"max_samples_per_step={max_samples_per_step}: expected at least 1, or None for all"
            )
        self.folder = Path(run_dir) / "rollouts"
        self.max_samples_per_step = max_samples_per_step
        self._texts = TokenTexts(tokenizer)
        self._failed = False

    def write(
        self,
        step: int,
        batch: DataProto | None,
        split: str = "train",
        dropped: Sequence[DroppedSample] = (),
    ) -> Path | None:
        """Write the samples of one step, replacing what an earlier attempt of it left. Returns the file.

        Reads the columns that are there (see `TOKEN_COLUMNS`, `_row_facts`); only `input_ids` is needed. A disk that
        refuses is reported once and never stops training; the result is then None.
        """
        lines = self._sample_lines(step, batch, split) if batch is not None and len(batch) else []
        kept = (
            dropped
            if self.max_samples_per_step is None
            else dropped[: max(self.max_samples_per_step, MAX_DROPPED)]
        )
        lines += [
            _dumps(self._dropped_record(step, split, i, sample)) for i, sample in enumerate(kept)
        ]
        path = self.folder / f"{'step' if split == 'train' else 'val'}-{step:06d}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(partial, path)  # a reader that follows the run never sees half a step
        except OSError as error:
            if not self._failed:
                _log.warning("samples are not written to %s: %s", self.folder, error)
            self._failed = True
            return None
        return path

    def _sample_lines(self, step: int, batch: DataProto, split: str) -> list[str]:
        total = len(batch)
        rows = chosen_rows(_groups_of(batch), self.max_samples_per_step)
        batch = batch if len(rows) == total else batch.select_idxs(rows)
        tensors = {key: _numpy(batch[key]) for key in (*TOKEN_COLUMNS, *_MASKS) if key in batch}
        ids = _numpy(batch["input_ids"])
        attended = (
            _numpy(batch["attention_mask"]).astype(bool)
            if "attention_mask" in batch
            else np.ones_like(ids, bool)
        )
        width = ids.shape[1]
        masks = [
            _per_token(tensors[key], width, 0).astype(bool) for key in _MASKS if key in tensors
        ]
        trained = masks[0] if masks else attended
        generated = np.logical_or.reduce(masks) if masks else attended
        columns = {
            name: _significant(_per_token(tensors[key], width, np.nan))
            for key, name in TOKEN_COLUMNS.items()
            if key in tensors and tensors[key].ndim == 2
        }
        numbers = {name: _numbers(column, generated) for name, column in columns.items()}
        lines = []
        for i, facts in enumerate(_row_facts(batch)):
            here = attended[i]
            row_ids, mask, known = ids[i][here].tolist(), trained[i][here], generated[i][here]
            texts = self._texts(row_ids)
            start = int(known.argmax()) if known.any() else len(known)
            turns = facts.pop("turns") or _turns_of(known, facts["step_scores"])
            del facts["step_scores"]
            facts |= {"step": step, "split": split, "samples_in_step": total}
            facts |= {"prompt": "".join(texts[:start]), "response": "".join(texts[start:])}
            if "advantages" in columns and mask.any():
                facts["advantage"] = _plain_number(
                    f"{columns['advantages'][i][here][mask].mean():.6g}"
                )
            facts["tokens"] = {"ids": row_ids, "text": texts, "mask": mask.astype(int).tolist()}
            facts["tokens"] |= {name: column[i][here].tolist() for name, column in numbers.items()}
            if turns:
                facts["turns"] = turns
            lines.append(_dumps(facts))
        return lines

    def _dropped_record(
        self, step: int, split: str, index: int, sample: DroppedSample
    ) -> dict[str, Any]:
        record: dict[str, Any] = {
            "step": step,
            "split": split,
            "sample": f"dropped-{step}-{index}",
            "group": sample.group,
            "tag": sample.tag,
            "domain": sample.domain,
            "prompt": sample.prompt,
            "response": sample.response,
            "score": _plain_number(sample.score),
            "rewards": {key: _plain_number(value) for key, value in sample.rewards.items()},
            "dropped": sample.reason,
            "finish_reason": sample.finish_reason,
        }
        if len(sample.token_ids):
            ids = [int(token_id) for token_id in sample.token_ids]
            record["tokens"] = {"ids": ids, "text": self._texts(ids), "mask": [0] * len(ids)}
        return record


def discard_rollouts_after(run_dir: str | Path, step: int) -> None:
    """Remove the sample files of steps later than `step`: what a run that resumes from there will write again."""
    for path in (Path(run_dir) / "rollouts").glob("*-*.jsonl"):
        number = path.stem.rpartition("-")[2]
        if number.isdigit() and int(number) > step:
            path.unlink()


def chosen_rows(groups: Sequence[str], limit: int | None) -> list[int]:
    """Rows of whole groups, spread evenly over the batch, at most `limit` of them. Groups of more than 16 rows (and
    more than a quarter of `limit`) are cut to that, so that one group does not take all places.

    Example: groups a a b b c c d d with limit 4 gives the rows of a and c.
    """
    if limit is None or len(groups) <= limit:
        return list(range(len(groups)))
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    parts = [rows[: max(16, limit // 4)] for rows in members.values()]
    num_groups = max(1, limit * len(parts) // sum(map(len, parts)))
    spread = [parts[i * len(parts) // num_groups] for i in range(min(num_groups, len(parts)))]
    return sorted([row for rows in spread for row in rows][:limit])


def _groups_of(batch: DataProto) -> list[str]:
    for key in ("prompt_id", "traj_group_id", "group_ids"):
        if key in batch:
            return [str(_scalar(value)) for value in batch[key]]
    return [str(row) for row in range(len(batch))]


def _row_facts(batch: DataProto) -> list[dict[str, Any]]:
    """What the columns with one entry per row say, under the record's names."""
    num_rows = len(batch)

    def column(*names: str) -> list[Any]:
        for name in names:
            if name in batch:
                return [_scalar(value) for value in batch[name]]
        return [None] * num_rows

    def score(name: str) -> list[float | None]:
        if name not in batch:
            return [None] * num_rows
        values = batch[name]
        if (
            isinstance(values, torch.Tensor) and values.ndim == 2
        ):  # the score of a row lies on its last token
            values = values.sum(-1)
        return [_plain_number(_scalar(value)) for value in values]

    scores, rewards = score("scores"), score("response_level_rewards")
    groups = column("prompt_id", "traj_group_id", "group_ids")
    samples = column("sample_uuid", "traj_id")
    tags, domains, truths = (
        column("tag", "tags"),
        column("domain"),
        column("ground_truth", "answer"),
    )
    reasons, versions = column("finish_reason"), column("policy_version")
    parts, drops = column("reward_parts"), column("drop_reason", "dropped")
    step_scores, turns, ranked = column("step_scores"), column("turns"), column("ranked")
    return [
        {
            "sample": str(samples[i]) if samples[i] is not None else f"row-{i}",
            "group": None if groups[i] is None else str(groups[i]),
            "tag": tags[i],
            "domain": domains[i],
            "ground_truth": truths[i]
            if truths[i] is None or isinstance(truths[i], str)
            else _dumps(truths[i]),
            "score": scores[i] if "scores" in batch else rewards[i],
            "reward": rewards[i],
            "rewards": {str(key): _plain_number(value) for key, value in (parts[i] or {}).items()},
            "dropped": drops[i] or None,
            "finish_reason": reasons[i],
            "policy_version": versions[i],
            "advantage": None,
            "step_scores": step_scores[i],
            "turns": turns[i],
            **(
                {"ranked": ranked[i]} if "ranked" in batch else {}
            ),  # whether a pair is in the right order
        }
        for i in range(num_rows)
    ]


def _turns_of(generated: np.ndarray, step_scores: Any) -> list[dict[str, Any]]:
    """Runs of equal mask as turns. A row with one response and no rewards per turn is no trajectory: no turns."""
    runs = [(bool(key), len(list(run))) for key, run in groupby(generated.tolist())]
    rewards = (
        []
        if step_scores is None
        else [_plain_number(value) for value in np.atleast_1d(step_scores).tolist()]
    )
    num_responses = sum(key for key, _ in runs)
    if num_responses < 2 and not rewards:
        return []
    turns, start, response = [], 0, 0
    for is_response, length in runs:
        reward = None
        if is_response and len(rewards) == num_responses:
            reward = rewards[response]
        response += is_response
        role = "response" if is_response else "observation"
        turns.append({"role": role, "start": start, "end": start + length, "reward": reward})
        start += length
    return turns


def _numpy(column: torch.Tensor) -> np.ndarray:
    column = column.detach()
    return (column.float() if column.is_floating_point() else column).cpu().numpy()


def _per_token(column: np.ndarray, width: int, missing: float) -> np.ndarray:
    """A column of width S as it is; one of width S-1, which speaks of the next token, moved right by one."""
    if column.ndim != 2 or column.shape[1] not in (width, width - 1):
        raise ValueError(
            f"a token column has shape {column.shape}; expected {width} or {width - 1} columns"
        )
    if column.shape[1] == width:
        return column
    first = np.full((len(column), 1), missing, dtype=column.dtype if missing == 0 else np.float32)
    return np.concatenate([first, column], axis=1)


def _significant(values: np.ndarray, digits: int = 6) -> np.ndarray:
    """Rounded to 6 significant digits, which float32 holds: short to write and nothing lost."""
    values = values.astype(np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(values))))
        rounded = np.round(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)


def _numbers(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Values as JSON holds them: numbers, names of those that are not finite, None where nothing is known."""
    numbers = values.astype(object)
    numbers[~known] = None
    for cell in np.argwhere(known & ~np.isfinite(values)):
        numbers[tuple(cell)] = _plain_number(values[tuple(cell)])
    return numbers


def _plain_number(value: Any) -> Any:
    """A float that JSON can hold: the names of those that are not finite, None for what is missing."""
    if value is None:
        return None
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _scalar(value: Any) -> Any:
    """A Python object of what a batch's column holds in one row."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    return value


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else str(value)


# The escapes of ensure_ascii keep lone surrogates and line separators out of the file.
_ENCODER = json.JSONEncoder(default=_jsonable, separators=(",", ":"))


def _dumps(record: Any) -> str:
    return _ENCODER.encode(record)
