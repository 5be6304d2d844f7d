"""One token at a time through a small model on a CPU, without the modules of `transformers`.

A small model spends most of a decoding step between operations: modules, hooks, masks and argument checks around
matrix products of microseconds. Here a step is a handful of tensor operations per layer. The weights of a call are
prepared once: norms are folded into the products that follow them; query, key and value are one product, as are gate
and up; the entries of a head are ordered in pairs, so that the rotary embedding is one product of complex numbers. The
prompts, and every model that is not of this kind, go through the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

MODEL_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
STATIC_ROPE_TYPES = ("default", "linear", "llama3")  # angles that depend on the position alone
MAX_PARAMETERS = (
    50_000_000  # with more, the products take the time, and copies of weights the memory
)


def can_decode(model: Any) -> bool:
    """Whether `SmallDecoder` computes what this model does: a plain Llama-like transformer in float32 on a CPU."""
    if type(model) not in MODEL_CLASSES:
        return False
    config = model.config
    if (
        config.hidden_act != "silu"
        or config.rope_parameters["rope_type"] not in STATIC_ROPE_TYPES
        or getattr(config, "sliding_window", None) is not None
        or any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    ):
        return False
    head = model.get_output_embeddings()
    num_parameters = 0
    for module in model.modules():
        if not _is_plain(module, replaced_forward=module is head):
            return False
        num_parameters += sum(
            parameter.numel() for parameter in module._parameters.values() if parameter is not None
        )
    return num_parameters <= MAX_PARAMETERS


def _is_plain(module: nn.Module, *, replaced_forward: bool) -> bool:
    """Nobody listens to the module or has replaced what it does, and its weights are ordinary ones.

    The head may have a forward of its own: `use_linear_logits` gives it one.
    """
    return (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and (replaced_forward or "forward" not in module.__dict__)
        and (type(module) is nn.Linear or not isinstance(module, nn.Linear))
        and all(
            parameter is None
            or (
                type(parameter) is nn.Parameter
                and parameter.dtype == torch.float32
                and not parameter.is_cuda
            )
            for parameter in module._parameters.values()
        )
    )


class SmallDecoder:
    """The next logits of a batch, given each row's newest token, with the weights as they are now.

    Args:
        model: one that `can_decode`.
        cache: keys and values of the prompts.
        cell_RW: in which cell of the cache, row by row, each token is that a row begins with.
        room: how many tokens a row may get.
    """

    def __init__(self, model: Any, cache: DynamicCache, cell_RW: Tensor, room: int) -> None:
        config = model.config
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self.num_rotated = self.num_heads + self.num_kv_heads
        self.norm_floor = torch.tensor((config.hidden_size * config.rms_norm_eps) ** 0.5)
        self.embedding = model.model.embed_tokens.weight
        self.num_tokens = cell_RW.shape[1]
        cos, sin = model.model.rotary_emb(
            self.embedding, torch.arange(self.num_tokens + room)[None]
        )
        half = self.head_dim // 2
        self.turn_P1D = torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])
        self.layers = [_Layer(layer, self.head_dim) for layer in model.model.layers]
        self.head = _Product([model.lm_head.weight], [model.lm_head.bias], model.model.norm.weight)
        self.buffers = [self._filled(layer, cell_RW, room) for layer in cache.layers]
        self._show()

    def step(self, token_R: Tensor, position: Tensor | int, mask_RC: Tensor | None) -> Tensor:
        """Logits (R, V) after `token_R`, which stands at `position`, (R,) or the same number for all rows.

        `mask_RC` is added to the scores of the columns, the new one included; None if rows look at all of them.
        """
        rows, heads, num_rotated = len(token_R), self.num_heads, self.num_rotated
        column, width = self.num_tokens, self.num_tokens + 1
        turn_R1D = self.turn_P1D[position]
        mask_R11C = None if mask_RC is None else mask_RC[:, None, None]
        is_grouped = self.num_kv_heads < heads
        x_RH = F.embedding(token_R, self.embedding)
        for layer, buffer_RTHD, keys, values in zip(
            self.layers, self.buffers, self.keys, self.values, strict=True
        ):
            all_RHD = layer.attention(self._normed(x_RH)).view(
                rows, -1, self.head_dim
            )  # heads of query, key, value
            pairs = all_RHD[:, :num_rotated].unflatten(2, (-1, 2))
            torch.view_as_complex(pairs).mul_(turn_R1D)
            buffer_RTHD[:, column] = all_RHD[:, heads:]
            seen_RH1D = F.scaled_dot_product_attention(
                all_RHD[:, :heads, None],
                keys[:, :, :width],
                values[:, :, :width],
                attn_mask=mask_R11C,
                enable_gqa=is_grouped,
            )
            layer.output.add_to(x_RH, seen_RH1D.view(rows, -1))
            gate_RI, up_RI = layer.gate_up(self._normed(x_RH)).chunk(2, 1)
            layer.down.add_to(x_RH, F.silu(gate_RI).mul_(up_RI))
        self.num_tokens = width
        return self.head(self._normed(x_RH))

    def select(self, rows: Tensor) -> None:
        """Only these rows, in this order."""
        self.buffers = [buffer.index_select(0, rows) for buffer in self.buffers]
        self._show()

    def _normed(self, x_RH: Tensor) -> Tensor:
        """Each row divided by its length; the product that follows has the rest of the norm in its weight.

        x / sqrt(mean(x^2) + eps) is sqrt(H) x / sqrt(|x|^2 + H eps), with H entries in a row.
        """
        return x_RH / torch.hypot(
            torch.linalg.vector_norm(x_RH, dim=1, keepdim=True), self.norm_floor
        )

    def _filled(self, layer: Any, cell_RW: Tensor, room: int) -> Tensor:
        """A buffer (rows, tokens, heads of key and of value, head size) with the prompts, and room for what comes."""
        keys_CHD, values_CHD = (
            states.transpose(1, 2).flatten(0, 1) for states in (layer.keys, layer.values)
        )
        both_CHD = torch.cat([keys_CHD[..., _pair_order(self.head_dim)], values_CHD], dim=1)
        rows, width = cell_RW.shape
        buffer = both_CHD.new_empty(rows, width + room, *both_CHD.shape[1:])
        buffer[:, :width] = both_CHD[cell_RW]
        return buffer

    def _show(self) -> None:
        """Keys and values as attention reads them, (rows, heads, tokens, head size)."""
        kv_heads = self.num_kv_heads
        self.keys = [buffer[:, :, :kv_heads].transpose(1, 2) for buffer in self.buffers]
        self.values = [buffer[:, :, kv_heads:].transpose(1, 2) for buffer in self.buffers]


class _Product:
    """Linear maps of one input side by side, as one product `x @ weight`, with the norm before them folded in."""

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor | None], norm: Tensor | None = None
    ) -> None:
        weight = torch.cat(weights)
        self.weight = (
            (weight if norm is None else weight * (norm * len(norm) ** 0.5)).t().contiguous()
        )
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            zeros = (weight.new_zeros(len(weight)) for weight in weights)
            self.bias = torch.cat(
                [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
            )

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        total.addmm_(x, self.weight)
        if self.bias is not None:
            total += self.bias


class _Layer:
    """The products of one layer."""

    def __init__(self, layer: Any, head_dim: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
        self.attention = _Product(
            [_in_pairs(query.weight, head_dim), _in_pairs(key.weight, head_dim), value.weight],
            [_in_pairs(query.bias, head_dim), _in_pairs(key.bias, head_dim), value.bias],
            layer.input_layernorm.weight,
        )
        self.output = _Product([attention.o_proj.weight], [attention.o_proj.bias])
        self.gate_up = _Product(
            [mlp.gate_proj.weight, mlp.up_proj.weight],
            [mlp.gate_proj.bias, mlp.up_proj.bias],
            layer.post_attention_layernorm.weight,
        )
        self.down = _Product([mlp.down_proj.weight], [mlp.down_proj.bias])


def _pair_order(head_dim: int) -> Tensor:
    """The entries of a head such that the two that are rotated together stand side by side: 0, D/2, 1, D/2 + 1, ..."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def _in_pairs(weight: Any, head_dim: int) -> Any:
    """The rows of a weight, or the entries of a bias, in that order; None stays None."""
    return (
        None
        if weight is None
        else weight.unflatten(0, (-1, head_dim))[:, _pair_order(head_dim)].flatten(0, 1)
    )
