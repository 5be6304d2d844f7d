"""One token at a time through a small model on a CPU, without the modules of `transformers`.

A small model spends most of a decoding step between operations: modules, hooks, masks and argument
checks around matrix products of microseconds. Here a step is a handful of tensor operations per
layer. The weights of a call are prepared once: norms are folded into the products that follow them;
query, key and value are one product, as are gate and up; the entries of a head are ordered in
pairs, so that the rotary embedding is one product of complex numbers. The prompts, and every model
that is not of this kind, go through the model itself. Without it GRPO on a CPU is not twice as fast
as TRL.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

MODEL_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
STATIC_ROPE_TYPES = ("default", "linear", "llama3")  # angles that depend on the position alone
MAX_PARAMETERS = 50_000_000  # with more, the products take the time, and copies of weights memory


def can_decode(model: Any) -> bool:
    """Whether `SmallDecoder` computes what this model does: a plain float32 Llama on a CPU."""
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
        # Nobody may listen to a module or have replaced what it does. The head may have a forward
        # of its own: `use_linear_logits` gives it one.
        is_replaced = "forward" in module.__dict__ and module is not head
        is_adapted = isinstance(module, nn.Linear) and type(module) is not nn.Linear
        if module._forward_hooks or module._forward_pre_hooks or is_replaced or is_adapted:
            return False
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter or parameter.dtype != torch.float32:
                return False
            if parameter.is_cuda:
                return False
            num_parameters += parameter.numel()
    return num_parameters <= MAX_PARAMETERS


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
        self.norm_floor = torch.tensor((config.hidden_size * config.rms_norm_eps) ** 0.5)
        self.embedding = model.model.embed_tokens.weight
        rows, width = cell_RW.shape
        self.num_tokens = width
        cos, sin = model.model.rotary_emb(self.embedding, torch.arange(width + room)[None])
        half = self.head_dim // 2
        self.turn_P1D = torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])
        # The entries of a head that are rotated together side by side: 0, D/2, 1, D/2 + 1, ...
        order = torch.arange(self.head_dim).view(2, -1).t().flatten()

        def in_pairs(weight: Any) -> Any:
            if weight is None:
                return None
            return weight.unflatten(0, (-1, self.head_dim))[:, order].flatten(0, 1)

        self.layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
            norm = layer.input_layernorm.weight
            weights = [in_pairs(query.weight), in_pairs(key.weight), value.weight]
            biases = [in_pairs(query.bias), in_pairs(key.bias), value.bias]
            heads = _Product(weights, biases, norm)
            output = _Product([attention.o_proj.weight], [attention.o_proj.bias])
            both = (mlp.gate_proj, mlp.up_proj)
            norm = layer.post_attention_layernorm.weight
            gate_up = _Product([m.weight for m in both], [m.bias for m in both], norm)
            down = _Product([mlp.down_proj.weight], [mlp.down_proj.bias])
            self.layers.append((heads, output, gate_up, down))
        self.head = _Product([model.lm_head.weight], [model.lm_head.bias], model.model.norm.weight)
        # (rows, tokens, heads of key and of value, head size): the prompts, and room.
        self.buffers = []
        prompts: list[Any] = cache.layers
        for layer in prompts:
            keys_CHD = layer.keys.transpose(1, 2).flatten(0, 1)
            values_CHD = layer.values.transpose(1, 2).flatten(0, 1)
            both_CHD = torch.cat([keys_CHD[..., order], values_CHD], dim=1)
            buffer = both_CHD.new_empty(rows, width + room, *both_CHD.shape[1:])
            buffer[:, :width] = both_CHD[cell_RW]
            self.buffers.append(buffer)
        self._show()

    def step(self, token_R: Tensor, position: Tensor | int, mask_RC: Tensor | None) -> Tensor:
        """Logits (R, V) after `token_R`, which stands at `position`, (R,) or one for all rows.

        `mask_RC` is added to the scores of the columns, the new one included; None if rows look at
        all of them.
        """
        rows, heads, column = len(token_R), self.num_heads, self.num_tokens
        width, num_rotated = column + 1, heads + self.num_kv_heads
        turn_R1D = self.turn_P1D[position]
        mask_R11C = None if mask_RC is None else mask_RC[:, None, None]
        x_RH = F.embedding(token_R, self.embedding)
        for layer, buffer_RTHD, keys, values in zip(
            self.layers, self.buffers, self.keys, self.values, strict=True
        ):
            attention, output, gate_up, down = layer
            # Heads of query, key and value, one after the other.
            all_RHD = attention(self._normed(x_RH)).view(rows, -1, self.head_dim)
            pairs = all_RHD[:, :num_rotated].unflatten(2, (-1, 2))
            torch.view_as_complex(pairs).mul_(turn_R1D)
            buffer_RTHD[:, column] = all_RHD[:, heads:]
            seen_RH1D = F.scaled_dot_product_attention(
                all_RHD[:, :heads, None],
                keys[:, :, :width],
                values[:, :, :width],
                attn_mask=mask_R11C,
                enable_gqa=self.num_kv_heads < heads,
            )
            output.add_to(x_RH, seen_RH1D.view(rows, -1))
            gate_RI, up_RI = gate_up(self._normed(x_RH)).chunk(2, 1)
            down.add_to(x_RH, F.silu(gate_RI).mul_(up_RI))
        self.num_tokens = width
        return self.head(self._normed(x_RH))

    def select(self, rows: Tensor) -> None:
        """Only these rows, in this order."""
        self.buffers = [buffer.index_select(0, rows) for buffer in self.buffers]
        self._show()

    def _normed(self, x_RH: Tensor) -> Tensor:
        """Each row divided by its length; the product that follows has the rest of the norm.

        x / sqrt(mean(x^2) + eps) is sqrt(H) x / sqrt(|x|^2 + H eps), with H entries in a row.
        """
        length_R1 = torch.linalg.vector_norm(x_RH, dim=1, keepdim=True)
        return x_RH / torch.hypot(length_R1, self.norm_floor)

    def _show(self) -> None:
        """Keys and values as attention reads them, (rows, heads, tokens, head size)."""
        kv_heads = self.num_kv_heads
        self.keys = [buffer[:, :, :kv_heads].transpose(1, 2) for buffer in self.buffers]
        self.values = [buffer[:, :, kv_heads:].transpose(1, 2) for buffer in self.buffers]


class _Product:
    """Linear maps of one input side by side, as one product, with the norm before them folded
    in."""

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor | None], norm: Tensor | None = None
    ) -> None:
        weight = torch.cat(weights)
        if norm is not None:
            weight = weight * (norm * len(norm) ** 0.5)
        self.weight = weight.t().contiguous()
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            parts = [
                part.new_zeros(len(part)) if bias is None else bias
                for part, bias in zip(weights, biases, strict=True)
            ]
            self.bias = torch.cat(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        total.addmm_(x, self.weight)
        if self.bias is not None:
            total += self.bias
