"""The growing cache of a batch, and steps over it on a GPU as a CUDA graph.

A step of a model of some hundred million parameters is a thousand kernels of microseconds, and
launching them one by one takes many times as long as running them. So a step is recorded once and
launched as a whole for every token. What changes from step to step lies on the device: the newest
tokens, their positions, and the column of the cache that they go to; attention reads as many
columns as there are (`roll.ops.decode_attention`). A graph is good for one batch and its buffers;
when rows leave or the room is used up, another is recorded. The caches of transformers copy all
they hold for every token, or have one size for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, Qwen3ForCausalLM
from transformers.cache_utils import DynamicLayer

from roll.engines import small_decoder
from roll.models.lora import base_model
from roll.ops.decode_attention import decode_attention, has_decode_kernel

GROWTH = 256  # columns added at least when the room is used up
MIN_STEPS = 16  # for fewer, recording takes longer than it saves
MODEL_CLASSES = (*small_decoder.MODEL_CLASSES, Qwen3ForCausalLM)  # dense, full attention
ATTENTION = "roll_decode"


class RoomyLayer(DynamicLayer):
    """Keys and values of one full-attention layer, in buffers with room for what comes.

    `keys` and `values`, (rows, heads, tokens, head size), are views of buffers in the layout (rows,
    tokens, heads, head size), in which projections produce them and attention reads them.
    """

    buffers: tuple[Tensor, Tensor]

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.num_tokens = 0

    @property
    def capacity(self) -> int:
        """Tokens that the buffers hold, room included."""
        return self.buffers[0].shape[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, heads, num_tokens, size = key_states.shape
        shape = (rows, num_tokens + self.room, heads)
        value_size = value_states.shape[3]
        self.buffers = (
            key_states.new_empty(*shape, size),
            value_states.new_empty(*shape, value_size),
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
        moved = []
        for buffer in self.buffers:
            used = buffer[:, : self.num_tokens]
            used = used if rows is None else used.index_select(0, rows)
            new = buffer.new_empty(len(used), self.num_tokens + room, *buffer.shape[2:])
            new[:, : self.num_tokens] = used
            moved.append(new)
        self.buffers = (moved[0], moved[1])

    def _show(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, : self.num_tokens].transpose(1, 2) for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values


def make_cache(config: PreTrainedConfig, room: int) -> DynamicCache:
    """An empty cache with `room` tokens beyond the first forward, where a layer sees all of them.

    Other kinds of layers (sliding windows, linear attention) keep what `transformers` has.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        RoomyLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def can_record(model: nn.Module, cache: DynamicCache) -> bool:
    """Whether a step of this model is the same kernels every time, and nobody looks into it."""
    inner = base_model(model)
    is_known = (
        type(inner) in MODEL_CLASSES
        and inner.config.rope_parameters["rope_type"] in small_decoder.STATIC_ROPE_TYPES
        and all(type(layer) is RoomyLayer for layer in cache.layers)
        and all(type(p) is nn.Parameter and p.is_cuda for p in model.parameters())
        and has_decode_kernel()
    )
    return is_known and not any(
        module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl is not None
        for module in model.modules()
    )


class GraphDecoder:
    """The next logits of a batch, given each row's newest token.

    Args:
        model: one that `can_record`.
        cache: keys and values of the tokens so far, with room for more.
        logits: the model's next logits (R, V) for token ids (R, 1) and further inputs.
    """

    def __init__(
        self, model: nn.Module, cache: DynamicCache, logits: Callable[..., Tensor]
    ) -> None:
        self.model = model
        self.cache = cache
        self.logits = logits
        self._step: _RecordedStep | None = None

    @property
    def num_tokens(self) -> int:
        return self.cache.get_seq_length()

    def step(self, token_R: Tensor, position: Tensor | int, mask_RC: Tensor | None) -> Tensor:
        """Logits (R, V) after `token_R`, which stands at `position`, (R,) or one for all rows.

        They are overwritten by the next step. Columns before the first token of a row are known
        from its position, so the mask is not read.
        """
        layers: list[Any] = self.cache.layers
        if self.num_tokens == layers[0].capacity:
            self._forget_step()
            for layer in layers:
                layer.grow(self.num_tokens + 1)
        # A graph is recorded and launched on the current device.
        with torch.cuda.device_of(token_R):
            if self._step is None:
                position_R = torch.as_tensor(position, device=token_R.device).expand(len(token_R))
                self._step = _RecordedStep(self, token_R, position_R)
            logits_RV = self._step(token_R)
        for layer in layers:
            layer.num_tokens += 1
        return logits_RV

    def select(self, rows: Tensor) -> None:
        """Only these rows, in this order."""
        self._forget_step()
        self.cache.batch_select_indices(rows)

    def _forget_step(self) -> None:
        # It may still be running.
        torch.cuda.current_stream(next(self.model.parameters()).device).synchronize()
        self._step = None


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: a matrix library keeps memory for every stream that it has seen."""
    return torch.cuda.Stream(device)


class _RecordedStep:
    """The graph of one step, and what it reads and writes besides the cache."""

    def __init__(self, decoder: GraphDecoder, token_R: Tensor, position_R: Tensor) -> None:
        device = token_R.device
        self.column = torch.tensor([decoder.num_tokens], device=device)
        self.token_R1 = token_R[:, None].clone()
        self.position_R1 = position_R[:, None].clone()
        self.first_R = self.column - position_R  # what is before it in a row is padding
        # Four dimensions: taken as it is, and not used.
        unused_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        self.graph = torch.cuda.CUDAGraph()

        def step() -> Tensor:
            logits_RV = decoder.logits(
                self.token_R1,
                position_ids=self.position_R1,
                attention_mask=unused_mask,
                decode=(self.first_R, self.column + 1),
            )
            self.column += 1
            self.position_R1 += 1
            return logits_RV

        with _decoding(decoder.model, decoder.cache, self.column):
            # Once outside of the recording, for what is compiled or loaded at a first call. The
            # first launch writes the same column again.
            stream = _recording_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                step()
                self.column -= 1
                self.position_R1 -= 1
            torch.cuda.current_stream(device).wait_stream(stream)
            # Other threads may go on using the GPU.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.logits_RV = step()

    def __call__(self, token_R: Tensor) -> Tensor:
        self.token_R1.copy_(token_R[:, None])
        self.graph.replay()
        return self.logits_RV


@contextmanager
def _decoding(model: nn.Module, cache: DynamicCache, column: Tensor) -> Iterator[None]:
    """Inside, the model attends through `decode_attention`, and its cache takes tokens at
    `column`."""
    config = base_model(model).config
    attention, layers = config._attn_implementation, cache.layers
    config._attn_implementation = ATTENTION
    cache.layers = [_ColumnLayer(layer, column) for layer in layers]
    try:
        yield
    finally:
        config._attn_implementation, cache.layers = attention, layers


class _ColumnLayer(DynamicLayer):
    """The buffers of a layer, into which a token is written at a column that the device knows."""

    def __init__(self, layer: Any, column: Tensor) -> None:
        super().__init__()
        self.layer, self.column = layer, column
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for buffer, new in zip(self.layer.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(1, self.column, new.transpose(1, 2))
        keys, values = (buffer.transpose(1, 2) for buffer in self.layer.buffers)
        return keys, values

    def get_seq_length(self) -> int:
        return self.layer.num_tokens


def _attention(
    module: nn.Module,
    query_RH1D: Tensor,
    keys_RKTD: Tensor,
    values_RKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    decode: tuple[Tensor, Tensor],
    **options: Any,
) -> tuple[Tensor, None]:
    seen_RHD = decode_attention(query_RH1D[:, :, 0], keys_RKTD, values_RKTD, *decode, scaling)
    return seen_RHD[:, None], None


AttentionInterface.register(ATTENTION, _attention)
