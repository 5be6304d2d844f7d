"""The keys and values of a batch that grows by a token at a time and loses rows: a `transformers` cache with room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

GROWTH = 256  # columns added at least when the room is used up


class RoomyLayer(DynamicLayer):
    """Keys and values of one full-attention layer, in buffers with room for what comes.

    `DynamicLayer` copies all it holds for every token. Here a token is written into its place; `keys` and `values`,
    (rows, heads, tokens, head size), are views of buffers in the layout (rows, tokens, heads, head size), in which
    projections produce them and attention reads them without a copy.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.num_tokens = 0
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (rows, tokens, heads, head size), with the room behind them."""
        assert self._buffers is not None
        return self._buffers

    @property
    def capacity(self) -> int:
        """Tokens that the buffers hold, room included."""
        return self.buffers[0].shape[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = (
            _buffer(key_states, key_states.shape[2] + self.room),
            _buffer(value_states, key_states.shape[2] + self.room),
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.num_tokens, self.num_tokens + key_states.shape[2]
        self.grow(stop)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, start:stop] = new.transpose(1, 2)
        self.num_tokens = stop
        return self._show()

    def grow(self, num_tokens: int) -> None:
        """Make the buffers hold so many tokens, and some more, if they do not."""
        if num_tokens > self.capacity:
            self._move(None, num_tokens - self.num_tokens + max(GROWTH, self.num_tokens // 2))

    def get_seq_length(self) -> int:
        return self.num_tokens

    def batch_select_indices(self, indices: Tensor) -> None:
        self._move(indices, self.capacity - self.num_tokens)
        self._show()

    def _move(self, rows: Tensor | None, room: int) -> None:
        """Into new buffers, with these rows (all: None), in this order, and this much room."""
        used = [buffer[:, : self.num_tokens] for buffer in self.buffers]
        moved = []
        for buffer in used:
            num_rows = len(buffer) if rows is None else len(rows)
            new = buffer.new_empty(num_rows, self.num_tokens + room, *buffer.shape[2:])
            new[:, : self.num_tokens] = buffer if rows is None else buffer.index_select(0, rows)
            moved.append(new)
        self._buffers = (moved[0], moved[1])

    def _show(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, : self.num_tokens].transpose(1, 2) for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values


def make_cache(config: PreTrainedConfig, room: int) -> DynamicCache:
    """An empty cache for a model, with `room` tokens beyond the first forward where a layer attends to all of them.

    Other kinds of layers (sliding windows, linear attention) keep what `transformers` has for them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        RoomyLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """What one token of one row takes in the cache of a plain transformer; an estimate for other models."""
    text = config.get_text_config(decoder=True)
    num_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    return 2 * text.num_hidden_layers * num_kv_heads * head_dim * dtype.itemsize


def _buffer(states: Tensor, num_tokens: int) -> Tensor:
    rows, heads, _, size = states.shape
    return states.new_empty(rows, num_tokens, heads, size)
