"""One token at a time through a small model on a CPU, without the modules of `transformers`.

A small model spends most of a decoding step between operations: modules, hooks, masks and argument checks around
matrix products of microseconds. Here a step is a handful of tensor operations per layer. The weights of a call are
prepared once: norms are folded into the products that follow them, and query, key and value, the two rotated halves of
query and key included, are one product, as are gate and up. The prompts, and every model that is not of this kind, go
through the model itself.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

from roll.engines.kv_cache import RoomyLayer

MODEL_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
STATIC_ROPE_TYPES = ("default", "linear", "llama3")  # angles that depend on the position alone
MAX_PARAMETERS = 50_000_000  # with more, the products take the time, and copies of weights the memory


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
        num_parameters += sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
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
            or (type(parameter) is nn.Parameter and parameter.dtype == torch.float32 and not parameter.is_cuda)
            for parameter in module._parameters.values()
        )
    )


class SmallDecoder:
    """The next logits of a batch, given each row's newest token, with the weights as they are now.

    `cache` holds what came before and gets the new keys and values; it must be one that `make_cache` made for a model
    that `can_decode`. `num_positions` is how far rows will get.
    """

    def __init__(self, model: Any, cache: DynamicCache, num_positions: int) -> None:
        config = model.config
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self.part_sizes = (self.num_heads + self.num_kv_heads,) * 2 + (self.num_kv_heads,)
        self.norm_floor = torch.tensor((config.hidden_size * config.rms_norm_eps) ** 0.5)
        self.embedding = model.model.embed_tokens.weight
        positions_1P = torch.arange(num_positions)[None]
        self.cos_P1D, self.sin_P1D = (
            table[0][:, None] for table in model.model.rotary_emb(self.embedding, positions_1P)
        )
        self.caches = [cast(RoomyLayer, layer) for layer in cache.layers]
        self.layers = [_Layer(layer, self.head_dim) for layer in model.model.layers]
        self.head = _Product.of(model.lm_head, norm=model.model.norm.weight)

    def step(self, token_R: Tensor, position: Tensor | int, mask_RC: Tensor | None) -> Tensor:
        """Logits (R, V) after `token_R`, which stands at `position`, (R,) or the same number for all rows.

        `mask_RC` is added to the scores of the columns, the new one included; None if rows look at all of them.
        """
        rows, heads, kv_heads = len(token_R), self.num_heads, self.num_kv_heads
        cos_R1D, sin_R1D = self.cos_P1D[position], self.sin_P1D[position]
        mask_R11C = None if mask_RC is None else mask_RC[:, None, None]
        x_RH = F.embedding(token_R, self.embedding)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            # Heads of: query and key, the same turned by a quarter, value.
            all_RHD = layer.attention(self._normed(x_RH)).view(rows, -1, self.head_dim)
            straight_RHD, turned_RHD, value_RHD = torch.split_with_sizes(all_RHD, self.part_sizes, 1)
            rotated_RHD = torch.addcmul(straight_RHD * cos_R1D, turned_RHD, sin_R1D)
            keys, values = cache.append(rotated_RHD[:, heads:], value_RHD)
            seen_RH1D = F.scaled_dot_product_attention(
                rotated_RHD[:, :heads, None], keys, values, attn_mask=mask_R11C, enable_gqa=kv_heads < heads
            )
            layer.output.add_to(x_RH, seen_RH1D.view(rows, -1))
            gate_RI, up_RI = layer.gate_up(self._normed(x_RH)).chunk(2, 1)
            layer.down.add_to(x_RH, F.silu(gate_RI).mul_(up_RI))
        return self.head(self._normed(x_RH))

    def _normed(self, x_RH: Tensor) -> Tensor:
        """Each row divided by its length; the product that follows has the rest of the norm in its weight.

        x / sqrt(mean(x^2) + eps) is sqrt(H) x / sqrt(|x|^2 + H eps), with H entries in a row.
        """
        return x_RH / torch.hypot(torch.linalg.vector_norm(x_RH, dim=1, keepdim=True), self.norm_floor)


class _Product:
    """Linear maps of one input side by side, as one product `x @ weight`, with the norm before them folded in."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None], norm: Tensor | None = None) -> None:
        weight = torch.cat(weights)
        self.weight = (weight if norm is None else weight * (norm * len(norm) ** 0.5)).t().contiguous()
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            zeros = (weight.new_zeros(len(weight)) for weight in weights)
            self.bias = torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])

    @classmethod
    def of(cls, *linears: nn.Linear, norm: Tensor | None = None) -> _Product:
        return cls([linear.weight for linear in linears], [linear.bias for linear in linears], norm)

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
        turned = [attention.q_proj, attention.k_proj]
        linears = [*turned, *turned, attention.v_proj]
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        for index in (2, 3):
            weights[index] = _turn(weights[index], head_dim)
            biases[index] = None if biases[index] is None else _turn(biases[index], head_dim)
        self.attention = _Product(weights, biases, layer.input_layernorm.weight)
        self.output = _Product.of(attention.o_proj)
        self.gate_up = _Product.of(mlp.gate_proj, mlp.up_proj, norm=layer.post_attention_layernorm.weight)
        self.down = _Product.of(mlp.down_proj)


def _turn(weight: Tensor, head_dim: int) -> Tensor:
    """What gives (-second half, first half) of each head where `weight` (or a bias) gives (first half, second half)."""
    first, second = weight.unflatten(0, (-1, 2, head_dim // 2)).unbind(1)
    return torch.stack([-second, first], 1).flatten(0, 2)
