"""Optimizer steps: one gradient per step, whatever the micro-batches, the ranks and the padding.

    counts  = valid tokens, valid rows and rows of the whole step, over all ranks
    loss_k  = loss_func(micro-batch k, output)        a masked sum divided by those counts
    gradient = sum over micro-batches and ranks of d loss_k

so nothing is averaged, and the number of micro-batches or ranks appears nowhere.

A loss reads log-probs through `score`. From hidden states that takes one matrix product forward and three backward, one
of which makes the same logits again. `TrainStrategy.score` keeps those of a micro-batch for its backward as far as
`strategy_config.keep_logits_gib` goes, and where all fit, the head costs three products. Where they do not, the head is
trained some rows at a time, one pass over each (`roll.ops.loss_in_parts`): three products again. That is so for any
loss, because losses add up over rows. Only the selected (response) tokens count.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.strategy.checkpoint import (
    load_json,
    load_optimizer,
    random_states,
    restore_random_states,
    save_json,
    save_optimizer,
)
from roll.distributed.strategy.micro_batches import (
    Rows,
    cut_by_tokens,
    plan_by_rows,
    plan_by_tokens,
)
from roll.distributed.strategy.strategy import (
    InferenceStrategy,
    LossFunction,
    Metrics,
    ModelOutput,
    full_tensor,
    row_lengths,
)
from roll.exceptions import DataError, RollError
from roll.models.hf_checkpoint import atomic_folder, load_hf_weights, write_hf_files
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import next_token_log_probs
from roll.ops.loss_in_parts import loss_in_parts
from roll.ops.softmax_rows import accumulation_dtype
from roll.utils.columns import loss_mask
from roll.utils.metrics.reduction import append_to_dict, bring_to_host
from roll.utils.offload_states import OffloadStateType, includes, move_optimizer

TRAINING_FOLDER = "training"
LossInParts = tuple[Tensor, list[Mapping[str, Any]]]
MAX_BAD_STEPS = 3  # consecutive non-finite steps before a run stops
PLACEHOLDER = "is_placeholder"  # meta_info key: this rank has no rows in this step; its one row only keeps step with others


class NonFiniteStepError(RollError, FloatingPointError):
    """Several optimizer steps in a row had a loss or gradient that is not a number."""


class TrainStrategy(InferenceStrategy):
    """A model on this rank that also trains. Subclasses say how it is placed and how gradients meet."""

    is_trainable: ClassVar[bool] = True
    fuses_optimizer: ClassVar[bool] = (
        False  # whether all weights are updated by one kernel; not with sharded ones
    )

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    bad_steps_in_a_row: int = 0

    # -- what a subclass defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def reduce_gradients(self) -> None:
        """After the last backward pass: make every rank's gradients the sum over ranks."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of one micro-batch's loss. `is_last` allows collectives to start early."""
        loss.backward()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients to at most `max_norm`; returns the norm before, over all ranks."""
        parameters = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def apply_gradients(self) -> None:
        self.optimizer.step()

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

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
        """How much of a micro-batch's logits may wait for its backward; default: 2% of the GPU's memory, or 1 GiB."""
        gib = self.options.keep_logits_gib
        if gib is None:
            on_gpu = self.device.type == "cuda"
            return (
                torch.cuda.get_device_properties(self.device).total_memory // 50
                if on_gpu
                else 1 << 30
            )
        return int(gib * 2**30)

    # -- the step ------------------------------------------------------------------------------------------------------

    def train_step(self, batch: DataProto, loss_func: LossFunction) -> Metrics:
        """One optimizer step on all rows of `batch` (this rank's share of it).

        Returns the metrics of `loss_func` as lists over micro-batches, and `{role}/grad_norm`, `{role}/skipped_steps`.
        A step whose loss or gradient norm is not finite leaves weights and optimizer state untouched.
        """
        counts = self.global_counts(batch)
        plan = self._plan_training(batch)
        self.set_training(True)
        reports: list[Mapping[str, Any]] = []
        losses: list[Tensor] = []
        for index, micro in enumerate(self._micro_batches(batch, plan)):
            micro.data.meta_info.update(counts)
            output = self.forward_model(micro.data)
            if plan[index]:
                loss, found = self._loss(micro.data, output, loss_func)
                reports += found
            else:
                loss = connected_zero(output, micro.data)
            losses.append(loss.detach().float())
            self.backward(loss, is_last=index == len(plan) - 1)
        grad_norm = self._optimizer_step(torch.stack(losses).sum(), batch)
        metrics: Metrics = {}
        for report in bring_to_host(reports):
            append_to_dict(metrics, report)
        role = self.worker_config.name
        return {
            **metrics,
            f"{role}/grad_norm": grad_norm,
            f"{role}/skipped_steps@max": float(self.bad_steps_in_a_row > 0),
        }

    def _loss(self, data: DataProto, output: ModelOutput, loss_func: LossFunction) -> LossInParts:
        """The loss of a micro-batch, with the metrics of each of the parts that it was computed in."""
        parts = self._parts(data, output)
        if not isinstance(output, LinearLogits) or len(parts) == 1:
            loss, metrics = loss_func(data, output)
            return loss, [metrics]
        found: list[Mapping[str, Any]] = []

        def loss_of_rows(part_output: LinearLogits, rows: slice) -> Tensor:
            loss, metrics = loss_func(data.slice(rows.start, rows.stop), part_output)
            found.append(metrics)
            return loss

        return loss_in_parts(output, parts, loss_of_rows), found

    def _parts(self, data: DataProto, output: ModelOutput) -> list[slice]:
        """The rows of a micro-batch, cut so that the logits of each part may be kept; one part if all may, or if adding
        up the gradient of the head would take more memory than logits may. In fp16 also one: its gradients need the
        scale of the loss, which comes when the loss is known."""
        whole = [slice(0, output.shape[0])]
        if not isinstance(output, LinearLogits) or output.dtype == torch.float16:
            return whole
        weight, token_bytes = output.weight, output.shape[-1] * output.dtype.itemsize
        sum_dtype = accumulation_dtype(weight.dtype)
        sum_bytes = (
            weight.numel() * sum_dtype.itemsize
            if weight.requires_grad and weight.dtype != sum_dtype
            else 0
        )
        all_fit = output.shape[:2].numel() * token_bytes <= self.kept_logits_bytes
        if all_fit or self.kept_logits_bytes == 0 or self.kept_logits_bytes < sum_bytes:
            return whole
        mask = data["response_mask"] if "response_mask" in data else data["attention_mask"]
        return cut_by_tokens(
            mask.count_nonzero(1).tolist(),
            self.kept_logits_bytes // token_bytes,
            unit=data.meta_info.get("rows_per_unit", 1),
        )

    def _optimizer_step(self, loss: Tensor, batch: DataProto) -> float:
        self.reduce_gradients()
        grad_norm = float(self.clip_gradients(self.worker.pipeline_config.max_grad_norm))
        # A rank may be the only one with a non-finite loss, and all must take the same decision.
        bad_ranks = self.ranks.sum(
            [0.0 if math.isfinite(float(loss)) and math.isfinite(grad_norm) else 1.0]
        )[0]
        if bad_ranks == 0:
            self.apply_gradients()
            self.bad_steps_in_a_row = 0
        else:
            self.bad_steps_in_a_row += 1
        self.clear_gradients()
        # Planned steps, so that the schedule ends where the run ends even if a step was skipped.
        self.scheduler.step()
        if self.bad_steps_in_a_row >= MAX_BAD_STEPS:
            raise self._non_finite_error(float(loss), grad_norm, batch)
        return grad_norm

    def _non_finite_error(
        self, loss: float, grad_norm: float, batch: DataProto
    ) -> NonFiniteStepError:
        folder = (
            Path(self.worker.pipeline_config.output_dir)
            / "non_finite"
            / f"{self.worker.worker_name}"
        )
        batch.save(folder)
        return NonFiniteStepError(
            f"{self.worker.worker_name}: {self.bad_steps_in_a_row} optimizer steps in a row were not finite (loss "
            f"{loss}, gradient norm {grad_norm}); the weights are those of the last good step. The last batch is in "
            f"{folder} (DataProto.load reads it). Likely causes: a learning rate that is too high, -inf "
            "log-probabilities at response tokens, or half-precision overflow."
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_training_state(self, folder: Path) -> None:
        """The optimizer's state. All ranks call it."""
        if self.ranks.rank == 0:
            save_optimizer(folder / "optimizer", self.model, self.optimizer, sharded=False)

    def load_training_state(self, folder: Path) -> None:
        load_optimizer(folder / "optimizer", self.model, self.optimizer, sharded=False)

    def load_weights(self, folder: Path) -> None:
        load_hf_weights(self.unwrap_model(), folder)

    def save_checkpoint(self, save_dir: str | Path, global_step: int) -> dict[str, float]:
        """Write weights, tokenizer and all that exact resume needs to `save_dir`. All ranks call it.

        Everything goes to a temporary folder that rank 0 renames when all ranks are done, so that a crash leaves the
        previous checkpoint whole and never a folder that looks complete. Returns the seconds of each part.
        """
        started = time.monotonic()
        state_dict = self.full_state_dict()
        with self._folder_for_all_ranks(Path(save_dir)) as folder:
            if self.ranks.rank == 0:
                write_hf_files(self.unwrap_model(), self.tokenizer, folder, state_dict)
                (folder / TRAINING_FOLDER).mkdir()
                save_json(
                    folder / TRAINING_FOLDER / "state.json", self._describe_state(global_step)
                )
            self.ranks.barrier()
            weights_done = time.monotonic()
            self.save_training_state(folder / TRAINING_FOLDER)
            torch.save(random_states(), folder / TRAINING_FOLDER / f"rng-{self.ranks.rank}.pt")
        return {"hf_save": weights_done - started, "total": time.monotonic() - started}

    def load_checkpoint(self, load_dir: str | Path) -> int:
        """Continue from what `save_checkpoint` wrote; returns its global step. All ranks call it.

        With the same number of ranks the run goes on bit by bit as if it had not stopped. With another number the
        optimizer continues exactly and the random states start from the seed, which a warning says.
        """
        folder = Path(load_dir) / TRAINING_FOLDER
        state = load_json(folder / "state.json")
        dtype = str(next(self.model.parameters()).dtype)
        if state["dtype"] != dtype:
            raise DataError(
                f"{load_dir}: the checkpoint was trained in {state['dtype']} and this run uses {dtype}; set "
                "model_args.dtype to match, or start anew from its weights by setting `pretrain` to that folder"
            )
        self.load_weights(Path(load_dir))
        self.load_training_state(folder)
        self.scheduler.load_state_dict(state["scheduler"])
        self.bad_steps_in_a_row = state["bad_steps_in_a_row"]
        if state["world_size"] == self.ranks.size:
            restore_random_states(
                torch.load(folder / f"rng-{self.ranks.rank}.pt", weights_only=True)
            )
        else:
            self.worker.logger.warning(
                f"{load_dir} was made by {state['world_size']} ranks and is loaded by {self.ranks.size}: weights, "
                "optimizer and schedule continue exactly, random states start from the seed"
            )
        return state["global_step"]

    @contextlib.contextmanager
    def _folder_for_all_ranks(self, folder: Path) -> Iterator[Path]:
        """One temporary folder that all ranks write into; it takes its name once the last of them is done."""
        with contextlib.ExitStack() as stack:
            temporary = None
            if self.ranks.rank == 0:
                temporary = str(stack.enter_context(atomic_folder(folder, replace=True)))
            yield Path(self.ranks.share(temporary))
            self.ranks.barrier()
        self.ranks.barrier()

    def _describe_state(self, global_step: int) -> dict[str, Any]:
        return {
            "global_step": global_step,
            "strategy": self.strategy_name,
            "world_size": self.ranks.size,
            "dtype": str(next(self.model.parameters()).dtype),
            "scheduler": self.scheduler.state_dict(),
            "bad_steps_in_a_row": self.bad_steps_in_a_row,
        }

    # -- moving ------------------------------------------------------------------------------------------------------

    def load_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        super().load_states(include, non_blocking)
        if includes(include, OffloadStateType.optimizer_states) and self.device.type != "cpu":
            move_optimizer(self.optimizer, self.device, non_blocking)

    def offload_states(
        self, include: Collection[str] | None = None, non_blocking: bool = False
    ) -> None:
        if includes(include, OffloadStateType.optimizer_states) and self.device.type != "cpu":
            move_optimizer(self.optimizer, torch.device("cpu"), non_blocking)
        super().offload_states(include, non_blocking)

    # -- counts and plans ----------------------------------------------------------------------------------------------

    def global_counts(self, batch: DataProto) -> dict[str, Any]:
        """The denominators of this optimizer step, over all ranks, for every mask in `meta_info["loss_mask_keys"]`."""
        keys = batch.meta_info.get("loss_mask_keys") or [
            key for key in ("response_mask",) if key in batch
        ]
        is_placeholder = batch.meta_info.get(PLACEHOLDER, False)
        local = [0.0 if is_placeholder else float(len(batch))]
        for key in keys:
            mask = loss_mask(batch, key)
            local += (
                [0.0, 0.0] if is_placeholder else [float(mask.sum()), float(mask.any(dim=1).sum())]
            )
        total_rows, *rest = self.ranks.sum(local)
        tokens = {key: max(rest[2 * i], 1.0) for i, key in enumerate(keys)}
        samples = {key: max(rest[2 * i + 1], 1.0) for i, key in enumerate(keys)}
        width = self.ranks.max(batch["attention_mask"].shape[1] - 1)
        return {
            "batch_num_tokens": tokens,
            "global_valid_samples": {**samples, "default": max(total_rows, 1.0)},
            "loss_norm_width": width,
        }

    def _plan_training(self, batch: DataProto) -> list[Rows]:
        config = self.worker_config
        unit = batch.meta_info.get("rows_per_unit", 1)
        if batch.meta_info.get(PLACEHOLDER, False):
            plan: list[Rows] = [[]]
        elif config.use_dynamic_batching_in_train:
            plan = plan_by_tokens(
                row_lengths(batch),
                config.max_tokens_per_microbatch_in_train,
                round_to=config.sequence_length_round_in_train,
                unit=unit,
            )
        else:
            plan = plan_by_rows(len(batch), config.training_args.per_device_train_batch_size * unit)
        return self.same_length_on_all_ranks(plan, unit=unit)

    # -- optimizer -----------------------------------------------------------------------------------------------------

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return float(self.scheduler.get_last_lr()[0])

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients that the optimizer is about to use, whole. For tests and diagnosis; all ranks call it."""
        return {
            name: full_tensor(parameter.grad).detach().cpu().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def make_optimizer(self) -> None:
        args = self.worker_config.training_args
        self.optimizer = torch.optim.AdamW(
            self.trainable_parameters(),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
            fused=self.fuses_optimizer or None,
        )
        self.make_scheduler(self.optimizer)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        args = self.worker_config.training_args
        total = args.max_steps
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(total),
            num_training_steps=total,
        )


def connected_zero(output: ModelOutput, data: DataProto) -> Tensor:
    """Zero with a graph behind it, so that ranks without rows take part in the collectives of backward."""
    mask = torch.zeros_like(data["attention_mask"])
    return next_token_log_probs(output, data["input_ids"], mask)[0].sum()
