"""What `roll check` says about a config: its batch arithmetic as rows of a table, and remarks on what may surprise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roll.configs.base import plain_values
from roll.configs.batch_plan import BatchPlan
from roll.configs.load import LoadedConfig
from roll.configs.memory import MemoryEstimate
from roll.configs.pipeline_config import BaseConfig
from roll.configs.ppo_config import PPOConfig

_UNITS = {"dpo": "pairs", "rlvr": "prompts", "agentic": "trajectories", "sft": "rows"}


@dataclass(frozen=True)
class CheckReport:
    """A checked config, ready to be printed."""

    loaded: LoadedConfig
    pipeline: str
    roles: list[str]
    """Trained roles: the columns of the table."""

    rows: list[tuple[str, list[str]]]
    """Label and one cell per role."""

    memory: dict[str, MemoryEstimate]
    """Of each running role whose model could be read, on one device."""

    warnings: list[str]
    """What may not go as meant."""

    remarks: list[str]
    """What may surprise, and what was not looked at."""

    def as_json(self) -> dict[str, Any]:
        """The same for a program, with the resolved config."""
        config = self.loaded.config
        return {
            "path": str(self.loaded.path),
            "valid": True,
            "errors": [],
            "warnings": self.warnings,
            "pipeline": self.pipeline,
            "backend": config.execution_backend,
            "plans": {name: _numbers(plan) for name, plan in config.batch_plans().items()},
            "memory": {
                name: {**asdict(item), "total": item.total} for name, item in self.memory.items()
            },
            "ignored": list(self.loaded.ignored),
            "replaced": [asdict(item) for item in self.loaded.replaced],
            "notes": self.remarks,
            "config": plain_values(config),
        }


def check_report(
    loaded: LoadedConfig,
    memory: dict[str, MemoryEstimate] | None = None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> CheckReport:
    """The report on a config, with what `roll.pipeline.preflight` found."""
    config = loaded.config
    pipeline = config.kind
    plans = config.batch_plans()
    cells = [_cells(plan, _UNITS[pipeline]) for plan in plans.values()]
    labels = list(cells[0]) if cells else []
    rows = [(label, [column[label] for column in cells]) for label in labels]
    return CheckReport(
        loaded,
        pipeline,
        list(plans),
        rows,
        memory or {},
        list(warnings),
        [*_remarks(config), *notes],
    )


def _numbers(plan: BatchPlan) -> dict[str, Any]:
    first, middle, last = plan.learning_rates()
    return {
        "prompts": plan.prompts,
        "samples_per_prompt": plan.samples_per_prompt,
        "rows": plan.rows,
        "ranks": plan.ranks,
        "rows_per_rank": plan.rows_per_rank,
        "rows_per_micro_batch": plan.rows_per_micro_batch,
        "micro_batches_per_optimizer_step": plan.micro_batches_per_optimizer_step,
        "optimizer_steps_per_batch": plan.optimizer_steps_per_batch,
        "total_optimizer_steps": plan.total_optimizer_steps,
        "tokens_per_step": plan.tokens_per_step,
        "learning_rates": {"first": first, "middle": middle, "last": last},
        "rows_are_turns": plan.rows_are_turns,
        "max_turns": plan.max_turns,
    }


def _cells(plan: BatchPlan, unit: str) -> dict[str, str]:
    def count(value: int) -> str:
        """A count of rows, or of what follows from it: a range if rows are turns."""
        if not plan.rows_are_turns:
            return f"{value:,}"
        return (
            f"at least {value:,}"
            if plan.max_turns is None
            else f"{value:,} to {value * plan.max_turns:,}"
        )

    tokens = plan.tokens_per_step * (plan.max_turns or 1 if plan.rows_are_turns else 1)
    cells = {f"{unit} per step": f"{plan.prompts:,}"}
    if unit == "prompts":
        cells["samples per prompt"] = f"{plan.samples_per_prompt:,}"
    cells |= {
        "rows per step": count(plan.rows),
        "ranks (data parallel)": f"{plan.ranks:,}",
        "rows per rank": count(plan.rows_per_rank),
    }
    if plan.role.use_dynamic_batching_in_train:
        cells["micro-batches"] = f"of up to {plan.role.max_tokens_per_microbatch_in_train:,} tokens"
    else:
        cells["rows per micro-batch"] = f"{plan.rows_per_micro_batch:,}"
        cells["micro-batches per optimizer step"] = f"{plan.micro_batches_per_optimizer_step:,}"
    cells |= {
        "optimizer steps per batch": count(plan.optimizer_steps_per_batch),
        "optimizer steps in all": count(plan.total_optimizer_steps),
        "tokens per step, at most": "unknown"
        if plan.rows_are_turns and not plan.max_turns
        else f"{tokens:,}",
    }
    rates = zip(("first", "middle", "last"), plan.learning_rates(), strict=True)
    return cells | {f"learning rate, {when} step": f"{rate:.3g}" for when, rate in rates}


def _remarks(config: BaseConfig) -> list[str]:
    remarks = []
    for name, plan in config.batch_plans().items():
        args, total = plan.role.training_args, plan.total_optimizer_steps
        if args.lr_scheduler_type == "constant" and (args.warmup_steps or args.warmup_ratio):
            remarks.append(
                f"{name}: the constant schedule has no warm-up; constant_with_warmup has one"
            )
        elif args.get_warmup_steps(total) >= total:
            remarks.append(
                f"{name}: the warm-up takes {args.get_warmup_steps(total)} of {total} optimizer steps"
            )
        if plan.rows_are_turns:
            remarks.append(
                f"{name}: every turn is a row; the learning rates are those of the fewest optimizer steps"
            )
    active = config.active_roles()
    for name, role in config.all_roles().items():
        if role.holds_model and name not in active:
            remarks.append(f"{name} has a strategy and is not started, because nothing needs it")
        limit = role.strategy_config.get("max_model_len") if role.strategy_name == "vllm" else None
        if isinstance(limit, int) and limit < config.sequence_length:
            remarks.append(
                f"{name}: max_model_len {limit} cuts sequences short of sequence_length {config.sequence_length}"
            )
    group_size = getattr(config, "num_return_sequences_in_group", 2)
    if isinstance(config, PPOConfig) and config.estimator.compares_group and group_size == 1:
        remarks.append(
            f"{config.adv_estimator} compares the samples of a prompt, and there is one: every advantage will be 0"
        )
    return remarks
