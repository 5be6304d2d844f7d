"""Generation with a `transformers` model on one device: our own sampling loop over its KV cache.

Prompts are sorted by length and left padded; the prompt of a request is computed once for all of
its samples; rows that have ended leave the batch. A small model on a CPU takes its steps without
its modules (`SmallDecoder`), a dense one on a GPU as a recorded graph (`GraphDecoder`). The loop
works in rounds of a few tokens: within a round nothing is copied to the host, and what a row drew
after its end is dropped. Sampling is a pure function of a row's logits, key and position
(`roll.engines.sampling`), so none of this can be seen in the samples. `generate` of transformers is
several times slower and its samples depend on the batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from roll.engines.graph_decoder import MIN_STEPS, GraphDecoder, can_record, make_cache
from roll.engines.request import Decode
from roll.engines.sample import Sample, SampleEngine
from roll.engines.sampling import draw, stream_key, transform, uniforms
from roll.engines.small_decoder import SmallDecoder, can_decode
from roll.models.lora import base_model
from roll.models.token_tree import ATTENTION as TREE_ATTENTION
from roll.models.token_tree import token_tree
from roll.ops.linear_logits import LinearLogits

TOKENS_PER_ROUND = 8
# Fixed, so that batches, and the last bits of logits, are the same on every machine.
CPU_CACHE_BYTES = 2 * 2**30
CUDA_CACHE_SHARE = 0.6  # of the memory that is free
# Rows leave once this share of the batch has ended: the cache of the others is copied then.
LEAVE_TOGETHER = 0.25
LEAVE_GRAPH_TOGETHER = 0.5  # the same where another graph has to be recorded
LOGITS_COPIES = 6  # float32 tensors of the size of the logits that drawing a token needs


class HFEngine(SampleEngine):
    """Answers requests with a causal language model of `transformers`, or a `PeftModel` around one.

    Args:
        model: read at every call, so it may be the very model that is trained.
        eos_token_ids: end every response; the end token is part of it.
        decode: text of token ids, special tokens included; only needed for stop strings.
        max_batch_size: most rows at a time; by default what fits into the memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        eos_token_ids: Collection[int],
        decode: Decode | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__(eos_token_ids=eos_token_ids, decode=decode)
        self.model = model
        self.pad_token_id = pad_token_id
        self.max_batch_size = max_batch_size

    @property
    def config(self) -> Any:
        return base_model(self.model).config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_tokens(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def reset_prefix_cache(self) -> None:
        """Nothing is kept from one call to the next."""

    @torch.inference_mode()
    def run(self, samples: list[Sample], finish: Callable[[Sample], None]) -> None:
        was_training = self.model.training
        self.model.eval()
        as_written: AbstractContextManager[Any] = nullcontext()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it is slow
            # Compiled blocks would be compiled again for every cache, and torch.compile cannot
            # translate the attention kernel of a recorded step.
            as_written = torch.compiler.set_stance("force_eager")
        try:
            with as_written:
                for rows in self._batches(samples):
                    alive = []
                    for row in rows:
                        if row.request.request_id in self.aborts:
                            row.finish_reason = "abort"
                            finish(row)
                        else:
                            alive.append(row)
                    batch = _Batch(self, alive) if alive else None
                    while batch is not None and batch.rows:
                        for row in batch.advance():
                            finish(row)
                    batch = None  # its cache makes room for the next
        finally:
            self.model.train(was_training)

    def _batches(self, rows: list[Sample]) -> Iterator[list[Sample]]:
        """Rows that are sampled alike, longest prompts first, samples of a request side by side."""
        by_sampling: dict[tuple[float, ...], list[Sample]] = {}
        for row in rows:
            # What has to be equal; keys, limits and stops are each row's own.
            one = row.request.sampling
            alike: tuple[float, ...] = (0.0, one.repetition_penalty)
            if not one.is_greedy:
                alike = (one.temperature, one.repetition_penalty, one.top_k, one.top_p, one.min_p)
            by_sampling.setdefault(alike, []).append(row)
        for group in by_sampling.values():
            group.sort(key=lambda row: row.num_given, reverse=True)  # stable
            while group:
                most = self._rows_that_fit(group[0].num_given + max(row.limit for row in group))
                yield group[:most]
                del group[:most]

    def _rows_that_fit(self, num_tokens: int) -> int:
        if self.max_batch_size is not None:
            return self.max_batch_size
        config, parameter = self.config, next(self.model.parameters())
        budget = CPU_CACHE_BYTES
        if parameter.is_cuda:
            device = parameter.device
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            budget = int(CUDA_CACHE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
        # Keys and values of one token of a plain transformer; an estimate for other models.
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        entries = 2 * config.num_hidden_layers * num_kv_heads * head_dim
        row_bytes = entries * parameter.dtype.itemsize * num_tokens
        return max(budget // (row_bytes + 4 * LOGITS_COPIES * config.vocab_size), 1)


def _logits(model: nn.Module, kv_cache: DynamicCache, **inputs: Any) -> Tensor:
    """In float32; tokens are added to the cache."""
    logits = model(past_key_values=kv_cache, use_cache=True, **inputs).logits
    return (logits.materialize() if isinstance(logits, LinearLogits) else logits).float()


def _last_logits(model: nn.Module, kv_cache: DynamicCache, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits after the last column, (rows, V)."""
    if _has_logits_to_keep(type(base_model(model))):
        inputs["logits_to_keep"] = 1
    return _logits(model, kv_cache, input_ids=ids, **inputs)[:, -1]


@cache
def _has_logits_to_keep(model_class: type[nn.Module]) -> bool:
    """Whether a model can compute the logits of the last position alone."""
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters


class _Batch:
    """Rows that are generated together: their cache, and the logits of their next tokens."""

    def __init__(self, engine: HFEngine, rows: list[Sample]) -> None:
        self.aborts = engine.aborts
        self.pad_token_id = engine.pad_token_id
        self.model = engine.model
        self.rows = rows
        self.sampling = rows[0].request.sampling
        self.device = next(self.model.parameters()).device
        self.num_new = 0
        self._gone: set[Sample] = set()  # rows that have ended and still have a place
        text = engine.config
        # A mask of four dimensions is taken as it is; models with other kinds of attention make
        # their own from two.
        layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
        is_plain = text._attn_implementation in ("sdpa", TREE_ATTENTION)
        self.takes_full_mask = layer_types == {"full_attention"} and is_plain

        self.is_small = can_decode(self.model)
        self.decoder: SmallDecoder | GraphDecoder | None = None
        most_new = max(row.limit for row in rows)
        room = most_new if self.device.type == "cpu" else min(most_new, 1024)
        self.cache = make_cache(base_model(self.model).config, 0 if self.is_small else room)
        self._prefill(most_new)
        keys = [
            stream_key(row.request.sampling.seed, row.request.keys[row.sample_index])
            for row in rows
        ]
        self.keys_R = self._tensor(keys)
        self.offsets_R1 = self._tensor([[len(row.request.prefix_ids)] for row in rows])

    def advance(self) -> list[Sample]:
        """Generate the next few tokens of all rows. Returns the rows that have just ended."""
        most = max(row.limit - len(row.token_ids) for row in self.rows if row.finish_reason is None)
        num_steps = min(TOKENS_PER_ROUND, most)
        uniforms_RT: Tensor | None = None
        if not self.sampling.is_greedy:
            steps_T = torch.arange(self.num_new, self.num_new + num_steps, device=self.device)
            uniforms_RT = uniforms(self.keys_R, self.offsets_R1 + steps_T)
        tokens: list[Tensor] = []
        log_probs: list[Tensor] = []
        for step in range(num_steps):
            if self.aborts and any(row.request.request_id in self.aborts for row in self.rows):
                break
            logits_RV = transform(self.logits_RV, self.sampling, self.seen_RV)
            token_R, log_prob_R = draw(
                logits_RV, None if uniforms_RT is None else uniforms_RT[:, step]
            )
            if self.seen_RV is not None:
                self.seen_RV.scatter_(1, token_R[:, None], True)
            tokens.append(token_R)
            log_probs.append(log_prob_R)
            if step + 1 < most:  # nobody needs what comes after the last token
                self._feed(token_R)
        if tokens:
            self.num_new += len(tokens)
            new_ids = torch.stack(tokens, dim=1).tolist()
            new_log_probs = torch.stack(log_probs, dim=1).tolist()
            for row, ids, values in zip(self.rows, new_ids, new_log_probs, strict=True):
                if row.finish_reason is None:
                    row.take(ids, values)
        return self._leave()

    def _prefill(self, most_new: int) -> None:
        """Run the model over the prompts, each once, and deal out caches and logits to the rows."""
        number_of: dict[tuple[int, ...], int] = {}
        rows = [(*row.request.prompt_ids, *row.request.prefix_ids) for row in self.rows]
        prompt_R = self._tensor([number_of.setdefault(ids, len(number_of)) for ids in rows])
        given = list(number_of)
        lengths_P1 = self._tensor([[len(ids)] for ids in given])
        width = max(map(len, given))
        padding = [self.pad_token_id]
        ids_PW = self._tensor([padding * (width - len(ids)) + list(ids) for ids in given])
        self.mask_RC: Tensor | None = None
        self.positions_R1: Tensor | None = None
        if min(map(len, given)) < width:
            self.mask_RC = torch.arange(width, device=self.device) >= width - lengths_P1
            self.positions_R1 = lengths_P1
        self.logits_RV, cell_PW = self._forward_prompts(ids_PW, lengths_P1)
        self.seen_RV: Tensor | None = None
        if self.sampling.repetition_penalty != 1:
            real_PW = ids_PW
            if self.mask_RC is not None:
                # Columns of padding stand for the row's last token, which is always there.
                real_PW = torch.where(self.mask_RC, ids_PW, ids_PW[:, -1:])
            none_seen = torch.zeros_like(self.logits_RV, dtype=torch.bool)
            self.seen_RV = none_seen.scatter_(1, real_PW, True)
        if self.is_small:
            self.decoder = SmallDecoder(self.model, self.cache, cell_PW[prompt_R], most_new)
        else:
            self.cache.batch_select_indices(prompt_R)
            if most_new >= MIN_STEPS and can_record(self.model, self.cache):
                logits = partial(_last_logits, self.model, self.cache)
                self.decoder = GraphDecoder(self.model, self.cache, logits)
        self._select_columns(prompt_R)
        if self.mask_RC is not None:
            new_RC = self.mask_RC.new_ones(len(self.rows), most_new)
            mask_RC = torch.cat([self.mask_RC, new_RC], dim=1)
            self.mask_RC = torch.where(mask_RC, 0.0, -torch.inf) if self.is_small else mask_RC

    def _forward_prompts(self, ids_PW: Tensor, lengths_P1: Tensor) -> tuple[Tensor, Tensor]:
        """Logits after the prompts, (P, V), and the cell of the cache of each of their tokens."""
        columns_PW = torch.arange(ids_PW.shape[1], device=self.device).expand_as(ids_PW)
        first_P1 = ids_PW.shape[1] - lengths_P1
        if self.is_small and base_model(self.model).config._attn_implementation == TREE_ATTENTION:
            # Conversations that began alike are computed once as far as they agree.
            from_left_PW = ids_PW.gather(1, (columns_PW + first_P1).clamp_(max=ids_PW.shape[1] - 1))
            tree = token_tree(from_left_PW, columns_PW < lengths_P1)
            if tree is not None:
                last_P = tree.node_BS.gather(1, lengths_P1 - 1)[:, 0]
                inputs: dict[str, Any] = {**tree.model_inputs(), "logits_to_keep": last_P}
                logits_PV = _logits(self.model, self.cache, **inputs)[0]
                return logits_PV, tree.node_BS.gather(1, (columns_PW - first_P1).clamp_(min=0))
        inputs = {}
        if self.mask_RC is not None:
            position_ids = (columns_PW - first_P1).clamp_(min=0)
            inputs = {"attention_mask": self.mask_RC, "position_ids": position_ids}
        logits_PV = _last_logits(self.model, self.cache, ids_PW, **inputs)
        return logits_PV, torch.arange(ids_PW.numel(), device=self.device).view_as(ids_PW)

    def _feed(self, token_R: Tensor) -> None:
        """Append a token to every row and compute what comes next."""
        column = self.cache.get_seq_length() if self.decoder is None else self.decoder.num_tokens
        mask_RC = None if self.mask_RC is None else self.mask_RC[:, : column + 1]
        if self.decoder is not None:
            position = column if self.positions_R1 is None else self.positions_R1[:, 0]
            self.logits_RV = self.decoder.step(token_R, position, mask_RC)
        else:
            inputs: dict[str, Any] = {}
            if mask_RC is not None:
                mask = mask_RC[:, None, None] if self.takes_full_mask else mask_RC
                inputs = {"attention_mask": mask, "position_ids": self.positions_R1}
            self.logits_RV = _last_logits(self.model, self.cache, token_R[:, None], **inputs)
        if self.positions_R1 is not None:
            self.positions_R1 = self.positions_R1 + 1

    def _leave(self) -> list[Sample]:
        """The rows that have just ended; their places go once a good part of the batch is done."""
        for row in self.rows:
            if row.finish_reason is None and row.request.request_id in self.aborts:
                row.finish_reason = "abort"
        ended = [
            row for row in self.rows if row.finish_reason is not None and row not in self._gone
        ]
        self._gone.update(ended)
        alive = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
        share = LEAVE_GRAPH_TOGETHER if isinstance(self.decoder, GraphDecoder) else LEAVE_TOGETHER
        if len(alive) <= len(self.rows) * (1 - share):
            self.rows = [self.rows[index] for index in alive]
            self._gone.clear()
            if alive:
                indices = self._tensor(alive)
                if self.decoder is None:
                    self.cache.batch_select_indices(indices)
                else:
                    self.decoder.select(indices)
                self._select_columns(indices)
        return ended

    def _select_columns(self, indices: Tensor) -> None:
        for name in ("logits_RV", "seen_RV", "mask_RC", "positions_R1", "keys_R", "offsets_R1"):
            tensor = getattr(self, name, None)
            if tensor is not None:
                setattr(self, name, tensor[indices])

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)
