"""Samples on disk: which entry speaks of which token, what is kept, and texts of tokens."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tiny_tokenizer import bpe_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from roll.distributed.scheduler.protocol import DataProto
from roll.utils.rollout_log import (
    DroppedSample,
    RolloutLog,
    TokenTexts,
    chosen_rows,
    discard_rollouts_after,
)


def records(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_ids(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def one_row(**columns: torch.Tensor) -> DataProto:
    """Padding, "1+1=", "2" and the end of turn, padding: 10 columns, tokens at 2 to 7."""
    ids = torch.tensor([[0, 0, *text_ids("1+1=2<|im_end|>"), 0, 0]])
    attention_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0, 0]])
    response_mask = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 0, 0]])
    masks = {"attention_mask": attention_mask, "response_mask": response_mask}
    tensors = {"input_ids": ids, **masks, **columns}
    return DataProto.from_dict(tensors, {"prompt_id": [7], "sample_uuid": ["7_0"]})


def record_of(folder: Path, batch: DataProto | None, step: int = 0, **options: Any) -> Any:
    (record,) = records(RolloutLog(folder, tiny_tokenizer()).write(step, batch, **options))
    return record


def test_entry_i_speaks_of_token_i(tmp_path: Path) -> None:
    # Columns of width S-1 hold 0, 1, 2, ...: column t speaks of token t+1, so token 6 ("2") has 5.
    numbers = torch.arange(9.0)[None]
    columns = {"old_log_probs": numbers, "infer_logprobs": -numbers, "advantages": numbers * 0 + 1}
    columns["advantages"] /= 3
    record = record_of(tmp_path, one_row(**columns), step=12)
    tokens = record["tokens"]
    assert tokens["text"] == ["1", "+", "1", "=", "2", "<|im_end|>"]
    assert tokens["mask"] == [0, 0, 0, 0, 1, 1]
    assert tokens["old_log_probs"] == [None, None, None, None, 5.0, 6.0]
    assert tokens["infer_log_probs"] == [None, None, None, None, -5.0, -6.0]
    assert tokens["advantages"][4:] == [0.333333, 0.333333]
    assert record["prompt"] == "1+1=" and record["response"] == "2<|im_end|>"
    assert (record["step"], record["group"], record["sample"]) == (12, "7", "7_0")
    assert record["advantage"] == 0.333333 and "turns" not in record
    assert (tmp_path / "rollouts" / "step-000012.jsonl").is_file()


def test_a_token_that_was_filtered_out_keeps_its_numbers(tmp_path: Path) -> None:
    final = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 0, 0, 0]])
    batch = one_row(final_response_mask=final, old_log_probs=torch.arange(9.0)[None])
    tokens = record_of(tmp_path, batch)["tokens"]
    assert tokens["mask"] == [0, 0, 0, 0, 1, 0] and tokens["old_log_probs"][4:] == [5.0, 6.0]


def test_numbers_that_are_not_finite_are_named_where_the_model_generated(tmp_path: Path) -> None:
    values = torch.full((1, 9), math.nan)
    values[0, 6] = -math.inf
    tokens = record_of(tmp_path, one_row(old_log_probs=values))["tokens"]
    assert tokens["old_log_probs"] == [None, None, None, None, "NaN", "-Infinity"]


def test_scores_parts_and_reasons(tmp_path: Path) -> None:
    batch = one_row(scores=torch.tensor([0.5]), response_level_rewards=torch.tensor([-1.25]))
    columns = {
        "reward_parts": [{"answer": 1.0, "format": math.nan}],
        "ground_truth": [[1, 2]],
        "finish_reason": ["length"],
        "policy_version": [3],
        "drop_reason": ["timeout"],
        "domain": ["math"],
    }
    batch.non_tensor_batch |= DataProto.from_dict({}, columns).non_tensor_batch
    record = record_of(tmp_path, batch, step=3, split="val")
    expected = {
        "score": 0.5,
        "reward": -1.25,
        "rewards": {"answer": 1.0, "format": "NaN"},
        "ground_truth": "[1,2]",
        "finish_reason": "length",
        "policy_version": 3,
        "dropped": "timeout",
        "domain": "math",
        "split": "val",
    }
    assert {key: record[key] for key in expected} == expected
    assert (tmp_path / "rollouts" / "val-000003.jsonl").is_file()


def test_turns_follow_from_the_mask(tmp_path: Path) -> None:
    # "ab" observed, "cd" said, "e" observed, "f" said.
    tensors = {
        "input_ids": torch.tensor([text_ids("abcdef")]),
        "response_mask": torch.tensor([[0, 0, 1, 1, 0, 1]]),
        "scores": torch.tensor([[0, 0, 0, 0, 0, 2.0]]),
    }
    step_scores = [torch.tensor([0.5, 1.5])]
    columns = {"traj_group_id": ["g"], "step_scores": step_scores, "tags": ["lake"]}
    record = record_of(tmp_path, DataProto.from_dict(tensors, columns))
    assert record["turns"] == [
        {"role": "observation", "start": 0, "end": 2, "reward": None},
        {"role": "response", "start": 2, "end": 4, "reward": 0.5},
        {"role": "observation", "start": 4, "end": 5, "reward": None},
        {"role": "response", "start": 5, "end": 6, "reward": 1.5},
    ]
    assert record["score"] == 2.0 and record["tag"] == "lake" and record["group"] == "g"


def test_dropped_samples_are_kept_with_their_reason(tmp_path: Path) -> None:
    ids = text_ids("ab")
    sample = DroppedSample("p", "r", "no signal", token_ids=ids, group="9", score=math.nan)
    record = record_of(tmp_path, None, dropped=[sample])
    assert (record["dropped"], record["score"], record["group"]) == ("no signal", "NaN", "9")
    assert record["tokens"] == {"ids": ids, "text": ["a", "b"], "mask": [0, 0]}
    log = RolloutLog(tmp_path, tiny_tokenizer(), max_samples_per_step=1)
    assert len(records(log.write(1, None, dropped=[sample] * 100))) == 64


def test_whole_groups_are_kept() -> None:
    assert chosen_rows(list("aabbccdd"), 4) == [0, 1, 4, 5]
    assert chosen_rows(list("aabbccdd"), None) == list(range(8))
    assert chosen_rows(list("aaaa"), 3) == [0, 1, 2]
    assert chosen_rows(list("abab"), 2) == [0, 2]
    rows = chosen_rows(list("a" * 50 + "b" * 50 + "c" * 50 + "d" * 50), 64)
    assert [rows[i] for i in (0, 16, 32, 48)] == [0, 50, 100, 150]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=30), st.integers(1, 12))
def test_no_more_rows_than_asked_for_and_at_least_one(groups: list[str], limit: int) -> None:
    rows = chosen_rows(groups, limit)
    assert 1 <= len(rows) <= limit or len(groups) <= limit
    assert rows == sorted(set(rows))


def test_the_second_attempt_of_a_step_replaces_the_first_and_resuming_cuts(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, tiny_tokenizer())
    for step in (1, 2, 2, 3):
        log.write(step, one_row())
    log.write(3, one_row(), split="val")
    assert len(records(tmp_path / "rollouts" / "step-000002.jsonl")) == 1
    discard_rollouts_after(tmp_path, 2)
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["step-000001.jsonl", "step-000002.jsonl"]


def test_a_disk_that_refuses_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    log = RolloutLog(tmp_path, tiny_tokenizer())
    assert log.write(1, one_row()) is None and log.write(2, one_row()) is None
    assert len(caplog.records) == 1 and "samples are not written" in caplog.text


def test_a_column_of_another_width_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_samples_per_step=0: expected at least 1"):
        RolloutLog(tmp_path, tiny_tokenizer(), max_samples_per_step=0)
    with pytest.raises(ValueError, match=r"shape \(1, 4\); expected 10 or 9"):
        RolloutLog(tmp_path, tiny_tokenizer()).write(0, one_row(advantages=torch.zeros(1, 4)))


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    tokenizer = bpe_tokenizer()
    ids = tokenizer("é<eos>", add_special_tokens=False)["input_ids"]
    assert TokenTexts(tokenizer)(ids) == ["", "é", "<eos>"]
    assert TokenTexts(tokenizer)(ids[:1]) == ["\ufffd"]
    assert TokenTexts(tokenizer)([ids[0], *ids]) == ["", "\ufffd", "é", "<eos>"]
    assert TokenTexts(tokenizer)([10**6]) == ["<1000000?>"]


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(5, 260), max_size=20))
def test_the_texts_join_to_the_decoded_text(text: str, noise: list[int]) -> None:
    tokenizer = bpe_tokenizer()
    for ids in (tokenizer(text, add_special_tokens=False)["input_ids"], noise):
        texts = TokenTexts(tokenizer)(ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_spaces_marked_by_a_bar_and_bytes_as_a_fallback() -> None:
    vocab = {"▁Hi": 0, "<0xC3>": 1, "<0xA9>": 2, "!": 3}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert texts([0, 1, 2, 3, 0]) == [" Hi", "", "é", "!", " Hi"]


def test_anything_with_decode_will_do() -> None:
    class Decoder:
        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    assert TokenTexts(Decoder())([3, 4]) == ["<3>", "<4>"]
