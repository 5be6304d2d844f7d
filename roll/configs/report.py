"""What `roll check` says about a config: a table of its batch arithmetic, and remarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roll.configs.base import plain_values
from roll.configs.batch_plan import BatchPlan
from roll.configs.load import LoadedConfig
from roll.configs.memory import MemoryEstimate
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
    config, remarks = loaded.config, []
    plans, columns = config.batch_plans(), []
    for name, plan in plans.items():
        columns.append(_cells(plan, _UNITS[config.kind]))
        args, total = plan.role.training_args, plan.total_optimizer_steps
        warmup = args.get_warmup_steps(total)
        if args.lr_scheduler_type == "constant" and (args.warmup_steps or args.warmup_ratio):
            why = "the constant schedule has no warm-up; constant_with_warmup has one"
            remarks.append(f"{name}: {why}")
        elif warmup >= total:
            remarks.append(f"{name}: the warm-up takes {warmup} of {total} optimizer steps")
        if plan.rows_are_turns:
            rates = "the learning rates are those of the fewest optimizer steps"
            remarks.append(f"{name}: every turn is a row; {rates}")
    active = config.active_roles()
    for name, role in config.all_roles().items():
        if role.holds_model and name not in active:
            remarks.append(f"{name} has a strategy and is not started, because nothing needs it")
        limit = role.strategy_config.get("max_model_len") if role.strategy_name == "vllm" else None
        if isinstance(limit, int) and limit < config.sequence_length:
            cut = f"cuts sequences short of sequence_length {config.sequence_length}"
            remarks.append(f"{name}: max_model_len {limit} {cut}")
    group_size = getattr(config, "num_return_sequences_in_group", 2)
    if isinstance(config, PPOConfig) and config.estimator.compares_group and group_size == 1:
        one = "compares the samples of a prompt, and there is one: every advantage will be 0"
        remarks.append(f"{config.adv_estimator} {one}")
    rows = [(label, [cells[label] for cells in columns]) for label in (columns or [{}])[0]]
    return CheckReport(
        loaded,
        config.kind,
        list(plans),
        rows,
        memory or {},
        list(warnings),
        [*remarks, *notes],
    )


def _numbers(plan: BatchPlan) -> dict[str, Any]:
    names = "prompts samples_per_prompt rows ranks rows_per_rank rows_per_micro_batch"
    names += " micro_batches_per_optimizer_step optimizer_steps_per_batch total_optimizer_steps"
    names += " tokens_per_step rows_are_turns max_turns"
    rates = dict(zip(("first", "middle", "last"), plan.learning_rates(), strict=True))
    return {name: getattr(plan, name) for name in names.split()} | {"learning_rates": rates}


def _cells(plan: BatchPlan, unit: str) -> dict[str, str]:
    def count(value: int) -> str:
        """A count of rows, or of what follows from it: a range if rows are turns."""
        if not plan.rows_are_turns:
            return f"{value:,}"
        if plan.max_turns is None:
            return f"at least {value:,}"
        return f"{value:,} to {value * plan.max_turns:,}"

    cells = {f"{unit} per step": f"{plan.prompts:,}"}
    if unit == "prompts":
        cells["samples per prompt"] = f"{plan.samples_per_prompt:,}"
    cells["rows per step"] = count(plan.rows)
    cells["ranks (data parallel)"] = f"{plan.ranks:,}"
    cells["rows per rank"] = count(plan.rows_per_rank)
    if plan.role.use_dynamic_batching_in_train:
        cells["micro-batches"] = f"of up to {plan.role.max_tokens_per_microbatch_in_train:,} tokens"
    else:
        cells["rows per micro-batch"] = f"{plan.rows_per_micro_batch:,}"
        cells["micro-batches per optimizer step"] = f"{plan.micro_batches_per_optimizer_step:,}"
    cells["optimizer steps per batch"] = count(plan.optimizer_steps_per_batch)
    cells["optimizer steps in all"] = count(plan.total_optimizer_steps)
    turns = plan.max_turns if plan.rows_are_turns else 1
    tokens = "unknown" if not turns else f"{plan.tokens_per_step * turns:,}"
    cells["tokens per step, at most"] = tokens
    for when, rate in zip(("first", "middle", "last"), plan.learning_rates(), strict=True):
        cells[f"learning rate, {when} step"] = f"{rate:.3g}"
    return cells
