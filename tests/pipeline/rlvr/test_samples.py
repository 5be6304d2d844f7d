"""From samples to rows: every column in its place."""

import numpy as np
import pytest

from roll.datasets.encoding import Prompt
from roll.engines.request import GenerationOutput
from roll.exceptions import DataError
from roll.pipeline.data import check_columns
from roll.pipeline.rlvr.samples import (
    Group,
    Sample,
    ScoredSample,
    make_batch,
    sample_of,
    scored_batch,
)


def prompt(ids, *, index=0, **row) -> Prompt:
    return Prompt(
        index, tuple(ids), "text", "question", row.get("ground_truth"), "tag", "math", row
    )


def sample(
    prompt_ids, token_ids, *, log_probs=None, group="g", number=0, versions=None, **row
) -> Sample:
    log_probs = [-1.0] * len(token_ids) if log_probs is None else log_probs
    versions = (4,) * len(token_ids) if versions is None else versions
    return Sample(
        prompt(prompt_ids, **row),
        group,
        number,
        tuple(token_ids),
        tuple(log_probs),
        "stop",
        tuple(versions),
    )


def test_rows_are_right_padded_and_columns_speak_of_the_next_token():
    batch = make_batch(
        [
            sample([7, 8], [5, 2], log_probs=[-0.5, -0.25]),
            sample([9], [6, 6, 6, 2], versions=[3, 3, 4, 4]),
        ],
        0,
    )
    assert batch["input_ids"].tolist() == [[7, 8, 5, 2, 0], [9, 6, 6, 6, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch["prompt_mask"].tolist() == [
        [True, True, False, False, False],
        [True, False, False, False, False],
    ]
    assert batch["infer_logprobs"].tolist() == [[0, -0.5, -0.25, 0], [-1, -1, -1, -1]]
    assert batch["policy_versions"].tolist() == [[-1, 4, 4, -1], [3, 3, 4, 4]]
    assert batch["policy_version"].tolist() == [4, 3], "the oldest token counts"
    assert batch["prompts"].tolist() == [[7, 8], [0, 9]] and batch["responses"].tolist() == [
        [5, 2, 0, 0],
        [6, 6, 6, 2],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 3], [0, 1, 2, 3, 4]]


def test_columns_of_the_data_file_come_along():
    batch = make_batch(
        [sample([1], [2], ground_truth="x", cases=[1, 2]), sample([1], [2], number=1)], 0
    )
    assert batch["ground_truth"].tolist() == ["x", None]
    assert batch["cases"].tolist() == [[1, 2], None] and isinstance(batch["cases"], np.ndarray)
    assert batch["sample_uuid"].tolist() == ["g/0", "g/1"] and batch["group_id"].tolist() == [
        "g",
        "g",
    ]


def test_an_output_keeps_its_tokens():
    made = sample_of(prompt([1, 2]), GenerationOutput("g7", 3, [5, 6], [-1.0, -2.0], "length", 9))
    assert (made.group, made.number, made.token_ids, made.versions) == ("g7", 3, (5, 6), (9, 9))
    assert made.finish_reason == "length"


def test_scores_become_columns_group_after_group():
    groups = [
        Group(
            prompt([1]),
            name,
            [ScoredSample(sample([1], [2], group=name), score, score / 2, {"part": score})],
        )
        for name, score in (("a", 1.0), ("b", 0.0))
    ]
    batch = scored_batch(groups, 0)
    assert batch["scores"].tolist() == [1.0, 0.0] and batch["response_level_rewards"].tolist() == [
        0.5,
        0.0,
    ]
    assert batch["reward_parts"].tolist() == [{"part": 1.0}, {"part": 0.0}]


def test_a_file_must_not_use_names_of_the_pipeline():
    check_columns(["prompt", "ground_truth", "domain", "tag", "difficulty"], "x.jsonl")
    with pytest.raises(
        DataError,
        match=r"x.jsonl: the columns advantages, input_ids have names that the pipeline uses",
    ):
        check_columns(["input_ids", "prompt", "advantages"], "x.jsonl")
