"""A few validation pairs, with the numbers of every token, for the run's report."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.preference_loss import PreferenceLoss, completion_mask, pair_accuracy
from roll.datasets.collator import DataCollatorWithPaddingForDPO
from roll.datasets.preference import PreferenceDataset
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.rollout_log import RolloutLog

NUM_PAIRS = 16


class PairSamples:
    """Pairs spread evenly over the validation data, the same ones each time, so that steps can be compared.

    Validation scores all pairs anyway; the log-probs of these are kept instead of only their sums, at no further cost:

        tokens = samples.empty()
        score_pairs(..., keep=partial(samples.keep, tokens))
        samples.write(step, result, tokens, reference_tokens)
    """

    def __init__(
        self, dataset: PreferenceDataset, collator: DataCollatorWithPaddingForDPO, log: RolloutLog
    ) -> None:
        count = min(NUM_PAIRS, len(dataset))
        self.pairs = [i * len(dataset) // count for i in range(count)]
        self.log = log
        batch = DataProto.from_single_dict(collator([dataset[i] for i in self.pairs]))
        self.mask_RT = completion_mask(batch["attention_mask"], batch["prompt_id_lens"])
        batch["response_mask"] = self.mask_RT.long()
        sides = [(pair, side) for pair in self.pairs for side in ("chosen", "rejected")]
        batch["prompt_id"] = np.array([f"pair {pair}" for pair, _ in sides], dtype=object)
        batch["sample_uuid"] = np.array([f"{pair} {side}" for pair, side in sides], dtype=object)
        batch["tag"] = np.array([side for _, side in sides], dtype=object)
        self.batch = batch

    def empty(self) -> Tensor:
        """(2P, S-1) zeros, for the log-probs of these pairs: rows 2i and 2i+1 are of `pairs[i]`."""
        return torch.zeros(self.mask_RT.shape)

    def keep(self, tokens_RT: Tensor, pairs: np.ndarray, log_probs_RT: Tensor) -> None:
        """Copy the rows of those `pairs` of the data set that are samples; padding on the right may differ."""
        width = min(tokens_RT.shape[1], log_probs_RT.shape[1])
        for i, pair in enumerate(pairs.tolist()):
            if pair in self.pairs:
                row = 2 * self.pairs.index(pair)
                tokens_RT[row : row + 2, :width] = log_probs_RT[2 * i : 2 * i + 2, :width]

    def write(
        self, step: int, result: PreferenceLoss, tokens_RT: Tensor, reference_RT: Tensor | None
    ) -> None:
        """Write the pairs as the samples of a validation.

        Args:
            result: of all pairs of the validation data, in order.
            tokens_RT, reference_RT: (2P, S-1) log-probs of the sampled pairs under policy and reference; None where
                there is no reference.
        """
        rewards_P2 = torch.stack([result.chosen_rewards_P, result.rejected_rewards_P], dim=1)[
            self.pairs
        ]
        accuracy_P = pair_accuracy(rewards_P2[:, 0] - rewards_P2[:, 1])
        ranked = [
            {1.0: "right", 0.5: "tie"}.get(accuracy, "wrong") for accuracy in accuracy_P.tolist()
        ]
        self.batch["response_level_rewards"] = rewards_P2.flatten()
        self.batch["ranked"] = np.repeat(np.array(ranked, dtype=object), 2)
        self.batch["old_log_probs"] = tokens_RT
        if (
            reference_RT is not None and reference_RT.shape == tokens_RT.shape
        ):  # stored ones may be of other samples
            self.batch["ref_log_probs"] = reference_RT
        self.log.write(step, self.batch, split="val")
