"""Generation with a `transformers` model on one device: our own batched sampling loop over its KV cache.

Prompts are sorted by length and left padded; the prompt of a request is computed once for all of its samples; rows that
have ended leave the batch. The loop works in rounds of a few tokens: within a round nothing is copied to the host, and
what a row drew after its end is dropped when the round is looked at. Sampling is a pure function of a row's logits, key
and position (`roll.engines.sampling`), so none of this can be seen in the samples.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from roll.engines.engine import Decode, OnOutput, cut_at_stop_string
from roll.engines.kv_cache import bytes_per_token, make_cache
from roll.engines.request import FinishReason, GenerationOutput, GenerationRequest, SamplingParams
from roll.engines.sampling import draw, stream_key, transform, uniforms
from roll.models.lora import base_model
from roll.ops.linear_logits import LinearLogits

TOKENS_PER_ROUND = {"cpu": 4, "cuda": 8}
CPU_CACHE_BYTES = 2 * 2**30  # fixed, so that batches, and the last bits of logits, are the same on every machine
CUDA_CACHE_SHARE = 0.6  # of the memory that is free
LEAVE_TOGETHER = 0.25  # rows leave once this share of the batch has ended: the cache of the others is copied then
LOGITS_COPIES = 6  # float32 tensors of the size of the logits that drawing a token needs


class HFEngine:
    """Answers requests with a causal language model of `transformers`, or a `PeftModel` around one.

    Args:
        model: read at every call, so it may be the very model that is trained.
        eos_token_ids: end every response; the end token is part of it.
        decode: text of token ids, special tokens included; only needed for stop strings.
        max_batch_size: most rows at a time; by default what fits into the memory (2 GiB of cache on a CPU).
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
        self.model = model
        self.pad_token_id = pad_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decode = decode
        self.max_batch_size = max_batch_size
        self.policy_version = 0
        self._one_call = threading.Lock()
        self._aborting = threading.Lock()
        self._running: frozenset[str] = frozenset()
        self._aborted: frozenset[str] = frozenset()

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_output: OnOutput | None = None
    ) -> list[GenerationOutput]:
        """See `Engine.generate`. Calls of several threads take turns."""
        with self._one_call:
            request_ids = frozenset(request.request_id for request in requests)
            if len(request_ids) < len(requests):
                raise ValueError("two requests of one call have the same request_id")
            with self._aborting:
                self._running, self._aborted = request_ids, frozenset()
            was_training = self.model.training
            self.model.eval()
            try:
                return self._generate(requests, on_output or (lambda output: None))
            finally:
                self.model.train(was_training)
                with self._aborting:
                    self._running = self._aborted = frozenset()

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `Engine.abort`. Takes effect before the next token."""
        with self._aborting:
            self._aborted |= self._running if request_ids is None else self._running & frozenset(request_ids)

    def reset_prefix_cache(self) -> None:
        """Nothing is kept from one call to the next."""

    def _generate(self, requests: Sequence[GenerationRequest], on_output: OnOutput) -> list[GenerationOutput]:
        outputs: dict[tuple[str, int], GenerationOutput] = {}
        version = self.policy_version

        def finish(row: _Row) -> None:
            output = row.output(version)
            outputs[output.request_id, output.sample_index] = output
            on_output(output)

        waiting: list[_Row] = []
        max_tokens = getattr(self._config, "max_position_embeddings", None)
        for request in requests:
            problem = self._problem(request, max_tokens)
            for index in range(request.num_samples):
                row = _Row(request, index, self._limit(request, max_tokens), self.eos_token_ids, self.decode)
                if problem is None:
                    waiting.append(row)
                else:
                    row.fail(problem)
                    finish(row)
        with torch.no_grad():
            for rows in self._batches(waiting):
                for row in rows:
                    if self.is_aborted(row):
                        row.finish_reason = "abort"
                        finish(row)
                alive = [row for row in rows if row.finish_reason is None]
                batch = _Batch(self, alive) if alive else None
                while batch is not None and batch.rows:
                    for row in batch.advance():
                        finish(row)
        return [outputs[request.request_id, index] for request in requests for index in range(request.num_samples)]

    # -- requests ----------------------------------------------------------------------------------------------------

    def _problem(self, request: GenerationRequest, max_tokens: int | None) -> str | None:
        """Why the model cannot take this request, "what: details"."""
        ids = (*request.prompt_ids, *request.prefix_ids)
        vocab_size = self._config.vocab_size
        if not request.prompt_ids:
            return "empty prompt: a request needs at least one prompt token"
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            return f"unknown token: id {wrong}, the vocabulary has {vocab_size}"
        if max_tokens is not None and len(ids) >= max_tokens:
            return f"prompt too long: {len(ids)} tokens leave no room for an answer, the model takes {max_tokens}"
        if len(request.prefix_ids) >= request.sampling.max_new_tokens:
            return f"nothing to generate: {len(request.prefix_ids)} prefix tokens reach max_new_tokens"
        if request.sampling.stop_strings and self.decode is None:
            return "no decoder: stop strings need an engine that was given `decode`"
        return None

    @staticmethod
    def _limit(request: GenerationRequest, max_tokens: int | None) -> int:
        """How many new tokens the request may get; what the model takes is the last limit."""
        limit = request.sampling.max_new_tokens - len(request.prefix_ids)
        if max_tokens is None:
            return limit
        return min(limit, max_tokens - len(request.prompt_ids) - len(request.prefix_ids))

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Rows that are sampled alike, longest prompts first, samples of a request side by side."""
        by_sampling: dict[tuple[float, ...], list[_Row]] = {}
        for row in rows:
            by_sampling.setdefault(_sampling_group(row.request.sampling), []).append(row)
        for group in by_sampling.values():
            group.sort(key=lambda row: row.num_given, reverse=True)  # stable
            while group:
                most = self._rows_that_fit(group[0].num_given + max(row.limit for row in group))
                yield group[:most]
                del group[:most]

    def _rows_that_fit(self, num_tokens: int) -> int:
        if self.max_batch_size is not None:
            return self.max_batch_size
        parameter = next(self.model.parameters())
        budget = CPU_CACHE_BYTES
        if parameter.is_cuda:
            unused = torch.cuda.memory_reserved(parameter.device) - torch.cuda.memory_allocated(parameter.device)
            budget = int(CUDA_CACHE_SHARE * (torch.cuda.mem_get_info(parameter.device)[0] + unused))
        logits = 4 * LOGITS_COPIES * self._config.vocab_size
        return max(budget // (bytes_per_token(self._config, parameter.dtype) * num_tokens + logits), 1)

    # -- the model ---------------------------------------------------------------------------------------------------

    @property
    def _config(self) -> Any:
        return base_model(self.model).config.get_text_config(decoder=True)

    def is_aborted(self, row: _Row) -> bool:
        return row.request.request_id in self._aborted

    @property
    def any_aborted(self) -> bool:
        return bool(self._aborted)


def _sampling_group(sampling: SamplingParams) -> tuple[float, ...]:
    """What has to be equal for rows to be sampled together; keys, limits and stops are each row's own."""
    if sampling.is_greedy:
        return (0.0, sampling.repetition_penalty)
    return (sampling.temperature, sampling.repetition_penalty, sampling.top_k, sampling.top_p, sampling.min_p)


@dataclass(eq=False)
class _Row:
    """One sample on its way."""

    request: GenerationRequest
    sample_index: int
    limit: int
    eos_token_ids: frozenset[int]
    decode: Decode | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_given(self) -> int:
        """Tokens that are there before the first one is generated."""
        return len(self.request.prompt_ids) + len(self.request.prefix_ids)

    def take(self, token_ids: list[int], log_probs: list[float]) -> None:
        """The next tokens; those after the row's end are ignored."""
        sampling = self.request.sampling
        for token_id, log_prob in zip(token_ids, log_probs, strict=True):
            if log_prob != log_prob:  # NaN
                return self.fail("logits are not numbers: the model's weights or its precision are broken")
            self.token_ids.append(token_id)
            self.log_probs.append(log_prob)
            if token_id in self.eos_token_ids or token_id in sampling.stop_token_ids:
                self.finish_reason = "stop"
                return None
            if sampling.stop_strings and self._stops_at_text():
                self.finish_reason = "stop"
                return None
            if len(self.token_ids) == self.limit:
                self.finish_reason = "length"
                return None
        return None

    def fail(self, error: str) -> None:
        self.token_ids, self.log_probs = [], []
        self.finish_reason, self.error = "error", error

    def output(self, policy_version: int) -> GenerationOutput:
        assert self.finish_reason is not None
        return GenerationOutput(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            error=self.error,
        )

    def _stops_at_text(self) -> bool:
        """Whether the last token completes a stop string; the response is then cut as the request wants it."""
        assert self.decode is not None
        sampling = self.request.sampling
        response = [*self.request.prefix_ids, *self.token_ids]
        # A token has at least a byte. The margin is for characters that begin before the tail.
        tail = response[-max(len(stop.encode()) for stop in sampling.stop_strings) - 8 :]
        text = self.decode(tail)
        if not any(stop in text for stop in sampling.stop_strings):
            return False
        kept = cut_at_stop_string(
            response, self.decode, sampling.stop_strings, include=sampling.include_stop_str_in_output
        )
        if kept is None:
            return False
        kept = max(kept - len(self.request.prefix_ids), 0)
        del self.token_ids[kept:], self.log_probs[kept:]
        return True


class _Batch:
    """Rows that are generated together: their cache, and the logits of their next tokens."""

    def __init__(self, engine: HFEngine, rows: list[_Row]) -> None:
        self.engine = engine
        self.model = engine.model
        self.rows = rows
        self.sampling = rows[0].request.sampling
        self.device = next(self.model.parameters()).device
        self.num_new = 0
        self._gone: set[_Row] = set()  # rows that have ended and still have a place
        config = base_model(self.model).config
        text_config = config.get_text_config(decoder=True)
        # A mask of four dimensions is taken as it is; models with other kinds of attention make their own from two.
        layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
        self.takes_full_mask = layer_types == {"full_attention"} and text_config._attn_implementation == "sdpa"
        forward = inspect.signature(base_model(self.model).forward).parameters
        self.options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in forward else {})

        most_new = max(row.limit for row in rows)
        self.cache = make_cache(config, room=most_new if self.device.type == "cpu" else min(most_new, 1024))
        self._prefill()
        self.keys_R = self._tensor(
            [stream_key(row.request.sampling.seed, row.request.keys[row.sample_index]) for row in rows]
        )
        self.offsets_R1 = self._tensor([[len(row.request.prefix_ids)] for row in rows])

    def advance(self) -> list[_Row]:
        """Generate the next few tokens of all rows. Returns the rows that ended, which leave the batch."""
        most = max(row.limit - len(row.token_ids) for row in self.rows if row.finish_reason is None)
        num_steps = min(TOKENS_PER_ROUND.get(self.device.type, 8), most)
        uniforms_RT = self._uniforms(num_steps)
        tokens: list[Tensor] = []
        log_probs: list[Tensor] = []
        for step in range(num_steps):
            if self.engine.any_aborted and any(self.engine.is_aborted(row) for row in self.rows):
                break
            token_R, log_prob_R = self._draw(None if uniforms_RT is None else uniforms_RT[:, step])
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

    # -- steps -------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Run the model over the prompts, each once, and deal out their caches and logits to the rows."""
        index_of: dict[str, int] = {}
        given: list[list[int]] = []
        for row in self.rows:
            if row.request.request_id not in index_of:
                index_of[row.request.request_id] = len(given)
                given.append([*row.request.prompt_ids, *row.request.prefix_ids])
        lengths_P = [len(ids) for ids in given]
        width = max(lengths_P)
        pad = self.engine.pad_token_id
        ids_PW = self._tensor([[pad] * (width - len(ids)) + ids for ids in given])
        self.mask_RC: Tensor | None = None
        self.positions_R1: Tensor | None = None
        inputs: dict[str, Any] = {}
        if min(lengths_P) < width:
            is_token_PW = torch.arange(width, device=self.device) >= width - self._tensor(lengths_P)[:, None]
            inputs = {"attention_mask": is_token_PW, "position_ids": (is_token_PW.cumsum(1) - 1).clamp_(min=0)}
            self.mask_RC = is_token_PW
            self.positions_R1 = self._tensor(lengths_P)[:, None]
        self.logits_RV = self._forward(ids_PW, **inputs)
        if self.sampling.repetition_penalty != 1:
            # Columns of padding stand for the row's last token, which is always there.
            real_PW = ids_PW if self.mask_RC is None else torch.where(self.mask_RC, ids_PW, ids_PW[:, -1:])
            self.seen_RV: Tensor | None = torch.zeros_like(self.logits_RV, dtype=torch.bool).scatter_(1, real_PW, True)
        else:
            self.seen_RV = None
        self._select(self._tensor([index_of[row.request.request_id] for row in self.rows]))
        if self.mask_RC is not None:
            most_new = max(row.limit for row in self.rows)
            self.mask_RC = torch.cat([self.mask_RC, self.mask_RC.new_ones(len(self.rows), most_new)], dim=1)

    def _forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Logits after the last column, (rows, V), in float32."""
        logits = self.model(input_ids=ids, past_key_values=self.cache, **inputs, **self.options).logits[:, -1]
        return (logits.materialize() if isinstance(logits, LinearLogits) else logits).float()

    def _uniforms(self, num_steps: int) -> Tensor | None:
        if self.sampling.is_greedy:
            return None
        steps_T = torch.arange(self.num_new, self.num_new + num_steps, device=self.device)
        return uniforms(self.keys_R, self.offsets_R1 + steps_T)

    def _draw(self, uniforms_R: Tensor | None) -> tuple[Tensor, Tensor]:
        token_R, log_prob_R = draw(transform(self.logits_RV, self.sampling, self.seen_RV), uniforms_R)
        if self.seen_RV is not None:
            self.seen_RV.scatter_(1, token_R[:, None], True)
        return token_R, log_prob_R

    def _feed(self, token_R: Tensor) -> None:
        """Append a token to every row and compute what comes next."""
        inputs: dict[str, Any] = {}
        if self.mask_RC is not None:
            mask_RC = self.mask_RC[:, : self.cache.get_seq_length() + 1]
            inputs["attention_mask"] = mask_RC[:, None, None] if self.takes_full_mask else mask_RC
            inputs["position_ids"] = self.positions_R1
        self.logits_RV = self._forward(token_R[:, None], **inputs)
        if self.positions_R1 is not None:
            self.positions_R1 = self.positions_R1 + 1

    def _leave(self) -> list[_Row]:
        """The rows that have just ended. Their places are given up once a quarter of the batch is done."""
        for row in self.rows:
            if row.finish_reason is None and self.engine.is_aborted(row):
                row.finish_reason = "abort"
        ended = [row for row in self.rows if row.finish_reason is not None and row not in self._gone]
        self._gone.update(ended)
        alive = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
        if len(alive) <= len(self.rows) * (1 - LEAVE_TOGETHER):
            self.rows = [self.rows[index] for index in alive]
            self._gone.clear()
            if alive:
                self._select(self._tensor(alive))
        return ended

    def _select(self, indices: Tensor) -> None:
        """Only these rows, in this order."""
        self.cache.batch_select_indices(indices)
        for name in ("logits_RV", "seen_RV", "mask_RC", "positions_R1", "keys_R", "offsets_R1"):
            tensor = getattr(self, name, None)
            if tensor is not None:
                setattr(self, name, tensor[indices])

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)
