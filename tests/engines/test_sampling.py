"""Each transform against numbers worked out by hand and against the logits processors of
transformers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import roll.engines.sampling as sampling
from roll.engines.request import SamplingParams
from roll.engines.sampling import (
    draw,
    stream_key,
    transform,
    truncate,
    uniforms,
)

INF = math.inf
PROBS = torch.tensor([[0.5, 0.25, 0.15, 0.1]])


def kept(logits):
    return logits.isfinite().int().tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"top_k": 2}, [1, 1, 0, 0]),
        ({"top_k": -1}, [1, 1, 1, 1]),
        ({"top_k": 9}, [1, 1, 1, 1]),
        (
            {"top_p": 0.5},
            [1, 0, 0, 0],
        ),  # nothing above the first; above the second there is 0.5 already
        ({"top_p": 0.51}, [1, 1, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.3}, [1, 1, 1, 0]),  # 0.15 is exactly 0.3 of 0.5
        ({"min_p": 0.31}, [1, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.56}, [1, 1, 0, 0]),  # of three: 5/9 and 5/18, and 0.556 < 0.56
        ({"top_k": 3, "top_p": 0.55}, [1, 0, 0, 0]),
        ({"top_p": 0.8, "min_p": 0.4}, [1, 1, 0, 0]),
    ],
)
def test_truncation_keeps_the_tokens_it_should(options, expected):
    logits = PROBS.log() + (1e-6 if "min_p" in options else 0.0)
    assert kept(truncate(logits, **options)) == [expected]


def test_tokens_that_tie_stay_together():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept(truncate(logits, top_k=2)) == [[0, 1, 1, 1, 0]]
    assert kept(truncate(logits, top_p=0.3)) == [[0, 1, 1, 1, 0]]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
)
def test_the_chain_equals_transformers(seed, top_k, top_p, min_p, penalty, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 50, generator=generator)
    given_ids = torch.randint(0, 50, (4, 7), generator=generator)
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter_(1, given_ids, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(given_ids, logits.clone()) / temperature
    if top_k:
        expected = TopKLogitsWarper(top_k)(given_ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(given_ids, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(given_ids, expected)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    torch.testing.assert_close(transform(logits, params, seen).softmax(-1), expected.softmax(-1))


def test_top_p_of_a_large_vocabulary_needs_no_full_sort_and_falls_back_to_one(monkeypatch):
    monkeypatch.setattr(sampling, "TOP_P_CANDIDATES", 8)
    peaked = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)) * 8
    flat = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)) * 0.1
    for logits in (peaked, flat):
        expected = TopPLogitsWarper(0.8)(None, logits.clone())
        assert kept(truncate(logits, top_p=0.8)) == kept(expected)


def test_a_penalty_pushes_both_signs_down():
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False]])
    params = SamplingParams(repetition_penalty=2.0)
    assert transform(logits, params, seen).tolist() == [[1.0, -4.0, 1.0]]


def test_greedy_ignores_temperature_and_truncation():
    logits = torch.tensor([[0.1, 0.3, 0.2]])
    greedy = SamplingParams(temperature=0.0, top_k=1)
    token, log_prob = draw(transform(logits, greedy), None)
    assert token.tolist() == [1]
    torch.testing.assert_close(log_prob, logits.log_softmax(-1)[:, 1])


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.999999, 3)]
)
def test_a_uniform_number_picks_the_token_whose_share_it_falls_into(uniform, token):
    drawn, log_prob = draw(PROBS.log(), torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() == [token]
    assert log_prob.item() == pytest.approx(math.log(PROBS[0, token]), abs=1e-6)


def test_tokens_without_probability_are_never_drawn():
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]])
    edges = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    for edge in edges:
        assert draw(logits, edge[None])[0].item() in (1, 3)


def test_draws_follow_the_distribution():
    keys = torch.tensor([stream_key(0, index) for index in range(64)])
    numbers = uniforms(keys, torch.arange(512).expand(64, -1)).flatten()
    tokens, _ = draw(PROBS.log().expand(len(numbers), -1), numbers)
    shares = torch.bincount(tokens, minlength=4) / len(numbers)
    # Four standard errors of 32,768 draws.
    torch.testing.assert_close(shares, PROBS[0], rtol=0, atol=4 * 0.5 / math.sqrt(len(numbers)))


def test_uniform_numbers_are_uniform_and_each_has_its_own():
    keys = torch.tensor([stream_key(1, f"sample {index}") for index in range(100)])
    numbers = uniforms(keys, torch.arange(1000).expand(100, -1))
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert numbers.unique().numel() == numbers.numel()
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-squared, 99 degrees of freedom: p < 1e-4
    neighbours = numbers - 0.5
    for shifted in (neighbours.roll(1, 0), neighbours.roll(1, 1)):
        assert abs((neighbours * shifted).mean() * 12) < 4 / math.sqrt(numbers.numel())


def test_uniform_numbers_are_those_of_splitmix64():
    # Computed with Python's integers from the published algorithm.
    def reference(state: int) -> float:
        mask = 2**64 - 1
        x = state & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53

    key = stream_key(3, "a")
    expected = [reference(key + (position + 1) * 0x9E3779B97F4A7C15) for position in range(5)]
    assert uniforms(torch.tensor([key]), torch.arange(5)[None])[0].tolist() == expected


def test_stream_keys_differ_by_seed_key_and_type():
    keys = {stream_key(seed, key) for seed in (0, 1) for key in (1, "1", 11, "a/1")}
    assert len(keys) == 8


def test_logits_that_are_not_numbers_give_a_log_prob_that_is_none():
    token, log_prob = draw(torch.full((1, 4), math.nan), torch.tensor([0.3], dtype=torch.float64))
    assert 0 <= token.item() < 4 and log_prob.isnan().all()
