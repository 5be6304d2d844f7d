"""Batches, configurations and workers for the tests of training: tiny models, every loss, any way
of cutting a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB_SIZE, make_model_folder
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.models.checkpoint import random_states
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.base_worker import ActorWorker as AgenticActorWorker
from roll.pipeline.base_worker import CriticWorker
from roll.pipeline.dpo.actor_worker import ActorWorker as DPOActorWorker
from roll.pipeline.dpo.dpo_config import DPOConfig
from roll.pipeline.rlvr.actor_worker import ActorWorker as RLVRActorWorker
from roll.pipeline.rlvr.rlvr_config import RLVRConfig

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = [("dpo", None), *((pipeline, mode) for pipeline in ("agentic", "rlvr") for mode in MODES)]
MODELS = [("qwen2", True), ("qwen2", False), ("llama", True), ("llama", False)]

ROWS = 8
WIDTH = 14


def make_batch(pipeline: str, *, rows: int = ROWS, width: int = WIDTH, seed: int = 0) -> DataProto:
    """Right-padded rows of different lengths, two and two alike at first, with the columns of the
    pipeline's loss."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, width + 1, (rows,), generator=generator)
    lengths[0] = width
    attention_mask = (torch.arange(width) < lengths[:, None]).long()
    input_ids = torch.randint(3, VOCAB_SIZE, (rows, width), generator=generator) * attention_mask
    input_ids[1::2, :3] = input_ids[::2, :3]  # two rows begin alike
    tensors = {"input_ids": input_ids, "attention_mask": attention_mask}
    if pipeline == "dpo":
        tensors["prompt_id_lens"] = torch.randint(1, 4, (rows,), generator=generator)
        tensors["reference_log_probs"] = -3 * torch.rand(rows, width - 1, generator=generator)
        return DataProto.from_dict(tensors, meta_info={"loss_mask_keys": [], "rows_per_unit": 2})
    # Prompt of two tokens, then answers with holes, as a conversation of several turns has them.
    response_mask = attention_mask.clone()
    response_mask[:, :2] = 0
    response_mask[:, 2:] *= (torch.rand(rows, width - 2, generator=generator) < 0.75).long()
    response_mask[1] = 0  # a row that nothing is learned from
    old = -3 * torch.rand(rows, width - 1, generator=generator)
    tensors |= {
        "response_mask": response_mask,
        "old_log_probs": old,
        "ref_log_probs": old + 0.3 * torch.randn(rows, width - 1, generator=generator),
        "advantages": torch.randn(rows, width - 1, generator=generator),
    }
    if pipeline == "rlvr":
        keep_rows = (torch.rand(rows, 1, generator=generator) < 0.8).float()
        tensors["final_response_mask"] = response_mask[:, 1:] * keep_rows
        tensors["sample_weights"] = 0.5 + torch.rand(rows, generator=generator)
        return DataProto.from_dict(
            tensors, meta_info={"loss_mask_keys": ["response_mask", "final_response_mask"]}
        )
    return DataProto.from_dict(tensors, meta_info={"loss_mask_keys": ["response_mask"]})


def pad_batch(batch: DataProto, *, left: int, right: int, seed: int = 1) -> DataProto:
    """The same rows with more columns on both sides: random ids, garbage in every token-level
    column, masks 0."""
    generator = torch.Generator().manual_seed(seed)
    width = batch.batch["attention_mask"].shape[1]
    padded = {}
    for key, value in batch.batch.items():
        if value.dim() == 1 or value.shape[1] not in (width, width - 1):
            padded[key] = value
            continue
        filled = torch.zeros(len(value), left + value.shape[1] + right, dtype=value.dtype)
        if key == "input_ids":
            filled = torch.randint(0, VOCAB_SIZE, filled.shape, generator=generator)
        elif value.is_floating_point() and "mask" not in key:
            filled = torch.full_like(filled, float("nan"))
        filled[:, left : left + value.shape[1]] = value
        padded[key] = filled
    return DataProto.from_dict(padded, meta_info=batch.meta_info)


def make_config(
    pipeline: str,
    folder: str | Path,
    *,
    strategy: str = "hf_train",
    strategy_config: dict[str, Any] | None = None,
    micro_batch: int = 2,
    max_tokens: int | None = None,
    workers: int = 1,
    gradient_checkpointing: bool = False,
    model_args: dict[str, Any] | None = None,
    training_args: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    role = {
        "strategy_args": {"strategy_name": strategy, "strategy_config": strategy_config or {}},
        "model_args": {
            "model_name_or_path": str(folder),
            "dtype": "fp32",
            "disable_gradient_checkpointing": not gradient_checkpointing,
            **(model_args or {}),
        },
        "training_args": {"per_device_train_batch_size": micro_batch, **(training_args or {})},
        "world_size": workers,
        "infer_batch_size": 3,
    }
    if max_tokens is not None:
        role |= {
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": max_tokens,
        }
    reference = {**role, "strategy_args": {"strategy_name": "hf_infer"}}
    common = {
        "actor_train": role,
        "reference": reference,
        "pretrain": str(folder),
        "sequence_length": 14,
        "prompt_length": 6,
        "max_steps": 10,
    }
    common |= {"max_grad_norm": 1e9, "eval_steps": -1, **options}
    if pipeline == "dpo":
        return DPOConfig(**common)
    common |= {
        "rollout_batch_size": 24,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_loss_coef": 0.05,
        "enable_old_logprobs_recompute": True,
        **options,
    }
    if pipeline == "rlvr":
        return RLVRConfig(length_loss_weight=True, **common)
    return AgenticConfig(
        train_env_manager={"num_env_groups": 24, "num_groups_partition": [24]},
        val_batch_size=-1,
        **common,
    )


def mode_options(mode: str | None) -> dict[str, Any]:
    """The options that choose an aggregation mode; DPO has none."""
    if mode is None:
        return {}
    # The default, the width of the batch, is not a constant: padding changes it.
    return {
        "loss_agg_mode": mode,
        "loss_norm_factor": 13.0 if mode == "seq-mean-token-sum-norm" else None,
    }


def make_model_folders(root: Path) -> dict[tuple[str, bool], Path]:
    """One folder for each of MODELS."""
    return {
        (family, tied): make_model_folder(root / f"{family}-{tied}", family, tied=tied)
        for family, tied in MODELS
    }


class _Probe:
    """Adds to an actor: the gradient of one optimizer step, whole, instead of the step itself."""

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL)
    def gradients(self: Any, data: DataProto) -> tuple[dict[str, Tensor], dict[str, Any]]:
        captured: dict[str, Tensor] = {}
        strategy = self.strategy
        step = strategy.optimizer.step

        def capture() -> None:
            captured.update(strategy.full_gradients())

        capture._wrapped_by_lr_sched = True  # so that the scheduler does not warn
        strategy.optimizer.step = capture
        metrics = strategy.train_step(strategy.get_data_input(data), self.loss_func)
        strategy.optimizer.step = step
        return captured, metrics

    def training_state(self: Any) -> dict[str, Any]:
        """Everything that a resumed run must have in common with one that never stopped."""
        strategy = self.strategy
        weights = strategy.full_state_dict()
        weights = dict(strategy.model.state_dict()) if weights is None else weights
        optimizer = get_optimizer_state_dict(
            strategy.model,
            strategy.optimizer,
            options=StateDictOptions(full_state_dict=True, cpu_offload=True),
        )
        return {
            "weights": {name: value.clone() for name, value in weights.items()},
            "optimizer": optimizer,
            "scheduler": strategy.scheduler.state_dict(),
            "random": random_states(),
        }


class AgenticProbe(_Probe, AgenticActorWorker): ...


class RLVRProbe(_Probe, RLVRActorWorker): ...


class DPOProbe(_Probe, DPOActorWorker): ...


class CriticProbe(_Probe, CriticWorker): ...


PROBES = {"agentic": AgenticProbe, "rlvr": RLVRProbe, "dpo": DPOProbe, "critic": CriticProbe}


def reference_gradients(
    pipeline: str, folder: str | Path, config: Any, batch: DataProto
) -> dict[str, Tensor]:
    """Float64, the whole batch at once, through a logits tensor: no strategy, no micro-batches."""
    model_cls = AutoModelForTokenClassification if pipeline == "critic" else AutoModelForCausalLM
    model = model_cls.from_pretrained(folder, dtype=torch.float64)
    worker = PROBES[pipeline](config.actor_train)
    worker.pipeline_config = config
    if pipeline != "critic":
        worker.log_prob_temperature = getattr(config, "log_prob_temperature", 1.0)
    data = DataProto.from_dict(
        {k: v.double() if v.is_floating_point() else v for k, v in batch.batch.items()},
        meta_info=dict(batch.meta_info),
    )
    logits = model(
        data.batch["input_ids"], attention_mask=data.batch["attention_mask"], use_cache=False
    ).logits
    loss, _ = worker.loss_func(data, logits)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, of all gradients together."""
    assert gradients.keys() == reference.keys()
    difference = sum(
        (gradients[name].double() - reference[name]).square().sum() for name in reference
    )
    return float((difference / sum(value.square().sum() for value in reference.values())).sqrt())
