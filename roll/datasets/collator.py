"""Examples to padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from roll.datasets.encoding import LABEL_PAD

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

Side = Literal["left", "right"]


@dataclass(frozen=True)
class DataCollatorWithPaddingForDPO:
    """N preference pairs to one batch of 2N rows, right-padded to the longest of them.

    Rows are interleaved. Two pairs whose prompts have 2 tokens, with answers of 3 and 1 tokens, and
    of 1 and 2:

        row  side          input_ids            attention_mask   prompt_id_lens
        0    chosen 0      p p a a a            1 1 1 1 1        2
        1    rejected 0    p p a _ _            1 1 1 0 0        2
        2    chosen 1      q q b _ _            1 1 1 0 0        2
        3    rejected 1    q q b b _            1 1 1 1 0        2

    Returns `input_ids`, `attention_mask`, `position_ids` (2N, S) and `prompt_id_lens` (2N,), all
    int64. A pair is a mapping with `chosen_ids`, `reject_ids`, `chosen_prompt_len` and
    `reject_prompt_len`; ROLL's `prompt_ids_lens`, one number for both sides, is taken as well.

    `max_length` bounds the rows; with `pad_to_max` every batch has that width, as in ROLL, which
    helps only where a compiled model should see one shape. `pad_to_multiple_of` rounds the width
    up, but not beyond `max_length`.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None = None
    return_tensors: Literal["pt"] = "pt"
    pad_to_max: bool = False
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        _check_options(self, self.pad_to_max)

    def __call__(self, batch: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not batch:
            raise ValueError("a batch needs at least one pair")
        rows: list[Any] = []
        prompt_lens: list[int] = []
        for index, pair in enumerate(batch):
            for name, side in (("chosen", "chosen"), ("rejected", "reject")):
                ids, key = pair[f"{side}_ids"], f"{side}_prompt_len"
                prompt_len = int(pair[key] if key in pair else pair["prompt_ids_lens"])
                problem = ""
                if not 0 < prompt_len < len(ids):
                    what = "prompt" if prompt_len <= 0 else "answer"
                    problem = (
                        f"no {what} tokens ({len(ids)} tokens, of which {prompt_len} are the "
                        "prompt). Drop such pairs before collating, as encode_preferences does"
                    )
                elif self.max_length is not None and len(ids) > self.max_length:
                    problem = (
                        f"{len(ids)} tokens, more than max_length={self.max_length}. Drop or "
                        "truncate such pairs before collating"
                    )
                if problem:
                    raise ValueError(f"pair {index} of the batch: the {name} side has {problem}")
                rows.append(ids)
                prompt_lens.append(prompt_len)
        width = _width(self, [len(ids) for ids in rows], self.pad_to_max)
        attention_mask = pad_rows([np.ones(len(ids)) for ids in rows], width, 0, "right")
        return {
            "input_ids": pad_rows(rows, width, pad_token_id(self.tokenizer), "right"),
            "attention_mask": attention_mask,
            "position_ids": positions(attention_mask),
            "prompt_id_lens": torch.tensor(prompt_lens, dtype=torch.int64),
        }


@dataclass(frozen=True)
class DataCollatorWithPaddingForPaddedKeys:
    """Examples with token columns to one batch, left-padded: generation starts at one column.

    Columns in `padded_keys` become (N, S) int64 tensors: ids filled up with the pad token, masks
    with 0, labels with -100; one number a row becomes (N,). `attention_mask` is made where it is
    not given, `position_ids` always. All other columns become object arrays of length N, tensors
    are concatenated (see `collate_fn_to_dict_list`).

    `padding` is True or "longest" for the longest row of the batch, "max_length" for always
    `max_length`.
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | Literal["longest", "max_length"] = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: Literal["pt"] = "pt"
    padded_keys: Sequence[str] = ("input_ids", "attention_mask", "labels")
    padding_side: Side = "left"

    def __post_init__(self) -> None:
        if self.padding not in (True, "longest", "max_length"):
            raise ValueError(
                f"padding={self.padding!r} is not known; use True, 'longest' or 'max_length'"
            )
        _check_options(self, self.padding == "max_length")

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not features:
            raise ValueError("a batch needs at least one example")
        lengths = [len(feature["input_ids"]) for feature in features]
        if self.max_length is not None and max(lengths) > self.max_length:
            raise ValueError(
                f"example {lengths.index(max(lengths))} of the batch has {max(lengths)} tokens, "
                f"more than max_length={self.max_length}. Drop or truncate such examples before "
                "collating"
            )
        width = _width(self, lengths, self.padding == "max_length")
        fillers = {"input_ids": pad_token_id(self.tokenizer), "labels": LABEL_PAD}
        batch: dict[str, Any] = {}
        for key in self.padded_keys:
            if key not in features[0]:
                continue
            rows = [feature[key] for feature in features]
            if all(np.ndim(row) == 0 for row in rows):  # such as the label of a classifier
                batch[key] = torch.as_tensor([int(row) for row in rows])
                continue
            for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                if len(row) != length:
                    raise ValueError(
                        f"example {index} of the batch: {key} has {len(row)} values and input_ids "
                        f"has {length} tokens"
                    )
            batch[key] = pad_rows(rows, width, fillers.get(key, 0), self.padding_side)
        if "attention_mask" not in batch:
            ones = [np.ones(length) for length in lengths]
            batch["attention_mask"] = pad_rows(ones, width, 0, self.padding_side)
        batch["position_ids"] = positions(batch["attention_mask"])
        others = [
            {key: value for key, value in feature.items() if key not in self.padded_keys}
            for feature in features
        ]
        return {**batch, **collate_fn_to_dict_list(others)}


def collate_fn_to_dict_list(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Examples to columns: tensors are concatenated, other values become an object array.

    >>> collate_fn_to_dict_list([{"tag": "a", "ids": [1, 2]}, {"tag": "b", "ids": [3, 4]}])["ids"]
    array([list([1, 2]), list([3, 4])], dtype=object)
    """
    columns: dict[str, Any] = {key: [] for key in (data_list[0] if data_list else ())}
    for index, example in enumerate(data_list):
        for key in columns:
            if key not in example:
                raise ValueError(
                    f"example {index} of the batch has no {key!r}, which example 0 has"
                )
            columns[key].append(example[key])
        extra = example.keys() - columns.keys()
        if extra:
            raise ValueError(
                f"example {index} of the batch has {', '.join(sorted(extra))}, which example 0 "
                "has not"
            )
    for key, values in columns.items():
        if all(isinstance(value, Tensor) for value in values):
            columns[key] = torch.cat(values, dim=0)
        else:
            columns[key] = np.empty(len(values), dtype=object)
            columns[key][:] = values  # unlike np.array(values), keeps lists and arrays whole
    return columns


def pad_rows(rows: Sequence[Any], width: int, value: int, side: Side) -> Tensor:
    """Rows of different lengths as one (len(rows), width) int64 tensor, filled up on `side`."""
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        start = 0 if side == "right" else width - len(row)
        target[start : start + len(row)] = np.asarray(row)
    return torch.from_numpy(padded)


def placed(
    rows: Sequence[Sequence[float]],
    first: int | np.ndarray,
    width: int,
    fill: float,
    dtype: DTypeLike,
) -> np.ndarray:
    """(len(rows), width), filled with `fill`, and each row's values from its column `first` on.

    Example: placed([[5, 6], [7]], np.array([1, 0]), 3, 0, int) is [[0, 5, 6], [7, 0, 0]].
    """
    lengths = np.array([len(row) for row in rows])
    flat = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=int(lengths.sum()))
    row_of = np.repeat(np.arange(len(rows)), lengths)
    offset = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    table = np.full((len(rows), width), fill, dtype=dtype)
    table[row_of, offset + np.repeat(np.broadcast_to(first, len(rows)), lengths)] = flat
    return table


def positions(attention_mask: Tensor) -> Tensor:
    """(B, S) the number of attended tokens before each column; 0 in padding on the left."""
    return (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to fill rows up with: any will do, because padding is never attended."""
    candidates = (tokenizer.pad_token_id, getattr(tokenizer, "eos_token_id", None), 0)
    return next(candidate for candidate in candidates if isinstance(candidate, int))


_Collator = DataCollatorWithPaddingForDPO | DataCollatorWithPaddingForPaddedKeys


def _width(collator: _Collator, lengths: Sequence[int], pad_to_max: bool) -> int:
    width, limit = max(lengths), collator.max_length
    if limit is not None and pad_to_max:
        return limit
    if collator.pad_to_multiple_of is not None:
        width = -(-width // collator.pad_to_multiple_of) * collator.pad_to_multiple_of
    return width if limit is None else min(width, limit)


def _check_options(collator: _Collator, pad_to_max: bool) -> None:
    if collator.return_tensors != "pt":
        raise ValueError(
            f"return_tensors={collator.return_tensors!r} is not known; batches are torch tensors, "
            "'pt'"
        )
    if pad_to_max and collator.max_length is None:
        raise ValueError("padding every batch to the maximum needs max_length")
    for name in ("max_length", "pad_to_multiple_of"):
        value = getattr(collator, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
