"""A reward model: a sequence classifier that scores whole answers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_worker import RewardWorker
from roll.pipeline.rlvr.rewards.pool_reward_worker import reward_columns, text_rows
from roll.utils.scoring.score import to_score


class RewardModelWorker(RewardWorker):
    """Scores with the model of `model_args` and the strategy of `strategy_args`.

    A reward model with the policy's vocabulary sees the policy's own tokens. One with another vocabulary sees the
    conversation as text, through its own chat template.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        self.policy_tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)
        self.shares_vocabulary = (
            self.policy_tokenizer.get_vocab() == self.strategy.tokenizer.get_vocab()
        )

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def compute_rewards(self, data: DataProto) -> DataProto:
        """The columns of `PoolRewardWorker.compute_rewards`; a score that is not finite drops its row."""
        result = super().compute_rewards(
            data if self.shares_vocabulary else self._in_own_tokens(data)
        )
        scores = [to_score(value) for value in result["response_level_rewards"].tolist()]
        columns = reward_columns(data, scores, self.worker_config.response_length_penalty_coef)
        columns.meta_info = result.meta_info
        return columns

    def _in_own_tokens(self, data: DataProto) -> DataProto:
        tokenizer = self.strategy.tokenizer
        rows = []
        for row in text_rows(data, self.policy_tokenizer):
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            if tokenizer.chat_template is None:
                ids = tokenizer.encode(
                    "".join([*(str(m["content"]) for m in messages), row["response"]])
                )
            else:
                answered = [*messages, {"role": "assistant", "content": row["response"]}]
                ids = tokenizer.apply_chat_template(answered, tokenize=True, return_dict=False)
            rows.append(torch.tensor(ids))
        ids_BS = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        attended_BS = pad_sequence([torch.ones_like(ids) for ids in rows], batch_first=True)
        tensors = {
            "input_ids": ids_BS,
            "attention_mask": attended_BS,
            "position_ids": attended_BS.cumsum(-1) - 1,
        }
        return DataProto.from_dict({name: tensor.clamp(min=0) for name, tensor in tensors.items()})
