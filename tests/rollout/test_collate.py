"""Rows of tokens, by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.datasets.encoding import Prompt
from roll.exceptions import DataError
from roll.pipeline.agentic.utils import (
    build_state_group,
    compute_discounted_returns,
    compute_response_level_rewards,
)
from roll.pipeline.data import check_columns
from roll.rollout.collate import collate
from roll.rollout.types import Trajectory, Turn, state_hash
from roll.utils.functionals import expand_to_token_level


def turn(prompt, response, reward=0.0, **options):
    log_probs = [-float(token) for token in response]
    return Turn(prompt, response, options.pop("log_probs", log_probs), reward=reward, **options)


def trajectory(*turns, traj_id="g_0", group="g", **options):
    return Trajectory(traj_id, group, "Tag", env_id=0, group_id=0, turns=list(turns), **options)


def test_a_trajectory_is_one_row():
    played = trajectory(
        turn([5, 6], [8, 9], 0.5, policy_version=3), turn([7], [4], 1.0, policy_version=2)
    )
    batch = collate([played], pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 9, 7, 4]]
    assert batch["response_mask"].tolist() == [[0, 0, 1, 1, 0, 1]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 0, 0, 0, 0]]
    assert batch["infer_logprobs"].tolist() == [[0, -8, -9, 0, -4]]
    assert batch["scores"].tolist() == [[0, 0, 0, 0, 0, 1.5]]
    assert batch["episode_scores"].tolist() == [1.5] and batch["step_scores"][0].tolist() == [
        0.5,
        1.0,
    ]
    assert batch["policy_version"].tolist() == [2]  # that of the oldest tokens
    assert batch["turns"][0] == [
        {"role": "observation", "start": 0, "end": 2, "reward": None},
        {"role": "response", "start": 2, "end": 4, "reward": 0.5},
        {"role": "observation", "start": 4, "end": 5, "reward": None},
        {"role": "response", "start": 5, "end": 6, "reward": 1.0},
    ]


def test_rows_of_different_length_are_padded_on_the_right():
    long, short = (
        trajectory(turn([5, 6], [8, 9]), turn([7], [4])),
        trajectory(turn([3], [2], 1.0), traj_id="g_1"),
    )
    batch = collate([long, short], pad_token_id=77)
    assert batch["input_ids"][1].tolist() == [3, 2, 77, 77, 77, 77]
    assert batch["attention_mask"].sum(1).tolist() == [6, 2]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["scores"][1].tolist() == [0, 1, 0, 0, 0, 0]
    assert len(set(batch["sample_uuid"])) == 2


def test_a_trailing_observation_does_not_swallow_the_reward():
    played = trajectory(
        turn([5], [8], 1.0), turn([7, 7, 7], [])
    )  # the last prompt was never answered
    batch = collate([played], pad_token_id=0)
    assert batch["response_mask"].tolist() == [[0, 1, 0, 0, 0]]
    assert batch["scores"].tolist() == [[0, 1, 0, 0, 0]]
    batch["response_level_rewards"] = torch.tensor([2.0])
    assert expand_to_token_level(batch).tolist() == [[2, 0, 0, 0]]


def test_step_rows_of_a_conversation_have_all_that_came_before():
    played = trajectory(turn([5, 6], [8, 9], 0.5, state="a"), turn([7], [4], 1.0, state="b"))
    batch = collate([played], 0, per_turn=True)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 9, 0, 0], [5, 6, 8, 9, 7, 4]]
    assert batch["response_mask"].tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert batch["infer_logprobs"].tolist() == [[0, -8, -9, 0, 0], [0, 0, 0, 0, -4]]
    assert batch["scores"].sum(1).tolist() == [0.5, 1.0]
    assert batch["step"].tolist() == [0, 1] and batch["state_hash"].tolist() == ["a", "b"]
    assert batch["episode_scores"].tolist() == [1.5, 1.5]


def test_step_rows_with_prompts_of_their_own():
    played = trajectory(turn([5, 6], [8]), turn([1, 2, 3], [4]), prompts_are_whole=True)
    batch = collate([played], 0, per_turn=True)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 0], [1, 2, 3, 4]]
    with pytest.raises(ValueError, match="TrajEnvManager"):
        collate([played], 0)


def test_an_empty_answer_keeps_its_row_and_its_reward():
    played = trajectory(turn([5], [8], 0.0), turn([6], [], -0.5), prompts_are_whole=True)
    batch = compute_discounted_returns(collate([played], 0, per_turn=True), "gigpo", gamma=0.5)
    assert batch["response_mask"].sum(1).tolist() == [1, 0]
    assert batch["step_rewards"].tolist() == [-0.25, -0.5]
    assert batch["scores"].sum().item() == 0.0


def test_answers_without_log_probs():
    batch = collate([trajectory(turn([5], [8], log_probs=None))], 0)
    assert "infer_logprobs" not in batch
    with pytest.raises(ValueError, match="2 response tokens with 1"):
        Turn([1], [2, 3], [-0.1])
    with pytest.raises(ValueError, match="no rows"):
        collate([], 0)


def test_equal_states_of_different_groups_stay_apart():
    """ROLL groups by (group, state) and then normalises by state alone."""
    hashed = state_hash("the same grid")
    first = trajectory(turn([5], [8], 1.0, state=hashed), traj_id="a_0", group="a")
    second = trajectory(turn([5], [9], 0.0, state=hashed), traj_id="b_0", group="b")
    batch = build_state_group(collate([first, second], 0, per_turn=True))
    assert batch["state_group_id"][0] != batch["state_group_id"][1]


def test_gigpo_from_turns():
    """Two episodes of a group: the same first state, then one wins. By hand, gamma 0.5, group mean
    only."""

    class Config:
        adv_estimator, reward_clip = "gigpo", None
        episode_reward_weight, step_reward_weight = 1.0, 1.0

        class reward_normalization:
            grouping, norm_mean_type, norm_std_type = "traj_group_id", "group", None

    won = trajectory(turn([5], [8], 0.0, state="s"), turn([6], [8], 1.0, state="t"), traj_id="g_0")
    lost = trajectory(turn([5], [9], 0.0, state="s"), traj_id="g_1")
    batch = collate([won, lost], 0, per_turn=True)
    batch = compute_discounted_returns(batch, "gigpo", gamma=0.5)
    batch, _ = compute_response_level_rewards(batch, Config)
    # episode: scores 1, 1, 0 minus their mean 2/3; step: returns 0.5 and 0 in state s (mean 0.25),
    # 1 alone in t
    assert torch.allclose(
        batch["response_level_rewards"], torch.tensor([1 / 3 + 0.25, 1 / 3, -2 / 3 - 0.25])
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 50), min_size=1, max_size=5),
            st.lists(st.integers(1, 50), min_size=1, max_size=4),
            st.floats(-2, 2),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_rows_say_what_the_turns_said(parts):
    played = trajectory(*(turn(prompt, response, reward) for prompt, response, reward in parts))
    whole = collate([played], 0)
    ids, mask = whole["input_ids"][0], whole["response_mask"][0].bool()
    assert ids.tolist() == [
        token for prompt, response, _ in parts for token in (*prompt, *response)
    ]
    assert ids[mask].tolist() == [token for _, response, _ in parts for token in response]
    assert math.isclose(
        float(whole["scores"].sum()), sum(reward for *_, reward in parts), abs_tol=1e-5
    )
    steps = collate([played], 0, per_turn=True)
    assert [
        row[on.bool()].tolist()
        for row, on in zip(steps["input_ids"], steps["response_mask"], strict=True)
    ] == [response for _, response, _ in parts]
    assert np.allclose(steps["scores"].sum(1), [reward for *_, reward in parts])


# -- responses to prompts --------------------------------------------------------------------------


def response(prompt_ids, ids, *, number=0, versions=None, log_probs=None, reward=None, **row):
    prompt = Prompt(0, tuple(prompt_ids), "text", "question", row.get("ground_truth"), "tag", "math", row)  # fmt: skip
    versions = versions or [4] * len(ids)
    made = Turn(
        prompt.ids,
        ids,
        log_probs or [-1.0] * len(ids),
        policy_version=min(versions),
        token_versions=versions,
        reward=reward or 0.0,
    )
    return Trajectory(
        f"g/{number}", "g", "tag", number, 0, [made], prompt=prompt,
        reward=None if reward is None else reward / 2,
        reward_parts={} if reward is None else {"part": reward},
    )  # fmt: skip


def test_rows_are_right_padded_and_columns_speak_of_the_next_token():
    batch = collate(
        [
            response([7, 8], [5, 2], log_probs=[-0.5, -0.25]),
            response([9], [6, 6, 6, 2], versions=[3, 3, 4, 4]),
        ],
        0,
    )
    assert batch["input_ids"].tolist() == [[7, 8, 5, 2, 0], [9, 6, 6, 6, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert batch["infer_logprobs"].tolist() == [[0, -0.5, -0.25, 0], [-1, -1, -1, -1]]
    assert batch["policy_versions"].tolist() == [[-1, 4, 4, -1], [3, 3, 4, 4]]
    assert batch["policy_version"].tolist() == [4, 3], "the oldest token counts"
    assert batch["prompts"].tolist() == [[7, 8], [0, 9]]
    assert batch["responses"].tolist() == [[5, 2, 0, 0], [6, 6, 6, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 3], [0, 1, 2, 3, 4]]
    assert "scores" not in batch, "reward workers get no scores"


def test_columns_of_the_data_file_and_scores_come_along():
    one = response([1], [2], reward=1.0, ground_truth="x", cases=[1, 2])
    batch = collate([one, response([1], [2], number=1, reward=0.5)], 0)
    assert batch["ground_truth"].tolist() == ["x", None]
    assert batch["cases"].tolist() == [[1, 2], None] and isinstance(batch["cases"], np.ndarray)
    assert batch["sample_uuid"].tolist() == ["g/0", "g/1"]
    assert batch["group_id"].tolist() == batch["prompt_id"].tolist() == ["g", "g"]
    assert batch["prompt"].tolist() == ["question"] * 2 and batch["domain"].tolist() == ["math"] * 2
    assert batch["scores"].tolist() == [1.0, 0.5]
    assert batch["response_level_rewards"].tolist() == [0.5, 0.25]
    assert batch["reward_parts"].tolist() == [{"part": 1.0}, {"part": 0.5}]


def test_a_file_must_not_use_names_of_the_pipeline():
    check_columns(["prompt", "ground_truth", "domain", "tag", "difficulty"], "x.jsonl")
    message = r"x.jsonl: the columns advantages, input_ids have names that the pipeline uses"
    with pytest.raises(DataError, match=message):
        check_columns(["input_ids", "prompt", "advantages"], "x.jsonl")
