"""Generation by the batch, as ROLL's `InferWorker.generate` has it: requests, and rows of outputs.

Pipelines work with requests and trajectories instead (`roll.rollout`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.engines.request import GenerationOutput, GenerationRequest, SamplingParams

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
    response_lens: Tensor | None = None,
) -> DataProto:
    """Right-padded rows with their masks, `num_return_sequences` for each prompt, in their order.

    Args:
        prompts: `input_ids`, `attention_mask` (P, prompt width), left padded; `prompt_id` (P,) if
            there is one.
        output: token ids (P * num_return_sequences, prompt width + new tokens): each prompt, then
            its response.
        eos_token_id: the ids that end a response. The first of them belongs to it, what follows
            does not.
        output_logprobs: (rows, new tokens), the engine's log-probabilities of the new tokens.
        pad_to_seq_len: rows are `sequence_length` wide, else as wide as the longest needs. Longer
            rows are cut off.
        response_lens: (rows,), how many new tokens each response has, where an engine says so;
            `eos_token_id` is not looked for then.

    Returns `input_ids`, `attention_mask`, `position_ids`, `prompt_mask`, `response_mask` (rows, S),
    `prompts` (left padded), `responses`, `prompt_id` and `infer_logprobs` (rows, S-1), column t for
    token t+1, if given.

    Example: prompt [pad, 7, 8], response [5, eos, pad], S = 6 -> input_ids
    [7, 8, 5, eos, pad, pad], response_mask [0, 0, 1, 1, 0, 0].
    """
    width = prompts["input_ids"].shape[1]
    rows = len(prompts) * num_return_sequences
    if len(output) != rows or output.shape[1] < width:
        raise ValueError(
            f"expected {rows} rows ({len(prompts)} prompts x {num_return_sequences}) of at least "
            f"{width} tokens, got shape {tuple(output.shape)}"
        )
    attended = prompts["attention_mask"].bool().repeat_interleave(num_return_sequences, dim=0)
    prompt_lens = attended.sum(1, keepdim=True)
    responses = output[:, width:]
    if response_lens is None:
        ends = torch.isin(responses, torch.as_tensor(eos_token_id, device=output.device))
        response_lens = (ends.cumsum(1) - ends.long() == 0).sum(1)
    lens_R1 = response_lens[:, None]
    total_lens = (prompt_lens + lens_R1).clamp(max=sequence_length)
    full_width = sequence_length if pad_to_seq_len else int(total_lens.max())

    new_columns = torch.arange(responses.shape[1], device=output.device)
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
        "responses": torch.where(new_columns < lens_R1, responses, pad_token_id),
    }
    if "prompt_id" in prompts:
        tensors["prompt_id"] = prompts["prompt_id"].repeat_interleave(num_return_sequences, dim=0)
    if output_logprobs is not None:
        # Token j of the row is new token j - prompt length, and column j - 1 of the
        # log-probabilities speaks of it.
        new_token = (columns - prompt_lens).clamp(0, output_logprobs.shape[1] - 1)
        log_probs = torch.where(response_mask, output_logprobs.gather(1, new_token), 0.0)
        tensors["infer_logprobs"] = log_probs[:, 1:]
    return type(prompts).from_dict(tensors, meta_info=prompts.meta_info)


def prompt_requests(
    prompts: DataProto, generation_config: Mapping[str, Any], *, seed: int
) -> list[GenerationRequest]:
    """A request for each left-padded prompt, with `num_return_sequences` samples.

    The random streams of a prompt's samples are named by its `prompt_id` where there is that
    column, else by its tokens, and by how often they occurred before: they depend neither on the
    order of the rows nor on the rank.
    """
    num_samples = generation_config.get("num_return_sequences") or 1
    attended = prompts["attention_mask"].bool()
    seen: Counter[Any] = Counter()
    requests = []
    for row, (ids, mask) in enumerate(zip(prompts["input_ids"], attended, strict=True)):
        prompt_ids = tuple(ids[mask].tolist())
        if "prompt_id" in prompts:
            name = prompts["prompt_id"][row].item()
        else:
            name = hashlib.blake2b(repr(prompt_ids).encode(), digest_size=12).hexdigest()
        keys = tuple(f"{name}/{seen[name]}/{sample}" for sample in range(num_samples))
        seen[name] += 1
        sampling = SamplingParams.from_config(
            generation_config, seed=seed, prompt_length=len(prompt_ids)
        )
        requests.append(
            GenerationRequest(str(row), prompt_ids, sampling, num_samples, sample_keys=keys)
        )
    return requests


def rows_of_outputs(
    prompts: DataProto,
    outputs: Sequence[GenerationOutput],
    *,
    sequence_length: int,
    pad_token_id: int,
    pad_to_seq_len: bool = True,
) -> DataProto:
    """The rows of `postprocess_generate`, one for each output, equally many for each prompt.

    Besides its columns: `infer_logprobs` (rows, S-1), and for each row `finish_reason`,
    `policy_version` and `drop_reason` (None, or why there is no response: the row then has no
    response token).
    """
    group = len(outputs) // len(prompts)
    answers = [output.token_ids for output in outputs]
    most = max([1, *(len(answer) for answer in answers)])
    tokens = torch.tensor([answer + [pad_token_id] * (most - len(answer)) for answer in answers])
    log_probs = torch.tensor(
        [output.log_probs + [0.0] * (most - len(output.log_probs)) for output in outputs]
    )
    rows = postprocess_generate(
        prompts,
        torch.cat([prompts["input_ids"].cpu().repeat_interleave(group, dim=0), tokens], dim=1),
        num_return_sequences=group,
        sequence_length=sequence_length,
        eos_token_id=(),
        pad_token_id=pad_token_id,
        output_logprobs=log_probs,
        pad_to_seq_len=pad_to_seq_len,
        response_lens=torch.tensor([len(answer) for answer in answers]),
    )
    facts = {
        "finish_reason": [output.finish_reason for output in outputs],
        "policy_version": [output.policy_version for output in outputs],
        "drop_reason": [output.error for output in outputs],
    }
    return type(rows)(rows.batch, facts, rows.meta_info)
