"""Optimizer steps: one gradient per step, whatever the micro-batches, the ranks and the padding.

    counts  = valid tokens, valid rows and rows of the whole step, over all ranks
    loss_k  = loss_func(micro-batch k, output)        a masked sum divided by those counts
    gradient = sum over micro-batches and ranks of d loss_k

so nothing is averaged, and the number of micro-batches or ranks appears nowhere.

Log-probs from hidden states take one matrix product forward and three backward, one of which makes
the same logits again. Here the logits of a micro-batch are kept for its backward as far as
`strategy_config.keep_logits_gib` goes, and where all fit, the head costs three products. Where they
do not, the head is trained some rows at a time, one pass over each (`loss_in_parts`): three
products again. That is so for any loss, because losses add up over rows.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import get_scheduler

from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.micro_batches import cut_by_tokens
from roll.distributed.strategy.strategy import (
    PLACEHOLDER,
    InferenceStrategy,
    LossFunction,
    Metrics,
    ModelOutput,
    OffloadStateType,
    full_tensor,
    includes,
)
from roll.exceptions import RollError
from roll.models.checkpoint import (
    load_hf_weights,
    load_training,
    read_optimizer,
    save_training,
    write_optimizer,
)
from roll.ops.linear_log_probs import loss_in_parts
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs
from roll.ops.softmax_rows import accumulation_dtype
from roll.utils.columns import loss_mask
from roll.utils.metrics.reduction import append_to_dict, bring_to_host

MAX_BAD_STEPS = 3  # consecutive non-finite steps before a run stops


class NonFiniteStepError(RollError, FloatingPointError):
    """Several optimizer steps in a row had a loss or gradient that is not a number."""


class TrainStrategy(InferenceStrategy):
    """A model on this rank that also trains. Subclasses say how it is placed and gradients meet."""

    # Whether all weights are updated by one kernel; sharded ones cannot be.
    fuses_optimizer: ClassVar[bool] = False

    optimizer: Any  # torch's, or what has its `step` and `zero_grad`
    scheduler: torch.optim.lr_scheduler.LRScheduler
    bad_steps_in_a_row: int = 0

    # -- what a subclass defines -------------------------------------------------------------------

    @abstractmethod
    def reduce_gradients(self) -> None:
        """After the last backward pass: make every rank's gradients the sum over ranks."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a micro-batch's loss. `is_last` lets collectives start early."""
        loss.backward()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients to at most `max_norm`; returns the norm before, over all ranks."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def make_optimizer(self) -> None:
        """AdamW and its schedule, as `training_args` say."""
        args = self.worker_config.training_args
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
            fused=self.fuses_optimizer or None,
        )
        self.make_scheduler(self.optimizer)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        args = self.worker_config.training_args
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(args.max_steps),
            num_training_steps=args.max_steps,
        )

    # -- the step ----------------------------------------------------------------------------------

    def train_step(self, batch: DataProto, loss_func: LossFunction) -> Metrics:
        """One optimizer step on all rows of `batch` (this rank's share of it).

        Returns the metrics of `loss_func` as lists over micro-batches, and `{role}/grad_norm`,
        `{role}/skipped_steps`. A step whose loss or gradient norm is not finite leaves weights and
        optimizer state untouched; several in a row raise NonFiniteStepError.
        """
        counts = self.global_counts(batch)
        plan = self.plan_micro_batches(batch, training=True)
        self.set_training(True)
        reports: list[Mapping[str, Any]] = []
        losses: list[Tensor] = []
        for index, micro in enumerate(self.micro_batches(batch, plan)):
            micro.data.meta_info.update(counts)
            output = self.forward_model(micro.data)
            if plan[index]:
                loss, found = self.loss_of_micro_batch(micro.data, output, loss_func)
                reports += found
            else:
                # Zero with a graph behind it: a rank without rows takes part in the collectives.
                nothing = torch.zeros_like(micro.data["attention_mask"])
                loss = next_token_log_probs(output, micro.data["input_ids"], nothing)[0].sum()
            losses.append(loss.detach().float())
            self.backward(loss, is_last=index == len(plan) - 1)
        self.reduce_gradients()
        grad_norm = float(self.clip_gradients(self.worker.pipeline_config.max_grad_norm))
        total = float(torch.stack(losses).sum())
        # A rank may be the only one with a non-finite loss, and all must take the same decision.
        is_bad = not (math.isfinite(total) and math.isfinite(grad_norm))
        if self.ranks.sum([float(is_bad)])[0] == 0:
            self.optimizer.step()
            self.bad_steps_in_a_row = 0
        else:
            self.bad_steps_in_a_row += 1
        self.optimizer.zero_grad()
        # Planned steps, so that the schedule ends where the run ends even if a step was skipped.
        self.scheduler.step()
        if self.bad_steps_in_a_row >= MAX_BAD_STEPS:
            name = self.worker.worker_name
            folder = Path(self.worker.pipeline_config.output_dir) / "non_finite" / name
            batch.save(folder)
            raise NonFiniteStepError(
                f"{name}: {self.bad_steps_in_a_row} optimizer steps in a row were not finite (loss "
                f"{total}, gradient norm {grad_norm}); the weights are those of the last good "
                f"step. The last batch is in {folder} (DataProto.load reads it). Likely causes: a "
                "learning rate that is too high, -inf log-probabilities at response tokens, or "
                "half-precision overflow."
            )
        metrics: Metrics = {}
        for report in bring_to_host(reports):
            append_to_dict(metrics, report)
        role = self.worker_config.name
        metrics[f"{role}/grad_norm"] = grad_norm
        metrics[f"{role}/skipped_steps@max"] = float(self.bad_steps_in_a_row > 0)
        return metrics

    def global_counts(self, batch: DataProto) -> dict[str, Any]:
        """The denominators of this optimizer step, over all ranks, for every mask in
        `meta_info["loss_mask_keys"]`."""
        keys = batch.meta_info.get("loss_mask_keys")
        if not keys:
            keys = ["response_mask"] if "response_mask" in batch else []
        counts = [float(len(batch))]
        for key in keys:
            mask = loss_mask(batch, key)
            counts += [float(mask.sum()), float(mask.any(dim=1).sum())]
        if batch.meta_info.get(PLACEHOLDER, False):
            counts = [0.0] * len(counts)
        total_rows, *rest = self.ranks.sum(counts)
        tokens = {key: max(rest[2 * i], 1.0) for i, key in enumerate(keys)}
        samples = {key: max(rest[2 * i + 1], 1.0) for i, key in enumerate(keys)}
        return {
            "batch_num_tokens": tokens,
            "global_valid_samples": {**samples, "default": max(total_rows, 1.0)},
            "loss_norm_width": self.ranks.max(batch["attention_mask"].shape[1] - 1),
        }

    def loss_of_micro_batch(
        self, data: DataProto, output: ModelOutput, loss_func: LossFunction
    ) -> tuple[Tensor, list[Mapping[str, Any]]]:
        """The loss, with the metrics of each of the parts that it was computed in."""
        parts = self.parts_of(data, output)
        found: list[Mapping[str, Any]] = []
        if not isinstance(output, LinearLogits) or len(parts) == 1:
            loss, metrics = loss_func(data, output)
            return loss, [metrics]

        def loss_of_rows(part_output: LinearLogits, rows: slice) -> Tensor:
            loss, metrics = loss_func(data.slice(rows.start, rows.stop), part_output)
            found.append(metrics)
            return loss

        return loss_in_parts(output, parts, loss_of_rows), found

    def parts_of(self, data: DataProto, output: ModelOutput) -> list[slice]:
        """The rows of a micro-batch, cut so that the logits of each part may be kept."""
        whole = [slice(0, output.shape[0])]
        # In fp16 the gradients need the scale of the loss, which is known when the loss is.
        if not isinstance(output, LinearLogits) or output.dtype == torch.float16:
            return whole
        room, token_bytes = self.kept_logits_bytes, output.shape[-1] * output.dtype.itemsize
        if room == 0 or output.shape[:2].numel() * token_bytes <= room:
            return whole
        weight, sum_dtype = output.weight, accumulation_dtype(output.weight.dtype)
        # Parts add up the head's gradient, which must not take more memory than the logits may.
        adds_up = weight.requires_grad and weight.dtype != sum_dtype
        if adds_up and room < weight.numel() * sum_dtype.itemsize:
            return whole
        mask = data["response_mask"] if "response_mask" in data else data["attention_mask"]
        unit = data.meta_info.get("rows_per_unit", 1)
        return cut_by_tokens(mask.count_nonzero(1).tolist(), room // token_bytes, unit=unit)

    def score(
        self,
        output: ModelOutput,
        input_ids: Tensor,
        mask: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        return next_token_log_probs(
            output,
            input_ids,
            mask,
            temperature=temperature,
            with_entropy=with_entropy,
            keep_bytes=self.kept_logits_bytes,
        )

    @functools.cached_property
    def kept_logits_bytes(self) -> int:
        """How much of a micro-batch's logits may wait for its backward."""
        gib = self.options.keep_logits_gib
        if gib is None and self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory // 50
        return int((1 if gib is None else gib) * 2**30)

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return float(self.scheduler.get_last_lr()[0])

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients that the optimizer is about to use, whole. For tests and diagnosis; all
        ranks call it."""
        return {
            name: full_tensor(parameter.grad).detach().cpu().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    # -- checkpoints and moving --------------------------------------------------------------------

    def save_checkpoint(self, save_dir: str | Path, global_step: int) -> dict[str, float]:
        """See `roll.models.checkpoint`. All ranks call it; returns the seconds of each part."""
        return save_training(self, Path(save_dir), global_step)

    def load_checkpoint(self, load_dir: str | Path) -> int:
        """Continue from what `save_checkpoint` wrote; returns its global step."""
        return load_training(self, Path(load_dir))

    def save_optimizer(self, folder: Path) -> None:
        """All ranks call it."""
        if self.ranks.rank == 0:
            write_optimizer(folder, self.model, self.optimizer, sharded=False)

    def load_optimizer(self, folder: Path) -> None:
        read_optimizer(folder, self.model, self.optimizer, sharded=False)

    def load_weights(self, folder: Path) -> None:
        load_hf_weights(self.model, folder)

    def load_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        super().load_states(include, non_blocking)
        if includes(include, OffloadStateType.optimizer_states):
            self.move_optimizer(self.device, non_blocking)

    def offload_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        if includes(include, OffloadStateType.optimizer_states):
            self.move_optimizer(torch.device("cpu"), non_blocking)
        super().offload_states(include, non_blocking)

    def move_optimizer(self, device: torch.device, non_blocking: bool) -> None:
        """Step counts stay where they are: torch keeps them on the CPU."""
        if self.device.type == "cpu":
            return
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device, non_blocking=non_blocking)
