"""The samples of a run on disk: RUN/rollouts/step-000012.jsonl and val-000012.jsonl.

One JSON object a line:

    {"step": 12, "split": "train", "sample": "17_0", "group": "17", "prompt": "...",
     "response": "...", "score": 1.0, "rewards": {"answer": 1.0}, "dropped": null, ...,
     "tokens": {"ids": [...], "text": [...], "mask": [...], "advantages": [...], ...},
     "turns": [{"role": "observation", "start": 0, "end": 7, "reward": null}, ...]}

Padding is left out, and entry i of every list under "tokens" speaks of token i (column t of a batch
speaks of token t+1). A number is null where the model generated nothing; one that is not finite is
"NaN", "Infinity" or "-Infinity", as in metrics.jsonl.
"""

from __future__ import annotations

import codecs
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

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
_GROUPS = ("prompt_id", "traj_group_id", "group_ids")
MAX_DROPPED = 64  # dropped samples of a step that are kept at least, for their reasons


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


class RolloutLog:
    """Writes the samples of each step to the run folder.

    Args:
        run_dir: the run folder; the files go to its `rollouts/`.
        tokenizer: for the text of each token; anything with `decode(ids)` will do.
        max_samples_per_step: how many samples of a step to keep, and as many dropped ones (but up
            to 64 of those). Whole groups are kept, spread evenly over the batch. None keeps all.
    """

    def __init__(
        self, run_dir: str | Path, tokenizer: Any, max_samples_per_step: int | None = 16
    ) -> None:
        if max_samples_per_step is not None and max_samples_per_step < 1:
            found = f"max_samples_per_step={max_samples_per_step}"
            raise ValueError(f"{found}: expected at least 1, or None for all")
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
        """Write the samples of one step, replacing what an earlier attempt left; the file.

        Of the batch only `input_ids` is needed. A disk that refuses is reported once and never
        stops training; the result is then None.
        """
        records: list[dict[str, Any]] = []
        if batch is not None and len(batch):
            records = self._records(step, split, batch)
        if self.max_samples_per_step is not None:
            dropped = dropped[: max(self.max_samples_per_step, MAX_DROPPED)]
        for index, sample in enumerate(dropped):
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
            records.append(record)
        path = self.folder / f"{'step' if split == 'train' else 'val'}-{step:06d}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text("".join(f"{_dumps(record)}\n" for record in records))
            os.replace(partial, path)  # a reader that follows the run never sees half a step
        except OSError as error:
            if not self._failed:
                _log.warning("samples are not written to %s: %s", self.folder, error)
            self._failed = True
            return None
        return path

    def _records(self, step: int, split: str, batch: DataProto) -> list[dict[str, Any]]:
        total = len(batch)
        group_key = next((key for key in _GROUPS if key in batch), None)
        groups = [str(row) for row in range(total)]
        if group_key is not None:
            groups = [str(_scalar(value)) for value in batch[group_key]]
        rows = chosen_rows(groups, self.max_samples_per_step)
        if len(rows) < total:
            batch = batch.select_idxs(rows)
        ids_BS = _numpy(batch["input_ids"])
        width = ids_BS.shape[1]
        attended_BS = np.ones_like(ids_BS, bool)
        if "attention_mask" in batch:
            attended_BS = _numpy(batch["attention_mask"]).astype(bool)
        masks = [_per_token(batch[key], width, 0).astype(bool) for key in _MASKS if key in batch]
        trained_BS = masks[0] if masks else attended_BS
        generated_BS = np.logical_or.reduce(masks) if masks else attended_BS
        columns: dict[str, np.ndarray] = {}
        numbers: dict[str, np.ndarray] = {}
        for key, name in TOKEN_COLUMNS.items():
            if key in batch and batch[key].ndim == 2:
                columns[name] = _significant(_per_token(batch[key], width, np.nan))
                numbers[name] = _json_numbers(columns[name], generated_BS)
        records = []
        for i, record in enumerate(_row_facts(batch)):
            here = attended_BS[i]
            ids = ids_BS[i][here].tolist()
            mask, generated = trained_BS[i][here], generated_BS[i][here]
            texts = self._texts(ids)
            start = int(generated.argmax()) if generated.any() else len(generated)
            step_scores, turns = record.pop("step_scores"), record.pop("turns")
            record |= {"step": step, "split": split, "samples_in_step": total}
            record |= {"prompt": "".join(texts[:start]), "response": "".join(texts[start:])}
            if "advantages" in columns and mask.any():
                mean = columns["advantages"][i][here][mask].mean()
                record["advantage"] = _plain_number(f"{mean:.6g}")
            record["tokens"] = {"ids": ids, "text": texts, "mask": mask.astype(int).tolist()}
            record["tokens"] |= {name: column[i][here].tolist() for name, column in numbers.items()}
            if turns := turns or _turns_of(generated, step_scores):
                record["turns"] = turns
            records.append(record)
        return records


def discard_rollouts_after(run_dir: str | Path, step: int) -> None:
    """Remove the sample files of later steps, which a run that resumes there will write again."""
    for path in (Path(run_dir) / "rollouts").glob("*-*.jsonl"):
        number = path.stem.rpartition("-")[2]
        if number.isdigit() and int(number) > step:
            path.unlink()


def chosen_rows(groups: Sequence[str], limit: int | None) -> list[int]:
    """Rows of whole groups, spread evenly over the batch, at most `limit` of them. Groups of more
    than 16 rows (and more than a quarter of `limit`) are cut to that.

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


def _row_facts(batch: DataProto) -> list[dict[str, Any]]:
    """What the columns with one entry per row say, under the record's names."""

    def column(*names: str) -> list[Any]:
        for name in names:
            if name in batch:
                values = batch[name]
                is_score = name in ("scores", "response_level_rewards")
                if is_score and values.ndim == 2:  # it lies on the last token
                    values = values.sum(-1)
                return [_scalar(value) for value in values]
        return [None] * len(batch)

    columns = {
        "sample": column("sample_uuid", "traj_id"),
        "group": column(*_GROUPS),
        "tag": column("tag", "tags"),
        "domain": column("domain"),
        "ground_truth": column("ground_truth", "answer"),
        "score": column("scores", "response_level_rewards"),
        "reward": column("response_level_rewards"),
        "rewards": column("reward_parts"),
        "dropped": column("drop_reason", "dropped"),
        "finish_reason": column("finish_reason"),
        "policy_version": column("policy_version"),
        "advantage": [None] * len(batch),
        "step_scores": column("step_scores"),
        "turns": column("turns"),
    }
    if "ranked" in batch:  # whether a pair is in the right order
        columns["ranked"] = column("ranked")
    facts = []
    for i, values in enumerate(zip(*columns.values(), strict=True)):
        row = dict(zip(columns, values, strict=True))
        row["sample"] = f"row-{i}" if row["sample"] is None else str(row["sample"])
        row["group"] = None if row["group"] is None else str(row["group"])
        if row["ground_truth"] is not None and not isinstance(row["ground_truth"], str):
            row["ground_truth"] = _dumps(row["ground_truth"])
        row["score"], row["reward"] = _plain_number(row["score"]), _plain_number(row["reward"])
        parts = row["rewards"] or {}
        row["rewards"] = {str(key): _plain_number(value) for key, value in parts.items()}
        row["dropped"] = row["dropped"] or None
        facts.append(row)
    return facts


def _turns_of(generated: np.ndarray, step_scores: Any) -> list[dict[str, Any]]:
    """Runs of equal mask as turns; none for one response without rewards per turn."""
    runs = [(bool(key), len(list(run))) for key, run in groupby(generated.tolist())]
    rewards = []
    if step_scores is not None:
        rewards = [_plain_number(value) for value in np.atleast_1d(step_scores).tolist()]
    num_responses = sum(key for key, _ in runs)
    if num_responses < 2 and not rewards:
        return []
    has_rewards = len(rewards) == num_responses
    turns, start, response = [], 0, 0
    for is_response, length in runs:
        reward = rewards[response] if is_response and has_rewards else None
        response += is_response
        role = "response" if is_response else "observation"
        turns.append({"role": role, "start": start, "end": start + length, "reward": reward})
        start += length
    return turns


def _numpy(column: torch.Tensor) -> np.ndarray:
    column = column.detach()
    return (column.float() if column.is_floating_point() else column).cpu().numpy()


def _per_token(values: torch.Tensor, width: int, missing: float) -> np.ndarray:
    """A column of width S as it is; one of width S-1, about the next token, moved right by one."""
    column = _numpy(values)
    if column.ndim != 2 or column.shape[1] not in (width, width - 1):
        expected = f"expected {width} or {width - 1} columns"
        raise ValueError(f"a token column has shape {column.shape}; {expected}")
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


def _json_numbers(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Numbers, the names of those that are not finite, and None where nothing is known."""
    numbers = values.astype(object)
    numbers[~known] = None
    for cell in np.argwhere(known & ~np.isfinite(values)):
        numbers[tuple(cell)] = _plain_number(values[tuple(cell)])
    return numbers


def _plain_number(value: Any) -> Any:
    """A float that JSON can hold: the name of one that is not finite, None for what is missing."""
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


def _dumps(record: Any) -> str:
    def plain(value: Any) -> Any:
        is_array = isinstance(value, np.ndarray | np.generic | torch.Tensor)
        return value.tolist() if is_array else str(value)

    # The escapes of ensure_ascii keep lone surrogates and line separators out of the file.
    return json.dumps(record, default=plain, separators=(",", ":"))


class TokenTexts:
    """What each token of a sequence adds to its decoded text.

    By hand, because `tokenizer.decode` of a sequence does not say which token wrote what, and
    decoding token by token loses characters whose bytes are spread over several tokens. Every id is
    turned into its bytes once; a sequence is a walk over those bytes. A character of several tokens
    belongs to the last of them, and the ones before add "". Special tokens are visible; bytes that
    form no character show as the replacement glyph.

        TokenTexts(tokenizer)([15, 380, 102])   # ["The", " caf", "é"]
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a transformers tokenizer, or anything with `decode(ids)`."""
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        # The only thing that a decoder says about itself is its serialised form.
        kind = decoder.__getstate__().decode() if decoder is not None else ""
        self._byte_of: dict[str, int] = {}
        if '"ByteLevel"' in kind:
            # Such tokenizers write printable bytes as themselves, and move the others past 255.
            printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
            others = [byte for byte in range(256) if byte not in printable]
            self._byte_of = {chr(byte): byte for byte in printable}
            self._byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
        self._has_fallback = '"ByteFallback"' in kind
        self._marks_spaces = '"Metaspace"' in kind or "▁" in kind
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {int(token_id): str(token) for token_id, token in added.items()}
        self._pieces: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}  # None: depends on the neighbours

    def __call__(self, ids: Iterable[int]) -> list[str]:
        """One text per id."""
        texts: list[str] = []
        pending = False  # whether the decoder holds the first bytes of a character
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in ids:
            if token_id not in self._pieces:
                piece = self._pieces[token_id] = self._bytes(token_id)
                try:
                    self._texts[token_id] = piece.decode()
                except UnicodeDecodeError:
                    self._texts[token_id] = None
            text = self._texts[token_id]
            if text is None or pending:
                text = decoder.decode(self._pieces[token_id])
                pending = bool(decoder.getstate()[0])
            texts.append(text)
        if pending:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "replace")
        # The token as the vocabulary writes it; None for rows that pad the embedding.
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", lambda token_id: "")
        try:
            name = convert(token_id)
        except (IndexError, KeyError, OverflowError, ValueError):
            name = None
        if name is None:
            return f"<{token_id}?>".encode()
        if self._byte_of and name and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        fallback = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
        if self._has_fallback and fallback:
            return bytes([int(fallback[1], 16)])
        if self._marks_spaces:
            return name.replace("▁", " ").encode("utf-8", "replace")
        return str(self._tokenizer.decode([token_id])).encode("utf-8", "replace")
