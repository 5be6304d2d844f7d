"""From prompts and generated tokens to the rows that everything after generation works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from roll.distributed.scheduler.protocol import DataProto


def postprocess_generate(
    prompts: DataProto,
    output: Tensor,
    num_return_sequences: int,
    sequence_length: int,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    output_logprobs: Tensor | None = None,
    pad_to_seq_len: bool = True,
) -> DataProto:
    """Right-padded rows with their masks, `num_return_sequences` rows for each prompt, in the prompts' order.

    Args:
        prompts: `input_ids`, `attention_mask` (P, prompt width), left padded; `prompt_id` (P,) if there is one.
        output: token ids (P * num_return_sequences, prompt width + new tokens): each prompt, then its answer.
        eos_token_id: the ids that end an answer. The first of them belongs to the answer, what follows does not.
        output_logprobs: (rows, new tokens), the engine's log-probabilities of the new tokens.
        pad_to_seq_len: rows are `sequence_length` wide, else as wide as the longest needs. Longer rows are cut off.

    Returns `input_ids`, `attention_mask`, `position_ids`, `prompt_mask`, `response_mask` (rows, S), `prompts` (left
    padded), `responses`, `prompt_id` and `infer_logprobs` (rows, S-1), column t for token t+1, if given.

    Example: prompt [pad, 7, 8], answer [5, eos, pad], S = 6 -> input_ids [7, 8, 5, eos, pad, pad], response_mask
    [0, 0, 1, 1, 0, 0].
    """
    width = prompts["input_ids"].shape[1]
    rows = len(prompts) * num_return_sequences
    if len(output) != rows or output.shape[1] < width:
        raise ValueError(
            f"expected {rows} rows ({len(prompts)} prompts x {num_return_sequences}) of at least {width} tokens, got "
            f"shape {tuple(output.shape)}"
        )
    attended = prompts["attention_mask"].bool().repeat_interleave(num_return_sequences, dim=0)
    prompt_lens = attended.sum(1, keepdim=True)
    responses = output[:, width:]
    ends = torch.isin(responses, torch.as_tensor(eos_token_id, device=output.device))
    response_lens = (ends.cumsum(1) - ends.long() == 0).sum(1, keepdim=True)
    total_lens = (prompt_lens + response_lens).clamp(max=sequence_length)
    full_width = sequence_length if pad_to_seq_len else int(total_lens.max())

    # Column j of a row comes from column j + (left padding of its prompt).
    columns = torch.arange(full_width, device=output.device).expand(rows, -1)
    source = columns + (width - prompt_lens)
    is_token = columns < total_lens
    taken = output.gather(1, source.clamp(max=output.shape[1] - 1))
    input_ids = torch.where(is_token, taken, pad_token_id)
    prompt_mask = is_token & (columns < prompt_lens)
    response_mask = is_token & (columns >= prompt_lens)
    attention_mask = is_token.long()
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp_min(0),
        "prompt_mask": prompt_mask,
        "response_mask": response_mask.long(),
        "prompts": prompts["input_ids"].repeat_interleave(num_return_sequences, dim=0),
        "responses": torch.where(columns_of(responses) < response_lens, responses, pad_token_id),
    }
    if "prompt_id" in prompts:
        tensors["prompt_id"] = prompts["prompt_id"].repeat_interleave(num_return_sequences, dim=0)
    if output_logprobs is not None:
        # Token j of the row is new token j - prompt length, and column j - 1 of the log-probabilities speaks of it.
        new_token = (columns - prompt_lens).clamp(0, output_logprobs.shape[1] - 1)
        log_probs = torch.where(response_mask, output_logprobs.gather(1, new_token), 0.0)
        tensors["infer_logprobs"] = log_probs[:, 1:]
    return type(prompts).from_dict(tensors, meta_info=prompts.meta_info)


def columns_of(tensor: Tensor) -> Tensor:
    """Column numbers, in the shape of a (rows, columns) tensor."""
    return torch.arange(tensor.shape[1], device=tensor.device).expand_as(tensor)
