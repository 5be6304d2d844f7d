"""What ROLL's config files may hold and this project does not have.

`WITHOUT_EFFECT` names the keys that do nothing here, by the class of the block that they stand in.
Such a key is accepted and named once, or refused by name where it asks for something not built.
A file that needs another part of ROLL fails with the key and the reason.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class NotBuilt:
    """Something that ROLL has and this project has not: any value but `off` is refused."""

    what: str
    off: Any

    @property
    def off_in_yaml(self) -> str:
        return "null" if self.off is None else str(self.off).lower()


_UNUSED = "no code of ROLL reads it either"
_MEGATRON = "it is for Megatron"
_ROUTER = "engines batch requests themselves, and workers get equal shares"
_PROFILER = "torch.profiler and the run report replace it"
_CHECKPOINTS = "checkpoints stay in the run's folder"
_VALIDATION_LENGTHS = "validation rows have the lengths of the others"
_ENV_TIMEOUT = "environments that hang are ended after env_timeout and counted"
_EXPERTS = "experts run as transformers runs them"
_TILES = "there is no tiled MLP"


def _each(names: str, reason: str) -> dict[str, str | NotBuilt]:
    return dict.fromkeys(names.split(), reason)


# Options of Megatron that ROLL's files keep when they move to another strategy.
_MEGATRON_OPTIONS = _each(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    accumulate_allreduce_grads_in_fp32 additional_configs apply_rope_fusion bf16
    bias_activation_fusion context_parallel_size cross_entropy_loss_fusion
    distrib_optim_fully_reshardable expert_model_parallel_size expert_tensor_parallel_size
    moe_apply_probs_on_input moe_aux_loss_coeff moe_enable_deepep moe_expert_capacity_factor
    moe_ffn_hidden_size moe_grouped_gemm moe_input_jitter_eps moe_layer_freq moe_layer_recompute
    moe_pad_expert_input_to_capacity moe_per_layer_logging moe_permute_fusion
    moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
    moe_router_force_load_balancing moe_router_group_topk moe_router_load_balancing_type
    moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
    moe_router_topk_limited_devices moe_router_topk_scaling_factor
    moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_token_dispatcher_type
    moe_token_drop_policy moe_token_dropping moe_use_legacy_grouped_gemm moe_z_loss_coeff
    overlap_grad_reduce overlap_param_gather pipeline_model_parallel_layout
    pipeline_model_parallel_size recompute_granularity recompute_method recompute_modules
    recompute_num_layers sequence_parallel tensor_model_parallel_size use_distributed_optimizer
    use_flash_attn variable_seq_lengths virtual_pipeline_model_parallel_size
    """,
    _MEGATRON,
)
# What says how to generate, in the pipelines that do not.
_NO_ROLLOUTS: dict[str, str | NotBuilt] = {
    "rollout_batch_size": (
        "a step is per_device_train_batch_size x gradient_accumulation_steps on every rank"
    ),
    "val_batch_size": "all rows of the validation are scored",
    "rollout_dump_dir": "nothing is generated",
    "rollout_mock": "nothing is generated",
    "model_update_buffer_size_mb": "weights stay where they are trained",
}

# The class of a block -> key -> why it does nothing. A class has the keys of its bases too, unless
# it makes a field of one that works.
WITHOUT_EFFECT: Mapping[str, Mapping[str, str | NotBuilt]] = {
    "BaseConfig": {
        **_each(
            "generate_opt_level is_num_return_sequences_expand max_running_requests router_args "
            "is_use_additional_prompts max_additional_running_prompts",
            _ROUTER,
        ),
        "user_defined_rollout_loop_cls": "subclass the pipeline instead",
        **_each(
            "train_batch_size track_name model_name transfer_queue use_additional_prompts "
            "base_dir local_rank",
            _UNUSED,
        ),
        "logging_dir": "a run's folder has all there is",
        "logging_steps": "every step is logged",
        "checkpoint_config": _CHECKPOINTS,
        **_each(
            "profiler_timeline profiler_memory report_length_and_rewards length_profiler_dir "
            "profiler_output_dir",
            _PROFILER,
        ),
        "is_offload_optimizer_states_in_train_step": _MEGATRON,
        "otlp_output_dir": "there are no OpenTelemetry traces",
        "model_download_type": "models come from a folder or from Hugging Face",
        "transfer_backend": "batches travel with the calls",
    },
    "PPOConfig": _each(
        "reward_norm reward_shift reward_scale l2 use_reward_scaling add_len_reward "
        "use_reward_norm",
        _UNUSED,
    ),
    "RLVRConfig": {
        "val_batch_size": "all prompts of the validation are answered",
        "reward": "rewards has an entry for each domain",
        "reward_model": "a reward names its own judge",
        "save_logging_board_dir": "the run's folder has the samples, token by token",
        **_each(
            "positive_loss_coef dataset_filter postive_loss_coef use_topr_neg_loss_coef "
            "use_policy_loss_type mask_type balance_length minibatch_data_iter_num",
            _UNUSED,
        ),
        "use_topr_loss": f"{_UNUSED}; actor_train.pg_variant: topr does",
    },
    "AgenticConfig": {
        **_each("val_prompt_length val_sequence_length", _VALIDATION_LENGTHS),
        **_each("norm_mean_type norm_std_type", "reward_normalization has its own"),
        "reward": NotBuilt(
            "a role that judges for environments; they judge by themselves, or ask a service of "
            "their own",
            None,
        ),
        "env_monitor": _ENV_TIMEOUT,
        **_each(
            "default_history_length render_save_dir dirty_data_mask open_feedback_turn "
            "use_token_reward",
            _UNUSED,
        ),
        "exp_mode": "only one of ROLL's sandbox environments reads it",
        "partial_gpu_mode": "roles keep the GPUs that device_mapping gives them",
        "parse_tool_call_parameter_to_dict": "answers are texts",
        "skip_mock_system_prompt": "later turns are cut out of a rendered conversation",
    },
    "DPOConfig": {
        **_NO_ROLLOUTS,
        **_each("val_prompt_length val_sequence_length", _VALIDATION_LENGTHS),
    },
    "SFTConfig": {
        **_NO_ROLLOUTS,
        "val_prompt_length": "val_sequence_length is the limit of a row",
        "is_offload_states": "there is one model",
    },
    "WorkerConfig": {
        **_each("use_remove_padding eval_steps tag_included", _UNUSED),
        **_each(
            "use_sequence_packing sequence_packing_args logits_in_fp32",
            _MEGATRON,
        ),
        "router_replay": NotBuilt("replay of expert routing", {"mode": "disable"}),
        "mtp_training_mode": NotBuilt("heads that predict several tokens", "disabled"),
        "offload_nccl": "communicators stay",
        "apply_loss_scale": "gradients are sums over global counts, so nothing is rescaled",
        "checkpoint_config": _CHECKPOINTS,
    },
    "RewardConfig": {
        "code_url": "code runs in a sandbox on this machine",
        "use_local": NotBuilt("running code at code_url", True),
        "response_filter_config": _UNUSED,
        "reward_manager_config": "there is no remote reward system",
    },
    "EnvManagerConfig": {"format_penalty": "environments have their own"},
    "EnvTemplate": {
        "use_thread_lock": "environments do not share a thread",
        "max_env_step_concurrent": "max_env_num_per_worker says how many share a process",
    },
    "RewardNormalizationConfig": _each("global_scale_factor global_shift_value", _UNUSED),
    "ModelArguments": {
        "flash_attn": "attn_implementation says it",
        "moe_aux_loss_coef": NotBuilt("the router's loss", None),
        "device_map": "a worker has one device",
        "ulysses_size": NotBuilt("sequence parallelism", 1),
    },
    "TrainingArguments": {
        "dataloader_num_workers": "data is tokenized before training",
        "tf32": "set torch.backends yourself",
        "save_hf_model": "every checkpoint opens with transformers",
    },
    "GeneratingArguments": {
        "num_beams": NotBuilt("beam search", 1),
        "length_penalty": "there is no beam search",
        "logprobs": "samples have the log-probabilities of their own tokens",
    },
    "DataArguments": {
        **_each("dataset_dir interleave_probs dataset_name id", _UNUSED),
        "preprocessing_num_workers": "the tokenizer uses all cores",
        "cache_path": "files are read anew",
        "eval_file_name": "validation.data_args names the files",
        "dataset_type": "the file's ending says it",
    },
    "HfInferOptions": _MEGATRON_OPTIONS,
    "HfTrainOptions": _MEGATRON_OPTIONS,
    "Fsdp2Options": {
        **_MEGATRON_OPTIONS,
        "compile": NotBuilt("compiled layers with fsdp2; hf_train and hf_infer have them", False),
        "ep_size": NotBuilt("expert parallelism", 1),
        "efsdp_size": NotBuilt("expert parallelism", 1),
        "apply_tiled_mlp": NotBuilt("a tiled MLP", False),
        **_each("tiled_num_shards model_type", _TILES),
        "wrap_policy": "each decoder layer is a group, and what is left another",
        **_each("apply_expert_patch moe_use_grouped_mm", _EXPERTS),
        "use_batched_model_update": "weights travel in buckets of model_update_buffer_size_mb",
        "async_save_ckpt": "a checkpoint is complete before the next step",
        "save_only_model": "checkpoints hold the state of training, to resume from",
    },
    "VllmOptions": {
        "sleep_level": "is_offload_states says it",
        "linear_logits": "vLLM makes its own logits",
    },
    "Fsdp2InferOptions": {"reduce_dtype": "nothing is reduced without gradients"},
}


@functools.cache
def keys_without_effect(cls: type) -> Mapping[str, str | NotBuilt]:
    """The keys that do nothing in a block that `cls` reads, each with the reason."""
    found: dict[str, str | NotBuilt] = {}
    for base in reversed(cls.__mro__):
        for name in vars(base).get("__annotations__", {}):
            found.pop(name, None)
        found |= WITHOUT_EFFECT.get(base.__name__, {})
    return found


# -- parts of ROLL that do not exist here ----------------------------------------------------------

_VISION = "a vision or audio model; only text models are trained"

_KEYS_BY_REASON = {
    "on-policy distillation": (
        "student_train student_infer teacher use_opd is_pure_opd pure_opd_pipeline_type "
        "opd_kl_coef opsd_mode opsd_solution_key opsd_max_solution_length"
    ),
    "distillation": "student distill_loss_weight distill_on_prompt kd_temperature",
    (
        "ROLL's supervised fine-tuning is `pipeline: sft` here; write that, rename sft_train to "
        "actor_train, and give max_steps instead of num_train_epochs"
    ): "sft_train",
    "name the column in actor_train.data_args.prompt, and in that of validation": "prompt_key",
    "name the column in actor_train.data_args.response, and in that of validation": "response_key",
    (
        "only one column is the prompt; join the texts in the file, or write them as messages"
    ): "query_key system_key",
    _VISION: (
        "vlm_filter vision_dp media_folder image_folder image_max_pixels image_min_pixels "
        "video_folder video_fps video_max_pixels video_min_pixels video_maxlen audio_folder "
        "audio_sampling_rate"
    ),
}
UNSUPPORTED_KEYS: Mapping[str, str] = {
    key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys.split()
}

# Strategy names of ROLL that do not exist here, and the ones that come nearest.
UNSUPPORTED_STRATEGIES: Mapping[str, str] = {
    "megatron_train": "fsdp2_train",
    "megatron_infer": "fsdp2_infer",
    "sglang": "vllm",
    "mock_infer": "hf_infer",
    "diffusion_deepspeed_train": "deepspeed_train",
}

_AGENTS = (
    "agents that call tools in messages of their own; here an answer is a text that the "
    "environment reads"
)

# What an entry of `custom_envs` may ask for.
NOT_BUILT_YET: Mapping[str, str] = {
    "tool_wrapper": (
        "tools around any environment; the environment tool_task has a sandboxed Python tool of "
        "its own"
    ),
    "agent_runner_cls": "programs that ask the policy by themselves; leave it null",
}
UNSUPPORTED_ENVIRONMENTS: Mapping[str, str] = {
    "webshop": "it needs WebShop's own search engine and data",
    "sokoban_sandbox": "it plays at a remote sandbox; sokoban plays here",
    "sokoban_mcp": "it plays at an MCP server; sokoban plays here",
    "sokoban_native_env": f"{_AGENTS}; sokoban is the same game",
    "sokoban_tool_call": f"{_AGENTS}; sokoban is the same game",
    "rock_tb_native_env": "it runs in ROCK's remote sandboxes",
    "openreward_env": "it needs OpenReward's service",
    "atropos_env": "it needs Atropos",
    "deepeyes": _VISION,
}

_MANAGERS = "roll.pipeline.agentic.env_manager"
_REWARDS = "roll.pipeline.rlvr.rewards"
_SEES = "which judges what a vision model sees"
UNSUPPORTED_CLASSES: Mapping[str, str] = {
    path: f"{path.rpartition('.')[2]}, {reason}"
    for path, reason in {
        f"{_MANAGERS}.agent_native_env_manager.AgentNativeStepEnvManager": (
            f"which is for {_AGENTS}"
        ),
        f"{_MANAGERS}.proxy_env_manager.ProxyEnvManager": (
            "which is for programs that ask the policy by themselves"
        ),
        f"{_REWARDS}.detection_reward_worker.DetectionRewardWorker": _SEES,
        f"{_REWARDS}.video_r1_reward_worker.VideoR1RewardWorker": _SEES,
        f"{_REWARDS}.remote_reward_system_worker.RemoteRewardSystemWorker": (
            "which asks a remote reward system"
        ),
    }.items()
}

# The last part of the name of a model, template or environment manager that is made for images.
_VISION_NAME = re.compile(
    r"(^|[-_.])(vl|vlm|omni)([-_.]|$)|internvl|llava|pixtral|idefics|paligemma", re.IGNORECASE
)


# Keys of pipelines that do not exist here: nothing else of such a file can be judged.
FOREIGN_PIPELINES = ("student", "student_train", "teacher", "sft_train")


def unsupported_parts(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(dotted key, reason) for every part of a composed config file that this project cannot run.

    Strategy names are not looked at: `StrategyArguments` refuses them.
    """
    found = [
        (key, UNSUPPORTED_KEYS[key]) for key in raw if key in UNSUPPORTED_KEYS
    ] or _vision_parts(raw)
    for key, value in _strings(raw, ""):
        if key.endswith(".worker_cls") and value in UNSUPPORTED_CLASSES:
            found.append((key, UNSUPPORTED_CLASSES[value]))
    return [(key, f"not supported: {reason}") for key, reason in found]


def _vision_parts(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys that name a vision model, each model once; what else says so only if none does."""
    models: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, value in _strings(raw, ""):
        name = key.rpartition(".")[2]
        if name in ("pretrain", "reward_pretrain", "model_name_or_path") and _is_vision_model(
            value
        ):
            models.setdefault(value, key)
        elif name == "template" and _VISION_NAME.search(value):
            others.setdefault(f'template "{value}"', key)
        elif name == "env_manager_cls" and "vl_" in value and key.startswith("custom_envs."):
            others.setdefault(value, key)
    if models:
        return [(key, f'"{value}" is {_VISION}') for value, key in models.items()]
    return [(key, f"{value} is for {_VISION}") for value, key in others.items()]


def _is_vision_model(name_or_path: str) -> bool:
    """A local folder is judged by its config.json, anything else by its name."""
    try:
        config = json.loads((Path(name_or_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _VISION_NAME.search(name_or_path.rstrip("/").rpartition("/")[2]) is not None
    return isinstance(config, dict) and "vision_config" in config


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _strings(item, f"{key}.{name}" if key else str(name))
