"""Samples of prompts, and the batch that they become.

A sample keeps the token ids that the engine was given and returned, so nothing is ever tokenised again. Rows of the
batch are right padded to the longest of them:

    prompt [7, 8], response [5, 2], S = 5    input_ids [7, 8, 5, 2, pad]    response_mask [0, 0, 1, 1, 0]
                                             infer_logprobs (S-1) [0, a, b, 0]: column t speaks of token t+1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from roll.datasets.collator import placed, positions
from roll.datasets.encoding import Prompt
from roll.distributed.scheduler.protocol import DataProto, object_column
from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams
from roll.utils.rollout_log import DroppedSample


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

    def dropped(
        self, reason: str, tokenizer: Any, scored: ScoredSample | None = None
    ) -> DroppedSample:
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
    prompt_lens = np.array([len(ids) for ids in prompts])
    response_lens = np.array([len(ids) for ids in responses])
    lengths = prompt_lens + response_lens
    width, prompt_width = int(lengths.max()), int(prompt_lens.max())
    rows = [(*prompt, *response) for prompt, response in zip(prompts, responses, strict=True)]
    columns = np.arange(width)
    attention_mask = torch.from_numpy((columns < lengths[:, None]).astype(np.int64))
    prompt_mask = columns < prompt_lens[:, None]
    response_mask = ~prompt_mask & (columns < lengths[:, None])
    # Column t speaks of token t+1, so the first token of a response stands one column before it.
    log_probs = placed(
        [sample.log_probs for sample in samples], prompt_lens - 1, width - 1, 0.0, np.float32
    )
    versions = placed(
        [sample.versions for sample in samples], prompt_lens - 1, width - 1, -1, np.int64
    )
    tensors = {
        "input_ids": torch.from_numpy(placed(rows, 0, width, pad_token_id, np.int64)),
        "attention_mask": attention_mask,
        "position_ids": positions(attention_mask),
        "prompt_mask": torch.from_numpy(prompt_mask),
        "response_mask": torch.from_numpy(response_mask.astype(np.int64)),
        "prompts": torch.from_numpy(
            placed(prompts, prompt_width - prompt_lens, prompt_width, pad_token_id, np.int64)
        ),
        "responses": torch.from_numpy(
            placed(responses, 0, max(int(response_lens.max()), 1), pad_token_id, np.int64)
        ),
        "infer_logprobs": torch.from_numpy(log_probs),
        "policy_versions": torch.from_numpy(versions),
    }
    return DataProto.from_dict(tensors, non_tensors=_row_columns(samples))


def _row_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What is known of each row besides its tokens: the columns of its data file, and where it comes from."""
    names = dict.fromkeys(name for sample in samples for name in sample.prompt.row)
    columns: dict[str, list[Any]] = {
        name: [sample.prompt.row.get(name) for sample in samples] for name in names
    }
    return columns | {
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


def scored_batch(groups: Sequence[Group], pad_token_id: int) -> DataProto:
    """The rows of all groups, group after group, with `scores`, `response_level_rewards` (B,) and `reward_parts`."""
    scored = [entry for group in groups for entry in group.samples]
    batch = make_batch([entry.sample for entry in scored], pad_token_id)
    batch["scores"] = torch.tensor([entry.score for entry in scored], dtype=torch.float32)
    batch["response_level_rewards"] = torch.tensor(
        [entry.reward for entry in scored], dtype=torch.float32
    )
    batch["reward_parts"] = object_column("reward_parts", [entry.parts for entry in scored])
    return batch
