"""How the vectors of the losses are put to the package: {function: (inputs, config) -> outputs}.

Inputs are nested lists, or tensors. The policy loss and the correction run through the workers'
real code; the model's log-probabilities come from a strategy that knows them already.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import aggregate_loss
from roll.algorithms.off_policy import train_infer_gap
from roll.algorithms.preference_loss import preference_loss, sequence_log_probs, split_pairs
from roll.configs.ppo_config import TrainInferCorrectionConfig
from roll.configs.worker_config import WorkerConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.base_worker import ActorWorker
from roll.utils.train_infer_corrections import compute_train_infer_correction

Values = dict[str, Any]


def tensor(value: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor from a tensor or a nested list; 'nan', 'inf' and '-inf' are written as strings."""

    def numbers(item: Any) -> Any:
        return [numbers(x) for x in item] if isinstance(item, list) else float(item)

    return value.to(dtype) if isinstance(value, Tensor) else torch.tensor(numbers(value)).to(dtype)


def agg_loss(inputs: Values, config: Values) -> Values:
    loss = aggregate_loss(
        tensor(inputs["loss_mat"]),
        tensor(inputs["loss_mask"]),
        config["loss_agg_mode"],
        num_tokens=config.get("batch_num_tokens"),
        num_sequences=config.get("global_valid_samples"),
        weights_B=tensor(inputs["weights"]) if "weights" in inputs else None,
        norm_factor=config.get("norm_factor"),
    )
    return {"loss": loss}


class KnownScores:
    """A strategy whose model's log-probabilities and entropy are given."""

    def __init__(self, log_probs: Tensor, entropy: Tensor) -> None:
        self.log_probs, self.entropy = log_probs, entropy

    def op_compute_log_probs(
        self, logits: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        return self.log_probs

    def op_compute_entropy(self, logits: Tensor, attention_mask: Tensor) -> Tensor:
        return self.entropy


def correction_config(config: Values) -> TrainInferCorrectionConfig:
    """The package's configuration from the two shorthands that the vectors use."""
    weight = {"enabled": "weight_type" in config, "weight_type": config.get("weight_type", "token")}
    filters = []
    for item in config.get("filters", []):
        diff = item.get("diff")
        filters.append(
            {
                "enabled": True,
                "agg_type": item["agg"],
                "ratio_low": item.get("lo", item.get("ratio_low")),
                "ratio_high": item.get("hi", item.get("ratio_high")),
                **(
                    {}
                    if diff is None
                    else {"diff_enabled": True, "diff_low": diff[0], "diff_high": diff[1]}
                ),
            }
        )
    return TrainInferCorrectionConfig(
        is_weight={**weight, "upper_bound": config.get("upper_bound")},
        filters=filters,
    )


def agentic_loss(inputs: Values, config: Values) -> Values:
    columns = {
        name: tensor(inputs[name]) for name in ("old_log_probs", "ref_log_probs", "advantages")
    }
    log_probs = tensor(inputs["log_probs"]).requires_grad_()
    mask = torch.nn.functional.pad(tensor(inputs["response_mask_T"], torch.long), (1, 0))
    columns["infer_logprobs"] = tensor(inputs["infer_log_probs"])
    data = DataProto.from_dict(
        {**columns, "response_mask": mask, "input_ids": torch.zeros_like(mask)}
    )
    worker = ActorWorker(WorkerConfig(name="actor_train"))
    worker.strategy = KnownScores(
        log_probs, tensor(config["ent"] if "ent" in config else inputs["entropy"])
    )
    worker.pipeline_config = SimpleNamespace(
        pg_clip=0.2,
        use_pg_clip_range="lo" in config,
        pg_clip_low=config.get("lo"),
        pg_clip_high=config.get("hi"),
        dual_clip_loss="dual" in config,
        dual_clip_c=config.get("dual"),
        loss_agg_mode=config["mode"],
        loss_norm_factor=config.get("norm"),
        ratio_type=config.get("ratio", "token"),
        use_kl_loss="klc" in config,
        kl_loss_coef=config.get("klc", 0.0),
        entropy_loss_coef=config.get("entc", 0.0),
        enable_old_logprobs_recompute=False,
        train_infer_correction=correction_config(config.get("correction", {})),
    )
    loss, metrics = worker.loss_func(data, torch.empty(0))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return {"total_loss": loss.detach(), "grad_wrt_log_probs": gradient, **metrics}


def train_infer_correction(inputs: Values, config: Values) -> Values:
    old, infer, mask = (
        tensor(inputs[name]) for name in ("old_log_probs", "infer_log_probs", "response_mask")
    )
    weight, keep, _ = compute_train_infer_correction(correction_config(config), mask, old, infer)
    gap = train_infer_gap(old_log_probs_BT=old, infer_log_probs_BT=infer, mask_BT=mask)
    on_response = keep & mask.bool()
    return {
        "is_weight": weight,
        "filter_mask_on_response": on_response,
        "ratio": dict(gap.ratio),
        "diff": dict(gap.diff),
    }


def dpo_loss(inputs: Values, config: Values) -> Values:
    result = preference_loss(
        policy_chosen_P=tensor(inputs["policy_chosen_logps"]),
        policy_rejected_P=tensor(inputs["policy_rejected_logps"]),
        reference_chosen_P=tensor(inputs["reference_chosen_logps"]),
        reference_rejected_P=tensor(inputs["reference_rejected_logps"]),
        chosen_lens_P=tensor(inputs["chosen_len"]),
        rejected_lens_P=tensor(inputs["rejected_len"]),
        **config,
    )
    margins = result.chosen_rewards_P - result.rejected_rewards_P
    return {
        "losses": result.losses_P,
        "loss": result.loss,
        "chosen_rewards": result.chosen_rewards_P,
        "rejected_rewards": result.rejected_rewards_P,
        "acc": (margins > 0).float().mean(),
        "margin": margins.mean(),
    }


def dpo_get_logps(inputs: Values, config: Values) -> Values:
    log_probs, lens = sequence_log_probs(
        tensor(inputs["per_token_logps"]),
        tensor(inputs["attention_mask"], torch.long),
        tensor(inputs["prompt_id_lens"], torch.long),
    )
    chosen, rejected = split_pairs(log_probs)
    chosen_len, rejected_len = split_pairs(lens)
    return {
        "chosen_logps": chosen,
        "rejected_logps": rejected,
        "chosen_len": chosen_len,
        "rejected_len": rejected_len,
    }


def compute_log_probs(inputs: Values, config: Values) -> Values:
    log_probs, entropy = next_token_log_probs(
        tensor(inputs["logits"]),
        tensor(inputs["input_ids"], torch.long),
        tensor(inputs["mask"], torch.long),
        temperature=inputs.get("temperature", 1.0),
        with_entropy=True,
    )
    return {"log_probs": log_probs, "entropy": entropy}


ADAPTERS = {
    "agg_loss": agg_loss,
    "agentic_loss": agentic_loss,
    "train_infer_correction": train_infer_correction,
    "dpo_loss": dpo_loss,
    "dpo_get_logps": dpo_get_logps,
    "compute_log_probs": compute_log_probs,
}
