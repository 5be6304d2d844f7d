"""`vllm`: generation with vLLM's engine, in its worker's process. The only module that imports
vllm.

Weights come from the role that trains: vLLM reloads them in place, from tensors of the same process
or of a broadcast. Then it is checked what vLLM computes with: parameters that can be read are
compared bit by bit, and layers that keep their weights in a packed form are run on a probe and
compared with the product they stand for. vLLM 0.32 on a CPU forgets to repack a head that is tied
to the embedding, so the check is needed.

`strategy_config` takes vLLM's engine arguments (`max_model_len`, `gpu_memory_utilization`,
`block_size`, `max_num_seqs`, `enable_prefix_caching`, ...). Log-probs are those of the distribution
that was sampled from, as in every engine. With both min-p and top-p, vLLM applies min-p first and
`hf_infer` last, as `transformers` does. An interrupted sample continues with fresh random numbers,
since vLLM's random streams cannot be entered in the middle.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from roll.configs.base import did_you_mean
from roll.configs.model_files import check_model_files, model_of_run
from roll.configs.strategy_info import STRATEGIES, VLLM_IGNORED
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.strategy import ForwardFunction, InferenceStrategy, ModelProvider
from roll.distributed.weight_sync import checksum
from roll.engines.request import Decode, end_tokens, text_of
from roll.engines.sample import Sample, SampleEngine
from roll.engines.sampling import stream_key
from roll.exceptions import ConfigError, MissingDependencyError, install_hint
from roll.models.checkpoint import random_states, restore_random_states
from roll.models.model_providers import DTYPES, default_tokenizer_provider

if TYPE_CHECKING:
    from roll.distributed.executor.worker import Worker

CPU_CACHE_BYTES = 2**30


class VllmStrategy(InferenceStrategy):
    """A model inside vLLM. It generates; it has no forward passes of its own and does not train."""

    info = STRATEGIES["vllm"]

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._engine: VLLMEngine | None = None
        self._delivered: dict[str, Tensor] = {}

    def initialize(self, model_provider: ModelProvider) -> None:
        """Start vLLM on the folder of `model_args`; the provider, which makes models of
        `transformers`, is not asked."""
        del model_provider
        model_args = self.worker_config.model_args
        check_model_files(model_args)
        folder = Path(model_args.model_name_or_path).expanduser()
        source = str(model_of_run(folder)) if folder.is_dir() else model_args.model_name_or_path
        with _process_left_alone():
            vllm = _import_vllm()
            self.tokenizer = default_tokenizer_provider(model_args)
            self.config = AutoConfig.from_pretrained(
                source,
                trust_remote_code=model_args.trust_remote_code,
                **model_args.model_config_kwargs,
            )
            options = self._engine_options(source)
            engine_config = vllm.EngineArgs(**options).create_engine_config()
            llm = vllm.LLMEngine(
                engine_config,
                vllm.Executor.get_class(engine_config),
                log_stats=False,
                multiprocess_mode=False,
            )
        try:
            generation_config = GenerationConfig.from_pretrained(source)
        except OSError:  # the model has none
            generation_config = None
        self._engine = VLLMEngine(
            llm,
            vocab_size=self.config.get_text_config(decoder=True).vocab_size,
            eos_token_ids=end_tokens(self.tokenizer, generation_config),
            decode=text_of(self.tokenizer),
        )
        self.has_weights = options["load_format"] != "dummy"

    def _engine_options(self, source: str) -> dict[str, Any]:
        """vLLM's engine arguments: ours, under those of `strategy_config`, which are checked."""
        vllm, args, worker = _import_vllm(), self.worker_config.model_args, self.worker
        given = {
            key: value for key, value in self.strategy_config.items() if key not in VLLM_IGNORED
        }
        known = [f.name for f in dataclasses.fields(vllm.EngineArgs) if not f.name.startswith("_")]
        for key in given:
            if key not in known:
                guess = did_you_mean(key, known) or "remove it"
                raise ConfigError(
                    f"strategy_config.{key}: vLLM has no such engine argument; {guess}"
                )
        text = self.config.get_text_config(decoder=True)
        most = text.max_position_embeddings
        ours: dict[str, Any] = {
            "model": source,
            "dtype": str(DTYPES[args.dtype]).removeprefix("torch."),
            "trust_remote_code": args.trust_remote_code,
            "hf_overrides": dict(args.model_config_kwargs),
            "seed": worker.pipeline_config.seed,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "load_format": "dummy" if args.random_init else "auto",
            "max_model_len": min(most, getattr(worker.pipeline_config, "sequence_length", most)),
        }
        if worker.device_index is None:
            size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            supported = vllm.CPUAttentionBackend.get_supported_head_sizes()
            if size not in supported:
                raise ConfigError(
                    f"vLLM on a CPU has no attention for heads of size {size} (hidden_size / "
                    f"num_attention_heads); it has {', '.join(map(str, supported))}. The strategy "
                    "hf_infer takes any model"
                )
            ours |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        elif worker.device_index != 0:
            raise ConfigError(
                "vLLM takes the first GPU of its process, and this worker has GPU "
                f"{worker.device_index}: use backend: ray, which gives each worker a process that "
                "sees its own GPU only"
            )
        return ours | given

    @property
    def generation_engine(self) -> VLLMEngine:
        assert self._engine is not None, "initialize() comes first"
        if not self.has_weights:
            raise RuntimeError(
                "vLLM was started with load_format dummy and has random weights: update them from "
                "the role that trains (model_update) before the first generation, or remove "
                "load_format"
            )
        self._engine.policy_version = self.policy_version
        return self._engine

    def forward_step(self, batch: DataProto, forward_func: ForwardFunction) -> NoReturn:
        raise RuntimeError(
            "vllm generates and computes no log-probs; give this role the strategy hf_infer or "
            "fsdp2_infer"
        )

    def load_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """vLLM keeps its memory; there is nothing to bring back."""

    def offload_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        """vLLM keeps its memory: `gpu_memory_utilization` leaves room for the other roles."""

    # -- weights -----------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names, shapes and dtypes of what vLLM takes, as tensors without storage."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                self.config,
                dtype=DTYPES[self.worker_config.model_args.dtype],
                trust_remote_code=self.worker_config.model_args.trust_remote_code,
            )
        return model.named_parameters()

    def share_model(self, source: InferenceStrategy) -> bool:
        """vLLM has a layout of its own: weights are copied."""
        return False

    def receive_weights(self, buckets: Iterator[Mapping[str, Tensor]]) -> None:
        """Reload all weights in place, and forget what was computed with the old ones."""
        assert self._engine is not None
        sampled = self.sync_plan.sampled_names
        self._delivered = {}

        def stream() -> Iterator[tuple[str, Tensor]]:
            for bucket in buckets:
                for name, weight in bucket.items():
                    if name in sampled:
                        self._delivered[name] = weight
                    yield name, weight

        weights = stream()
        self._engine.on_model(lambda worker: _reload(worker, weights))
        for name, _ in weights:
            raise RuntimeError(f"weight sync: vLLM stopped reading before {name}")
        self._engine.reset_prefix_cache()
        self.has_weights = True

    def weight_checksums(self, names: Collection[str]) -> dict[str, int]:
        """Of what vLLM holds; of what was delivered, where a probe shows that vLLM uses it."""
        assert self._engine is not None
        delivered = {name: weight for name, weight in self._delivered.items() if name in names}
        return self._engine.on_model(
            lambda worker: held_checksums(worker.model_runner.get_model(), delivered)
        )


class VLLMEngine(SampleEngine):
    """Answers requests with vLLM. A sample is a request of its own there; the prefix cache shares
    the prompt of a group."""

    def __init__(
        self, llm: Any, *, vocab_size: int, eos_token_ids: Collection[int], decode: Decode | None
    ) -> None:
        super().__init__(eos_token_ids=eos_token_ids, decode=decode)
        self.llm = llm  # vLLM's LLMEngine
        self._vocab_size = vocab_size
        self._num_requests = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_tokens(self) -> int | None:
        return self.llm.model_config.max_model_len

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of old weights. Only between calls: running requests use
        theirs."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def on_model(self, function: Callable[[Any], Any]) -> Any:
        """The result of `function` with vLLM's worker, which holds the model."""
        return self.llm.collective_rpc(function)[0]

    def run(self, samples: list[Sample], finish: Callable[[Sample], None]) -> None:
        vllm = _import_vllm()
        waiting: dict[str, Sample] = {}
        for sample in samples:
            request, sampling = sample.request, sample.request.sampling
            key = f"{request.keys[sample.sample_index]}/{len(request.prefix_ids)}"
            # Stop strings are looked for by `Sample`, the same way for every engine.
            parameters = vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                max_tokens=sample.limit,
                seed=stream_key(sampling.seed, key),
                stop_token_ids=sorted(sample.eos_token_ids | set(sampling.stop_token_ids)),
                logprobs=0,
                detokenize=False,
                output_kind=vllm.RequestOutputKind.DELTA,
            )
            self._num_requests += 1
            name = str(self._num_requests)
            prompt = vllm.tokens_input([*request.prompt_ids, *request.prefix_ids])
            self.llm.add_request(name, prompt, parameters)
            waiting[name] = sample
        try:
            while waiting:
                ended = self._step(waiting)
                # What ended by our rules (a stop string, an abort) vLLM has to be told.
                self.llm.abort_request([name for name, is_known in ended.items() if not is_known])
                for name in ended:
                    finish(waiting.pop(name))
        finally:
            self.llm.abort_request(list(waiting))

    def _step(self, waiting: Mapping[str, Sample]) -> dict[str, bool]:
        """A token for (most of) the samples. Returns those that ended, and whether vLLM knows."""
        ended: dict[str, bool] = {}
        for name, sample in waiting.items():
            if sample.request.request_id in self.aborts:
                sample.finish_reason = "abort"
                ended[name] = False
        if ended:
            return ended
        for output in self.llm.step():
            sample = waiting.get(output.request_id)
            if sample is None:
                continue
            (completion,) = output.outputs
            ids = list(completion.token_ids)
            entries = zip(ids, completion.logprobs or (), strict=True)
            sample.take(ids, [entry[token].logprob for token, entry in entries])
            if output.finished and sample.finish_reason is None:
                sample.fail(
                    f"vLLM ended early: {completion.finish_reason} after "
                    f"{len(sample.token_ids)} tokens"
                )
            if sample.finish_reason is not None:
                ended[output.request_id] = output.finished
        return ended


def _reload(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    worker.reload_weights(weights_iterator=weights)
    head = _tied_head(worker.model_runner.get_model())
    if head is not None and hasattr(head, "cpu_linear"):
        # vLLM repacks the layers that it loaded something into, and a tied head is not among them.
        head.quant_method.process_weights_after_loading(head)


def held_checksums(model: nn.Module, delivered: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums of the weights inside vLLM's model, by their Hugging Face names; -1 for one that it
    does not use.

    vLLM joins some matrices (q, k and v into one) and may keep them packed. A layer with packed
    weights is asked for the product with a probe: if that is the product with the delivered matrix,
    the delivered bytes stand for it.
    """
    sums: dict[str, int] = {}
    head = _tied_head(model)
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, weight in delivered.items():
        path, _, leaf = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        first_row = 0
        for joined, parts in packed.items():
            if child in parts:
                module: Any = model.get_submodule(f"{parent}.{joined}")
                first_row = sum(module.output_sizes[: parts.index(child)])
                break
        else:
            module = model.get_submodule(path)
        parameter = getattr(module, leaf)
        held = weight
        if parameter.dim() == weight.dim():
            held = parameter[first_row : first_row + len(weight)]
        sums[name] = checksum(held if held.shape == weight.shape else weight)
        if leaf != "weight" or weight.dim() != 2:
            continue
        users = [module] if head is None or head.weight is not parameter else [module, head]
        for user in users:
            if hasattr(user, "cpu_linear") and not _multiplies_with(user, weight, first_row):
                sums[name] = -1
    return sums


def _tied_head(model: Any) -> Any:
    """The output head, if it is a layer of its own that uses the embedding's weight; else None."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding:
        return None
    return head if head.weight is embedding.weight else None


def _multiplies_with(layer: Any, weight: Tensor, first_row: int) -> bool:
    """Whether the layer's product with a probe is that of `weight`, in the rows from
    `first_row`."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(3, weight.shape[1], generator=generator).to(weight)
    with torch.no_grad():
        rows = slice(first_row, first_row + len(weight))
        product = layer.quant_method.apply(layer, probe, bias=None)[:, rows].float()
        expected = F.linear(probe.double(), weight.double()).float()
    scale = expected.abs().amax().clamp_min(1e-6)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
    return bool((product - expected).abs().amax() <= tolerance * scale)


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Undo what starting vLLM does to the process: seeds, threads, variables of its children."""
    states, environment, set_num_threads = random_states(), dict(os.environ), torch.set_num_threads
    # vLLM reads the variable and has no argument for it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        yield
    finally:
        restore_random_states(states)
        torch.set_num_threads = set_num_threads
        for name in {*os.environ, *environment}:
            if name.startswith("VLLM_"):
                continue
            if name in environment:
                os.environ[name] = environment[name]
            else:
                del os.environ[name]


@cache
def _import_vllm() -> SimpleNamespace:
    """The names of vLLM that are used here."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor.abstract import Executor
    except ImportError as error:
        raise MissingDependencyError(
            f"the strategy vllm needs vLLM ({error}): {install_hint('vllm')}, on a GPU machine "
            "pip install vllm; the nearest strategy without it is hf_infer"
        ) from error
    # It warns about layers without weights of their own at every reload.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    return SimpleNamespace(
        SamplingParams=SamplingParams,
        EngineArgs=EngineArgs,
        tokens_input=tokens_input,
        RequestOutputKind=RequestOutputKind,
        CPUAttentionBackend=CPUAttentionBackend,
        LLMEngine=LLMEngine,
        Executor=Executor,
    )
