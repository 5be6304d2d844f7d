"""Computes each token of a batch once: rows that begin alike share it, and padding is left out.

A causal model computes the same for a token wherever the tokens before it are the same. The answers
to one prompt, the two answers of a preference pair and rows with one system prompt therefore form a
tree, and most of a transformer (norms, projections, feed-forward layers) needs its nodes only. Rows
"a b c" and "a b d e" are five nodes:

    column    0  1  2  3            node_BS  0 1 2 .     cell_N  (row 0: 0 1 2, row 1: 2 3)
    row 0     a  b  c  .       ->            0 1 3 4
    row 1     a  b  d  e            nodes    a b c d e   at positions 0 1 2 2 3

Attention alone works on rows: its inputs are spread from nodes to the cells of the rows, and of its
output each node takes the cell of the first row that it stands in. Numbers are those of the padded
batch up to rounding; gradients of a shared token are the sum over the rows that share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from roll.models.lora import base_model
from roll.ops.linear_logits import LinearLogits

ATTENTION = "token_tree"
# Models whose layers mix tokens by attention alone, each compared with its padded forward by tests.
MODEL_TYPES = frozenset(
    {"gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
WORTHWHILE = 0.9  # nodes per cell up to which a tree costs less than the cells
GPU_MULTIPLE = 128  # whole tiles of matrix products, and few sizes for compiled layers


@dataclass(frozen=True)
class TokenTree:
    """The distinct prefixes of a right-padded batch: a node for each, and where it is seen.

    node_BS: the node of each cell; cells of padding have any node.
    cell_N: the first cell, `row * S + column`, in which each node stands. Nodes that only fill up a
    round number stand in cell 0, and no cell has them.
    """

    ids_1N: Tensor
    positions_1N: Tensor
    node_BS: Tensor
    cell_N: Tensor

    def model_inputs(self) -> dict[str, Tensor]:
        """Arguments of a model that `use_token_tree` has prepared."""
        return {
            "input_ids": self.ids_1N,
            "position_ids": self.positions_1N,
            # A mask of four dimensions is handed on as it is, and nothing reads it.
            "attention_mask": self.ids_1N.new_ones(1, 1, 1, 1, dtype=torch.bool),
            "node_BS": self.node_BS,
            "cell_N": self.cell_N,
        }

    def rows_of(self, output: Tensor | LinearLogits) -> Tensor | LinearLogits:
        """The output of the model, (1, N, ...), as the rows of the batch, (B, S, ...)."""
        if isinstance(output, LinearLogits):
            return replace(output, hidden=_spread(output.hidden[0], self.node_BS))
        return _spread(output[0], self.node_BS)


def token_tree(
    input_ids_BS: Tensor, attention_mask_BS: Tensor, *, round_to: int = 1
) -> TokenTree | None:
    """The tree of a right-padded batch, with a multiple of `round_to` nodes, or None where it would
    save too little. Ids under the mask may hold anything."""
    batch_size, width = input_ids_BS.shape
    is_token_C = attention_mask_BS.flatten() != 0
    # The first cell lends its node to the padding, and may be padding itself.
    input_ids_BS = torch.where(attention_mask_BS != 0, input_ids_BS, 0)
    cells_C = torch.arange(batch_size * width, device=input_ids_BS.device)
    prefix_C = _prefix_hashes(input_ids_BS).flatten()
    prefix_C = torch.where(is_token_C, prefix_C, prefix_C[0])

    # Sorted, the cells of one prefix stand side by side; the first is the leader of the others.
    sorted_C, order_C = prefix_C.sort(stable=True)
    is_start_C = torch.ones_like(is_token_C)
    torch.ne(sorted_C[1:], sorted_C[:-1], out=is_start_C[1:])
    start_C = torch.where(is_start_C, cells_C, 0).cummax(0).values
    leader_C = torch.empty_like(order_C).scatter_(0, order_C, order_C[start_C])

    is_leader_C = leader_C == cells_C
    cell_N = is_leader_C.nonzero()[:, 0]
    if len(cell_N) > WORTHWHILE * len(cells_C):
        return None
    # Two prefixes with one hash would break the tree. By induction over columns: a cell and its
    # leader hold one token in one column, and so do the cells to their left.
    ids_C = input_ids_BS.flatten()
    cell_K = is_token_C.nonzero()[:, 0]
    leader_K, column_K = leader_C[cell_K], cell_K % width
    same_K = (ids_C[cell_K] == ids_C[leader_K]) & (column_K == leader_K % width)
    same_K &= (column_K == 0) | (leader_C[cell_K - 1] == leader_C[leader_K - 1])
    if not bool(same_K.all()):
        return None
    cell_N = F.pad(cell_N, (0, -len(cell_N) % round_to))
    return TokenTree(
        ids_1N=ids_C[cell_N][None],
        positions_1N=(cell_N % width)[None],
        node_BS=(is_leader_C.cumsum(0) - 1)[leader_C].view(batch_size, width),
        cell_N=cell_N,
    )


def _prefix_hashes(ids_BS: Tensor) -> Tensor:
    """64 bits for the tokens up to each column: the sum of a hash of each token times an odd number
    of its column."""
    columns_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    # Mixed twice, so that tokens and columns of one number are not alike.
    odd_S = _mix(_mix(columns_S)) | 1
    return (_mix(ids_BS) * odd_S).cumsum(1)


def _mix(x: Tensor) -> Tensor:
    x = (x + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 32)) * -0x4B47D0C5B2A4D6C1
    return x ^ (x >> 29)


def use_token_tree(model: nn.Module) -> bool:
    """Makes a causal model, or a `PeftModel` around one, take `TokenTree.model_inputs`, in place.

    Any other input is computed as before. False, and nothing changes, for models that are not known
    to mix tokens by full attention alone, that do not answer for every token, or whose attention is
    not torch's.
    """
    config: Any = base_model(model).config
    is_known = (
        config.model_type in MODEL_TYPES
        and type(base_model(model)).__name__.endswith(("ForCausalLM", "ForTokenClassification"))
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
    )
    if is_known and config._attn_implementation == "sdpa":
        config._attn_implementation = ATTENTION
    return is_known and config._attn_implementation == ATTENTION


def _attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    node_BS: Tensor | None = None,
    cell_N: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of nodes, by way of the rows that they stand in; without a tree, torch's."""
    states = (query_1HND, key_1HND, value_1HND)
    if node_BS is None or cell_N is None:
        return sdpa_attention_forward(module, *states, attention_mask, **options)
    # (1, heads, N, D) -> (B, heads, S, D)
    query, key, value = (
        _spread(x_1HND[0].transpose(0, 1), node_BS).transpose(1, 2) for x_1HND in states
    )
    seen_BSHD, _ = sdpa_attention_forward(module, query, key, value, None, **options)
    return _spread(seen_BSHD.flatten(0, 1), cell_N)[None], None


def _spread(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` along the first dimension; an embedding's backward is fast on a CPU."""
    return F.embedding(index, values.flatten(1)).unflatten(-1, values.shape[1:])


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
