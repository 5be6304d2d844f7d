import pytest
import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.utils.generation import postprocess_generate

PAD, EOS = 0, 2


def prompts() -> DataProto:
    ids = torch.tensor([[PAD, 7, 8], [4, 5, 6]])
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
            "prompt_id": torch.tensor([10, 11]),
        }
    )


def test_rows_are_shifted_left_and_end_at_the_first_eos():
    output = torch.tensor([[PAD, 7, 8, 5, EOS, PAD, PAD], [4, 5, 6, 9, 9, 9, 9]])
    rows = postprocess_generate(prompts(), output, 1, 8, EOS, PAD).batch
    assert rows["input_ids"].tolist() == [[7, 8, 5, EOS, 0, 0, 0, 0], [4, 5, 6, 9, 9, 9, 9, 0]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1] * 7 + [0]]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5, 6, 6]]
    assert rows["prompt_mask"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    assert rows["response_mask"].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert rows["responses"].tolist() == [[5, EOS, PAD, PAD], [9, 9, 9, 9]]
    assert rows["prompts"].tolist() == [[PAD, 7, 8], [4, 5, 6]]


def test_an_eos_that_is_also_the_pad_token_stays_in_the_answer():
    # ROLL loses it: its mask treats every pad token alike.
    output = torch.tensor([[PAD, 7, 8, 5, PAD, PAD], [4, 5, 6, PAD, PAD, PAD]])
    rows = postprocess_generate(prompts(), output, 1, 6, PAD, PAD).batch
    assert rows["response_mask"].tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0]]


def test_samples_of_a_prompt_are_neighbours_and_log_probs_follow_their_tokens():
    output = torch.tensor(
        [[PAD, 7, 8, 5, EOS], [PAD, 7, 8, EOS, 1], [4, 5, 6, 9, 9], [4, 5, 6, 3, EOS]]
    )
    log_probs = -torch.arange(1.0, 9.0).view(4, 2)
    rows = postprocess_generate(
        prompts(), output, 2, 99, [EOS, 99], PAD, log_probs, pad_to_seq_len=False
    ).batch
    assert rows["prompt_id"].tolist() == [10, 10, 11, 11]
    assert rows["input_ids"].tolist() == [
        [7, 8, 5, EOS, 0],
        [7, 8, EOS, 0, 0],
        [4, 5, 6, 9, 9],
        [4, 5, 6, 3, EOS],
    ]
    # Column t speaks of token t+1.
    expected = [[0, -1, -2, 0], [0, -3, 0, 0], [0, 0, -5, -6], [0, 0, -7, -8]]
    assert rows["infer_logprobs"].tolist() == expected


def test_rows_longer_than_the_sequence_length_are_cut_off():
    rows = postprocess_generate(
        prompts(), torch.tensor([[PAD, 7, 8, 5, 5], [4, 5, 6, 9, 9]]), 1, 4, EOS, PAD
    ).batch
    assert rows["input_ids"].tolist() == [[7, 8, 5, 5], [4, 5, 6, 9]]


def test_a_wrong_number_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"expected 4 rows \(2 prompts x 2\)"):
        postprocess_generate(prompts(), torch.zeros(2, 5, dtype=torch.long), 2, 8, EOS, PAD)
