"""The tree has each prefix once, and models compute the same numbers and gradients through it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config, tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GemmaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    SmolLM3Config,
)

from roll.models import token_tree as module
from roll.models.linear_head import use_linear_logits
from roll.models.token_tree import MODEL_TYPES, token_tree, use_token_tree

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
CONFIGS = {
    "gemma": lambda: GemmaConfig(**SIZES),
    "granite": lambda: tiny_config("granite"),
    "llama": lambda: tiny_config(
        "llama", num_attention_heads=4, num_key_value_heads=1, head_dim=16
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "phi3": lambda: Phi3Config(**SIZES),
    "qwen2": lambda: tiny_config("qwen2"),
    "qwen3": lambda: tiny_config("qwen3"),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
}


def batch_of(rows, width=None):
    width = width or max(map(len, rows))
    ids = torch.tensor([row + [77] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def test_two_rows_by_hand():
    tree = token_tree(*batch_of([[5, 6, 7], [5, 6, 8, 9]]))
    assert tree.ids_1N.tolist() == [[5, 6, 7, 8, 9]]
    assert tree.positions_1N.tolist() == [[0, 1, 2, 2, 3]]
    assert tree.node_BS.tolist() == [
        [0, 1, 2, 0],
        [0, 1, 3, 4],
    ]  # padding has the node of the first cell
    assert tree.cell_N.tolist() == [0, 1, 2, 6, 7]


@pytest.mark.parametrize("garbage", [-100, -1, 10**6, 2**62])
def test_ids_of_padding_may_be_anything(garbage):
    ids, mask = batch_of([[5, 6], [5, 6, 7], [5, 6, 8, 9]])
    mask[0] = 0  # so the first cell, whose node padding takes, is padding itself
    tree = token_tree(torch.where(mask != 0, ids, garbage), mask)
    assert tree.ids_1N.tolist() == [[0, 5, 6, 7, 8, 9]]
    assert tree.node_BS[1:].tolist() == [[1, 2, 3, 0], [1, 2, 4, 5]]


def test_the_same_token_after_other_tokens_is_another_node():
    tree = token_tree(*batch_of([[1, 2, 3], [9, 2, 3], [1, 2, 3]]))
    assert tree.node_BS.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert token_tree(*batch_of([[1, 2, 3], [4, 5, 6]])) is None  # it would save nothing


def test_prefixes_with_one_hash_are_found_out(monkeypatch):
    monkeypatch.setattr(module, "_prefix_hashes", lambda ids: torch.zeros_like(ids))
    assert token_tree(*batch_of([[1, 2, 3], [4, 5, 6]])) is None
    # Only the column is hashed: cells of one column meet although what stands before them differs.
    monkeypatch.setattr(
        module, "_prefix_hashes", lambda ids: torch.arange(ids.shape[1]).expand_as(ids)
    )
    assert token_tree(*batch_of([[1, 2, 3], [4, 2, 3]])) is None


rows_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(rows=rows_strategy, extra=st.integers(0, 3))
def test_nodes_are_the_distinct_prefixes(rows, extra):
    ids, mask = batch_of(rows, max(map(len, rows)) + extra)
    prefixes = {tuple(row[: stop + 1]) for row in rows for stop in range(len(row))}
    tree = token_tree(ids, mask)
    if tree is None:
        assert len(prefixes) > 0.9 * ids.numel()
        return
    assert tree.ids_1N.shape[1] == len(prefixes)
    node_of = {}
    for row, nodes in zip(rows, tree.node_BS.tolist(), strict=True):
        for stop, node in zip(range(len(row)), nodes, strict=False):
            assert node_of.setdefault(tuple(row[: stop + 1]), node) == node
            assert tree.ids_1N[0, node] == row[stop] and tree.positions_1N[0, node] == stop
    cells = tree.cell_N.tolist()
    assert cells == sorted(cells) and tree.node_BS.flatten()[tree.cell_N].tolist() == list(
        range(len(cells))
    )


def groups_of_rows():
    """Three prompts, each with three answers, one row twice, all behind one opening."""
    generator = torch.Generator().manual_seed(3)
    some = lambda n: torch.randint(3, 99, (n,), generator=generator).tolist()  # noqa: E731
    opening = some(4)
    rows = []
    for length in (6, 2, 9):
        prompt = opening + some(length)
        rows += [prompt + some(n) for n in (1, 7, 4)]
    return batch_of([*rows, rows[1]])


def gradients(model, output, mask):
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    (torch.where(mask[..., None] != 0, output, 0.0) * weight).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def check_same(model, outputs, **options):
    ids, mask = groups_of_rows()
    tree = token_tree(ids, mask, **options)
    assert tree.ids_1N.shape[1] < 0.6 * ids.numel()
    plain = model(input_ids=ids, use_cache=False).logits
    shared = tree.rows_of(model(**tree.model_inputs(), use_cache=False).logits)
    plain, shared = outputs(plain), outputs(shared)
    real = mask != 0
    torch.testing.assert_close(shared[real], plain[real], rtol=1e-5, atol=1e-5)
    for (name, one), other in zip(
        gradients(model, plain, mask).items(), gradients(model, shared, mask).values(), strict=True
    ):
        assert (one - other).norm() <= 1e-5 * one.norm(), name


def test_every_kind_of_model_is_tried():
    assert set(CONFIGS) == MODEL_TYPES


@pytest.mark.parametrize("name", CONFIGS)
def test_models_compute_the_same(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    assert use_token_tree(model) and use_token_tree(model)
    use_linear_logits(model)
    check_same(model, lambda output: output.materialize())


def test_recomputation_values_and_nodes_that_fill_up_a_round_number():
    model = tiny_model("qwen2").train()
    assert use_token_tree(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids, mask = groups_of_rows()
    num_nodes = token_tree(ids, mask).ids_1N.shape[1]
    assert num_nodes % 16
    assert token_tree(ids, mask, round_to=16).ids_1N.shape[1] == -(-num_nodes // 16) * 16
    check_same(model, lambda output: output, round_to=16)
    config = tiny_config("qwen2", num_labels=1, classifier_dropout=0.0)
    values = AutoModelForTokenClassification.from_config(config)
    assert use_token_tree(values)
    check_same(values, lambda output: output)


def test_padded_and_cached_forwards_and_the_saved_config_are_as_before(tmp_path):
    model, prepared = tiny_model("llama").eval(), tiny_model("llama").eval()
    use_token_tree(prepared)
    ids, mask = groups_of_rows()
    with torch.no_grad():
        assert torch.equal(
            model(ids, attention_mask=mask).logits, prepared(ids, attention_mask=mask).logits
        )
        one, two = (
            m.generate(ids[:, :8], max_new_tokens=5, do_sample=False) for m in (model, prepared)
        )
    assert torch.equal(one, two)
    prepared.save_pretrained(tmp_path)
    assert "token_tree" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("gemma2"),
        lambda: tiny_model("cohere"),
        lambda: tiny_model("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=1),
        lambda: tiny_model("llama", attn_implementation="eager"),
        lambda: AutoModelForSequenceClassification.from_config(tiny_config("qwen2", num_labels=1)),
    ],
)
def test_other_models_stay_as_they_are(make):
    model = make()
    before = model.config._attn_implementation
    assert not use_token_tree(model)
    assert model.config._attn_implementation == before
