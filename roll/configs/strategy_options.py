"""The keys of `strategy_config`, by strategy: what each strategy reads, and what ROLL's files have there besides.

hf_* and fsdp2_* have a class each. deepspeed_* takes a few keys of ours beside DeepSpeed's own
configuration, and vllm takes vLLM's engine arguments; both are compared with what the library knows at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ValidationError

from roll.configs.config_model import (
    AtLeastOne,
    ConfigModel,
    NoEffect,
    NonNegative,
    NotBuilt,
    Whole,
)
from roll.configs.problems import Problem, problems_of

# Options of Megatron that ROLL's files keep when they move to another strategy.
# fmt: off
MEGATRON_KEYS = frozenset(
    {
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "accumulate_allreduce_grads_in_fp32", "additional_configs", "apply_rope_fusion", "bf16",
        "bias_activation_fusion", "context_parallel_size", "cross_entropy_loss_fusion",
        "distrib_optim_fully_reshardable", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "moe_apply_probs_on_input", "moe_aux_loss_coeff",
        "moe_enable_deepep", "moe_expert_capacity_factor", "moe_ffn_hidden_size",
        "moe_grouped_gemm", "moe_input_jitter_eps", "moe_layer_freq", "moe_layer_recompute",
        "moe_pad_expert_input_to_capacity", "moe_per_layer_logging", "moe_permute_fusion",
        "moe_router_bias_update_rate", "moe_router_dtype", "moe_router_enable_expert_bias",
        "moe_router_force_load_balancing", "moe_router_group_topk",
        "moe_router_load_balancing_type", "moe_router_num_groups", "moe_router_pre_softmax",
        "moe_router_score_function", "moe_router_topk", "moe_router_topk_limited_devices",
        "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size",
        "moe_shared_expert_overlap", "moe_token_dispatcher_type", "moe_token_drop_policy",
        "moe_token_dropping", "moe_use_legacy_grouped_gemm", "moe_z_loss_coeff",
        "overlap_grad_reduce", "overlap_param_gather", "pipeline_model_parallel_layout",
        "pipeline_model_parallel_size", "recompute_granularity", "recompute_method",
        "recompute_modules", "recompute_num_layers", "sequence_parallel",
        "tensor_model_parallel_size", "use_distributed_optimizer", "use_flash_attn",
        "variable_seq_lengths", "virtual_pipeline_model_parallel_size",
    }
)
# fmt: on

# Engine arguments of vLLM that follow from other settings, and which.
VLLM_SET_ELSEWHERE: Mapping[str, str] = {
    "model": "model_args.model_name_or_path",
    "tokenizer": "model_args.model_name_or_path",
    "dtype": "model_args.dtype",
    "trust_remote_code": "model_args.trust_remote_code",
    "hf_overrides": "model_args.model_config_kwargs",
    "seed": "seed",
    "data_parallel_size": "world_size or device_mapping",
    "distributed_executor_backend": "backend",
    "logprobs_mode": "nothing: log-probabilities are always those of the sampled distribution",
    "worker_cls": "nothing",
    "worker_extension_cls": "nothing",
}
VLLM_IGNORED = frozenset(
    {"sleep_level", "linear_logits"}
)  # keys of ROLL and of the other strategies

_TORCH_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _short_name(value: Any) -> Any:
    return _TORCH_NAMES.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_short_name)]
_EXPERTS = NoEffect("experts run as transformers runs them")
_TILES = NoEffect("there is no tiled MLP")


class InferOptions(ConfigModel):
    """Options of every strategy that scores with a model of transformers."""

    ignored_keys: ClassVar[frozenset[str]] = MEGATRON_KEYS

    linear_logits: bool = True
    """Never build a logits tensor; log-probabilities come from the hidden states and the head."""

    share_prefixes: bool | None = None
    """Compute tokens once that rows have in common; null does so where the model allows it."""


class TrainOptions(InferOptions):
    """Options of every strategy that trains a model of transformers."""

    keep_logits_gib: NonNegative | None = None
    """How much of a micro-batch's logits may wait for its backward; null is 2% of the GPU's memory, or 1 GiB."""


class HfInferOptions(InferOptions):
    """`strategy_config` of hf_infer."""

    compile: bool = False
    """Let torch.compile fuse what lies between the matrix products of each block."""

    max_batch_size: AtLeastOne | None = None
    """Sequences that generation works on at a time; null is all of them."""


class HfTrainOptions(TrainOptions):
    """`strategy_config` of hf_train."""

    compile: bool = False
    """Let torch.compile fuse what lies between the matrix products of each block."""


class Fsdp2Options(InferOptions):
    """What fsdp2_infer and fsdp2_train have in common."""

    param_dtype: Dtype | None = None
    """What layers compute in: bf16, fp16 or fp32; null is `model_args.dtype`."""

    reshard_after_forward: bool | None = None
    """Free a layer's gathered weights after its forward pass; null is true."""

    offload_policy: bool = False
    """Keep shards in host memory and copy them to the device layer by layer."""

    fsdp_size: Whole | None = None
    """Ranks that share one copy of the weights: all of them; null, 1 or less, and the number of ranks say so."""

    compile: Annotated[
        bool, NotBuilt("compiled layers with fsdp2; hf_train and hf_infer have them", False)
    ] = False
    """Compiled layers."""

    ep_size: Annotated[AtLeastOne, NotBuilt("expert parallelism", 1)] = 1
    """Ranks that share the experts of a layer."""

    efsdp_size: Annotated[AtLeastOne, NotBuilt("expert parallelism", 1)] = 1
    """Ranks that shard an expert."""

    apply_tiled_mlp: Annotated[bool, NotBuilt("a tiled MLP", False)] = False
    """Compute MLPs piece by piece."""

    tiled_num_shards: Annotated[AtLeastOne, _TILES] = 4
    """Pieces of an MLP."""

    model_type: Annotated[str | None, _TILES] = None
    """Family of the model, for its MLP."""

    wrap_policy: Annotated[
        dict[str, Any] | None, NoEffect("each decoder layer is a group, and what is left another")
    ] = None
    """Modules that are sharded on their own."""

    apply_expert_patch: Annotated[bool, _EXPERTS] = False
    """Replace the experts of a mixture by faster ones."""

    moe_use_grouped_mm: Annotated[bool, _EXPERTS] = False
    """One matrix product for all experts."""

    use_batched_model_update: Annotated[
        bool, NoEffect("weights travel in buckets of model_update_buffer_size_mb")
    ] = True
    """Gather several weights at once when they are sent."""

    async_save_ckpt: Annotated[bool, NoEffect("a checkpoint is complete before the next step")] = (
        True
    )
    """Write checkpoints while training goes on."""

    save_only_model: Annotated[
        bool, NoEffect("checkpoints hold the state of training, to resume from")
    ] = False
    """Leave the optimizer out of checkpoints."""


class Fsdp2InferOptions(Fsdp2Options):
    """`strategy_config` of fsdp2_infer."""

    reduce_dtype: Annotated[Dtype | None, NoEffect("nothing is reduced without gradients")] = None
    """What gradients are summed in."""


class Fsdp2TrainOptions(Fsdp2Options, TrainOptions):
    """`strategy_config` of fsdp2_train."""

    reduce_dtype: Dtype = "fp32"
    """What gradients are summed in: bf16, fp16 or fp32."""

    reduce_scatter_during_grad_accumulation: bool = True
    """Sum gradients over ranks after every micro-batch; false: once a step, with less communication, more memory."""


class DeepSpeedInferOptions(InferOptions):
    """`strategy_config` of deepspeed_infer, beside DeepSpeed's own configuration."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset()  # `bf16` is a key of DeepSpeed too


class DeepSpeedTrainOptions(TrainOptions):
    """`strategy_config` of deepspeed_train, beside DeepSpeed's own configuration."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset()  # `bf16` is a key of DeepSpeed too


OPTIONS: Mapping[str, type[InferOptions]] = {
    "hf_infer": HfInferOptions,
    "hf_train": HfTrainOptions,
    "fsdp2_infer": Fsdp2InferOptions,
    "fsdp2_train": Fsdp2TrainOptions,
    "deepspeed_infer": DeepSpeedInferOptions,
    "deepspeed_train": DeepSpeedTrainOptions,
}


def passes_through(strategy_name: str) -> bool:
    """Whether another library reads, and checks, the keys that are not ours."""
    return not strategy_name.startswith(("hf_", "fsdp2_"))


def options_of(strategy_name: str, strategy_config: Mapping[str, Any]) -> InferOptions:
    """Our part of `strategy_config`, complete with defaults; vllm has none."""
    return _own_class(strategy_name)(**_own_part(strategy_name, strategy_config))


def option_problems(strategy_name: str, strategy_config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a `strategy_config`, as far as that can be known without the strategy's library."""
    if strategy_name == "vllm":
        sources = {
            key: VLLM_SET_ELSEWHERE[key] for key in strategy_config if key in VLLM_SET_ELSEWHERE
        }
        return [
            Problem(key, f"it follows from {source}; remove it") for key, source in sources.items()
        ]
    try:
        _own_class(strategy_name).model_validate(_own_part(strategy_name, strategy_config))
    except ValidationError as error:
        return problems_of(error, _own_class(strategy_name))
    return []


def _own_class(strategy_name: str) -> type[InferOptions]:
    return OPTIONS.get(strategy_name, InferOptions)


def _own_part(strategy_name: str, strategy_config: Mapping[str, Any]) -> dict[str, Any]:
    known = {} if strategy_name == "vllm" else _own_class(strategy_name).model_fields
    return {
        key: value
        for key, value in strategy_config.items()
        if key in known or not passes_through(strategy_name)
    }
