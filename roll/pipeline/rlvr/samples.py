"""Samples of prompts, and the batch that they become.

A sample keeps the token ids that the engine was given and returned, so nothing is ever tokenised again. Rows of the
batch are right padded to the longest of them:

    prompt [7, 8], response [5, 2], S = 5    input_ids [7, 8, 5, 2, pad]    response_mask [0, 0, 1, 1, 0]
                                             infer_logprobs (S-1) [0, a, b, 0]: column t speaks of token t+1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from roll.datasets.collator import pad_rows, positions
from roll.datasets.prompts import Prompt
from roll.distributed.scheduler.protocol import DataProto
from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams
from roll.exceptions import DataError
from roll.utils.rollout_log import DroppedSample

# Columns that the pipeline makes; a data file must not have others of these names.
OWN_COLUMNS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "prompt_mask", "response_mask", "prompts", "responses"}
    | {"infer_logprobs", "policy_versions", "policy_version", "group_id", "prompt_id", "sample_uuid", "finish_reason"}
    | {"scores", "response_level_rewards", "reward_parts", "drop_reason", "token_level_rewards", "token_level_scores"}
    | {"old_log_probs", "ref_log_probs", "values", "entropy", "advantages", "raw_advantages", "returns"}
    | {"final_response_mask", "origin_response_mask", "difficulty_mask", "sample_weights", "row_number"}
    | {"train_infer_is_weight", "train_infer_filter_mask"}
)


@dataclass(frozen=True)
class Sample:
    """One response to a prompt.

    Attributes:
        group: what the samples of one prompt have in common.
        number: which of them this is.
        versions: of the weights that made each token.
    """

    prompt: Prompt
    group: str
    number: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...]

    @property
    def oldest_version(self) -> int:
        return min(self.versions, default=0)

    def dropped(self, reason: str, tokenizer: Any, scored: ScoredSample | None = None) -> DroppedSample:
        """What the log of samples says about one that is not trained on."""
        return DroppedSample(
            prompt=self.prompt.text,
            response=tokenizer.decode(list(self.token_ids)),
            reason=reason,
            tag=self.prompt.tag,
            domain=self.prompt.domain,
            token_ids=(*self.prompt.ids, *self.token_ids),
            group=self.group,
            score=None if scored is None else scored.score,
            rewards={} if scored is None else scored.parts,
            finish_reason=self.finish_reason,
        )


@dataclass(frozen=True)
class ScoredSample:
    """A sample and what its reward says."""

    sample: Sample
    score: float
    reward: float
    """What is learned from: the score, unless the reward worker makes a difference between the two."""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class Group:
    """The samples of one prompt that could be scored."""

    prompt: Prompt
    name: str
    samples: list[ScoredSample]

    @property
    def scores(self) -> list[float]:
        return [scored.score for scored in self.samples]


def make_requests(
    prompts: Sequence[Prompt], names: Sequence[str], sampling: SamplingParams, num_samples: int
) -> list[GenerationRequest]:
    """One request for each prompt, named after its group: the random numbers of a sample follow from its name."""
    return [
        GenerationRequest(name, prompt.ids, sampling, num_samples=num_samples)
        for prompt, name in zip(prompts, names, strict=True)
    ]


def sample_of(prompt: Prompt, output: GenerationOutput) -> Sample:
    return Sample(
        prompt=prompt,
        group=output.request_id,
        number=output.sample_index,
        token_ids=tuple(output.token_ids),
        log_probs=tuple(output.log_probs),
        finish_reason=output.finish_reason,
        versions=(output.policy_version,) * len(output.token_ids),
    )


def make_batch(samples: Sequence[Sample], pad_token_id: int) -> DataProto:
    """The rows of these samples, in order, with every column of their data file."""
    prompts = [sample.prompt.ids for sample in samples]
    responses = [sample.token_ids for sample in samples]
    rows = [(*prompt, *response) for prompt, response in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    columns = torch.arange(width)
    attention_mask = (columns < lengths).long()
    # Column t speaks of token t+1, so the first token of a response stands one column before it.
    shifted = [
        np.concatenate([np.zeros(len(prompt) - 1, dtype=np.float32), np.asarray(sample.log_probs, dtype=np.float32)])
        for prompt, sample in zip(prompts, samples, strict=True)
    ]
    infer_logprobs = np.zeros((len(rows), width - 1), dtype=np.float32)
    versions = np.full((len(rows), width - 1), -1, dtype=np.int64)
    for row, (values, prompt, sample) in enumerate(zip(shifted, prompts, samples, strict=True)):
        infer_logprobs[row, : len(values)] = values
        versions[row, len(prompt) - 1 : len(values)] = sample.versions
    tensors = {
        "input_ids": pad_rows(rows, width, pad_token_id, "right"),
        "attention_mask": attention_mask,
        "position_ids": positions(attention_mask),
        "prompt_mask": columns < prompt_lengths,
        "response_mask": ((columns >= prompt_lengths) & (columns < lengths)).long(),
        "prompts": pad_rows(prompts, int(prompt_lengths.max()), pad_token_id, "left"),
        "responses": pad_rows(responses, max(max(map(len, responses)), 1), pad_token_id, "right"),
        "infer_logprobs": torch.from_numpy(infer_logprobs),
        "policy_versions": torch.from_numpy(versions),
    }
    return DataProto.from_dict(tensors, non_tensors=_row_columns(samples))


def _row_columns(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """What is known of each row besides its tokens: the columns of its data file, and where it comes from."""
    names = dict.fromkeys(name for sample in samples for name in sample.prompt.row)
    columns: dict[str, list[Any]] = {name: [sample.prompt.row.get(name) for sample in samples] for name in names}
    columns |= {
        "prompt": [sample.prompt.question for sample in samples],
        "ground_truth": [sample.prompt.ground_truth for sample in samples],
        "tag": [sample.prompt.tag for sample in samples],
        "domain": [sample.prompt.domain for sample in samples],
        "prompt_id": [sample.group for sample in samples],
        "group_id": [sample.group for sample in samples],
        "sample_uuid": [f"{sample.group}/{sample.number}" for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
        "policy_version": [sample.oldest_version for sample in samples],
    }
    return {name: _objects(values) for name, values in columns.items()}


def _objects(values: Iterable[Any]) -> np.ndarray:
    listed = list(values)
    column = np.empty(len(listed), dtype=object)
    column[:] = listed  # keeps lists whole, unlike np.array
    return column


def scored_batch(groups: Sequence[Group], pad_token_id: int) -> DataProto:
    """The rows of all groups, group after group, with `scores`, `response_level_rewards` (B,) and `reward_parts`."""
    scored = [entry for group in groups for entry in group.samples]
    batch = make_batch([entry.sample for entry in scored], pad_token_id)
    batch["scores"] = torch.tensor([entry.score for entry in scored], dtype=torch.float32)
    batch["response_level_rewards"] = torch.tensor([entry.reward for entry in scored], dtype=torch.float32)
    batch["reward_parts"] = _objects(entry.parts for entry in scored)
    return batch


def check_columns(columns: Iterable[str], name: str) -> None:
    """DataError if a data file has columns of names that the pipeline gives to its own."""
    clash = sorted(OWN_COLUMNS & set(columns))
    if clash:
        raise DataError(f"{name}: the columns {', '.join(clash)} have names that the pipeline uses itself; rename them")
