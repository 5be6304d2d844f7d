"""Token sequences as padded tensors: masks, lengths, prompts and responses."""

import torch
import torch.nn.functional as F
from torch import Tensor


def get_eos_mask(
    response_id: Tensor, eos_token: int = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first `eos_token` of each row, 0 after it. Example, eos 1: [5, 1, 7] -> [1, 1, 0]."""
    is_eos = response_id == eos_token
    return (is_eos.cumsum(-1) - is_eos.long() == 0).to(dtype)


def get_pad_mask(
    response_id: Tensor, pad_token: int = 0, eos_token: int = 1, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 on every token that is not padding. If the two tokens are the same, the first one of a row is its end, not
    padding. ValueError for a row that starts with padding and then has tokens: the rows must be padded on the right.

    Example, pad 0: [5, 6, 0] -> [1, 1, 0]; with eos 0 as well: [5, 0, 0] -> [1, 1, 0].
    """
    is_pad = response_id == pad_token
    mask = ~is_pad
    if eos_token == pad_token:
        mask |= is_pad & (is_pad.cumsum(-1) == 1)
    left_padded = ~mask[:, 0] & mask.any(-1)
    if left_padded.any():
        rows = left_padded.nonzero().flatten().tolist()
        raise ValueError(
            f"response_id starts with the padding token {pad_token} in rows {rows}: pad on the right"
        )
    return mask.to(dtype)


def pad_to_length(tensor: Tensor, length: int, pad_value: float, dim: int = -1) -> Tensor:
    """Cut `tensor` to `length` entries along `dim`, or fill it up on the right with `pad_value`; the dtype stays."""
    missing = length - tensor.size(dim)
    if missing <= 0:
        return tensor.narrow(dim, 0, length)
    after_dim = tensor.ndim - 1 - dim % tensor.ndim
    return F.pad(tensor, [0, 0] * after_dim + [0, missing], value=pad_value)


def adjust_sequence_length(
    sequence: Tensor, target_length: int, origin_seq_len: int, pad_value: float = 0
) -> Tensor:
    """Bring the sequence axis of a tensor from `origin_seq_len` to `target_length` entries.

    The axis is the last one whose size is `origin_seq_len`, or `origin_seq_len - 1` for next-token columns, which then
    become `target_length - 1`. The first axis counts rows and is never taken. A tensor without such an axis comes back
    as it is.
    """
    for dim in range(sequence.ndim - 1, 0, -1):
        for shift in (0, 1):
            if sequence.size(dim) == origin_seq_len - shift:
                return pad_to_length(sequence, target_length - shift, pad_value, dim)
    return sequence


def concatenate_input_and_output(
    input_ids: Tensor, output_ids: Tensor, num_return_sequences: int
) -> Tensor:
    """Put each prompt before its responses: (P, I) and (P * n, O) to (P * n, I + O), responses of a prompt adjacent."""
    return torch.cat((input_ids.repeat_interleave(num_return_sequences, dim=0), output_ids), dim=1)


def gather_unpadded_input_ids(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The attended tokens of each row as a list."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def separate_prompt_response(
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, pad_id: int
) -> tuple[Tensor, Tensor]:
    """The prompt and the response of each row: `input_ids` with everything else replaced by `pad_id`, twice."""
    attended, response = attention_mask.bool(), response_mask.bool()
    return (
        torch.where(attended & ~response, input_ids, pad_id),
        torch.where(attended & response, input_ids, pad_id),
    )
