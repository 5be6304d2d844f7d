"""Everything about a run that can be found wrong before a model is loaded, all of it at once.

`roll train` and `roll check` both call `examine`, so what one refuses the other refuses, in the same words. Most of it
needs no torch, whose import alone takes longer than a check should: files, devices and packages are looked at directly.
What only a class can say (a worker, reward or pipeline of the user's own) is asked of the class, which may import it.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.arguments import MAX_LENGTHS, DataArguments
from roll.configs.base import Problem, did_you_mean
from roll.configs.load import LoadedConfig, compose
from roll.configs.memory import MemoryEstimate, estimate_memory, memory_verdict
from roll.configs.model_files import (
    ADAPTER_CONFIG,
    cached_snapshot,
    check_model_files,
    locate_model,
    model_of_run,
    require_tokenizer,
    saved_tensors,
)
from roll.configs.pipeline_config import BaseConfig
from roll.configs.worker_config import WorkerConfig
from roll.datasets.file_tokenizer import FileTokenizer
from roll.datasets.tables import JoinedTable, Table, peek_table
from roll.distributed.scheduler.resource_manager import ResourceManager, missing_gpus
from roll.exceptions import ConfigError, DataError, MissingDependencyError, install_hint
from roll.models.checkpoint import read_global_step
from roll.pipeline.registry import read_config
from roll.roll_paths import MOVED
from roll.utils.import_utils import import_class
from roll.utils.machine import Machine, this_machine
from roll.utils.run_folder import resume_point

MAX_BYTES, MAX_ROWS = (
    32 * 2**20,
    5_000,
)  # of a data file: what can be read and encoded in about a second
ENV_SECONDS = 20.0  # that an environment may take to be made and reset
# Strategies and backends that a package brings: its name, and the extra that has it.
PACKAGES = {"ray": "ray", "vllm": "vllm", "deepspeed": "deepspeed", "peft": "lora"}
TRACKERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "stdout": "",
    "jsonl": "",
    "none": "",
}
# Rewards of ours that need nothing but their function: the package that it needs, if any. Others are asked.
_REWARDS = "roll.pipeline.rlvr.rewards"
PLAIN_REWARDS = {
    f"{_REWARDS}.math_rule_reward_worker.MathRuleRewardWorker": "math_verify",
    f"{_REWARDS}.multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker": "",
}


@dataclass
class Findings:
    """What was found out about a run that has not begun."""

    errors: list[Problem] = field(default_factory=list)
    """It cannot run."""

    warnings: list[str] = field(default_factory=list)
    """It runs, perhaps not as meant."""

    notes: list[str] = field(default_factory=list)
    """What was not looked at, and why."""

    memory: dict[str, MemoryEstimate] = field(default_factory=dict)

    def check(self, key: str, question: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The answer to a question; an error that it raises on purpose is noted under `key`, or the key it names."""
        try:
            return question(*args, **options)
        except (ConfigError, DataError, MissingDependencyError) as error:
            message = str(error).removeprefix(f"{key} ")
            named, _, rest = message.partition(": ")
            names_a_key = bool(rest) and re.fullmatch(r"[a-z_]+(\.[\w-]+)*", named) is not None
            if names_a_key and (named == key or named.startswith(f"{key.split('.')[0]}.")):
                self.errors.append(Problem(named, rest))
            elif names_a_key and key.endswith(named):
                self.errors.append(Problem(key, rest))
            else:
                self.errors.append(Problem(key, message))
        except (ImportError, SyntaxError) as error:
            self.errors.append(Problem(key, f"cannot be imported: {type(error).__name__}: {error}"))
        return None


@dataclass(frozen=True)
class Checked:
    """A config file with all that was found."""

    path: Path
    loaded: LoadedConfig | None
    """None where the file is too broken to make a config of; with errors, parts of it may be missing."""

    errors: list[str]
    """With file and line."""

    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    memory: dict[str, MemoryEstimate] = field(default_factory=dict)

    def require(self) -> LoadedConfig:
        """The config, if it can be trained with; otherwise a ConfigError that has all errors, one a line."""
        if self.errors or self.loaded is None:
            raise ConfigError("\n".join(self.errors))
        return self.loaded


def examine(
    path: str | Path, overrides: Sequence[str] = (), machine: Machine | None = None
) -> Checked:
    """Look at a config file, and at everything that a run of it needs before its models.

    Args:
        machine: compare with this machine instead of the one that this program runs on; whether its packages are
            installed and its devices there cannot be known.

    Raises:
        ConfigError: the file is missing, is not YAML, or has references that do not resolve: there are no values.
    """
    composition = compose(path, overrides)
    loaded, problems, left_out = read_config(composition)
    findings = Findings()
    if loaded is None:
        _look_at_raw_paths(composition.values, findings)
    else:
        findings = preflight(loaded.config, machine, compare_memory=not left_out)
        findings.errors = [*loaded.config.missing_for_training(), *findings.errors]
    # What was left out was complained about already, and what follows from its absence is not the file's fault.
    problems += [
        item for item in findings.errors if not any(_is_about(item.key, key) for key in left_out)
    ]
    warnings = [] if loaded is None else [*loaded.warnings(), *findings.warnings]
    return Checked(
        composition.path,
        loaded,
        composition.located(problems),
        warnings,
        findings.notes,
        findings.memory,
    )


def preflight(
    config: BaseConfig, machine: Machine | None = None, *, compare_memory: bool = True
) -> Findings:
    """Every check that a run of this config makes before it loads a model. `machine`: see `examine`."""
    findings = Findings()
    _look_at_run_folder(config, findings)
    _look_at_packages(config, findings, is_elsewhere=machine is not None)
    _look_at_models(config, findings)
    is_cluster = _look_at_devices(config, findings, machine)
    for name, role in _started(config).items():
        _look_at_worker(config, name, role, findings)
    kind = config.kind
    if config.pipeline_cls is not None:
        findings.check("pipeline_cls", import_class, str(config.pipeline_cls))
    if getattr(config, "is_replay", False):
        _look_at_dumps(config, findings)
    elif kind == "agentic":
        _look_at_environments(config, findings)
    elif kind in ("rlvr", "dpo", "sft"):
        _look_at_data(config, findings)
        _look_at_rewards(config, findings)
    if not findings.errors and compare_memory:
        _compare_memory(config, findings, machine, is_cluster=is_cluster)
    return findings


def _started(config: BaseConfig) -> dict[str, WorkerConfig]:
    """The roles that a pipeline makes workers for."""
    return {name: role for name, role in config.active_roles().items() if name != "validation"}


# -- the run and its programs ------------------------------------------------------------------------------------------


def _look_at_run_folder(config: BaseConfig, findings: Findings) -> None:
    _, checkpoint = findings.check(
        "exp_name" if config.resume_from_checkpoint is False else "resume_from_checkpoint",
        resume_point,
        config.output_dir,
        config.exp_name,
        config.resume_from_checkpoint,
    ) or (None, None)
    if checkpoint is not None:
        done = findings.check("resume_from_checkpoint", read_global_step, checkpoint)
        if done is not None and done >= config.max_steps:
            findings.warnings.append(
                f"{checkpoint} is after {done} steps and max_steps is {config.max_steps}: nothing is left"
            )
    folder = Path(config.output_dir).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        findings.errors.append(
            Problem("output_dir", f"{folder} is a file; name a folder, which is made if need be")
        )
    elif not os.access(folder, os.W_OK | os.X_OK):
        findings.errors.append(
            Problem("output_dir", f"{folder} cannot be written to; name another folder")
        )


def _look_at_packages(config: BaseConfig, findings: Findings, *, is_elsewhere: bool) -> None:
    """Packages that strategies, the backend and trackers need."""
    needed: dict[str, tuple[str, str]] = {}  # package: (key, what needs it)
    if config.execution_backend == "ray":
        needed["ray"] = (
            "backend",
            "a run with several workers of a model, or with backend: ray, needs Ray",
        )
    for name, role in _started(config).items():
        key, strategy = config.key_of(name), role.strategy_name or ""
        if strategy == "vllm" or strategy.startswith("deepspeed"):
            package = strategy.partition("_")[0]
            needed.setdefault(
                package,
                (f"{key}.strategy_args.strategy_name", f"the strategy {strategy} needs {package}"),
            )
        args = role.model_args
        is_adapted = args.adapter_name_or_path is not None or (
            args.is_lora and strategy.endswith("_train")
        )
        if role.holds_model and is_adapted:
            which = "lora_target" if args.is_lora else "adapter_name_or_path"
            needed.setdefault("peft", (f"{key}.model_args.{which}", "an adapter needs peft"))
    for package, (key, why) in needed.items():
        if importlib.util.find_spec(package) is None:
            install = install_hint(PACKAGES[package])
            install += ", on a GPU machine pip install vllm" if package == "vllm" else ""
            if is_elsewhere:
                findings.warnings.append(
                    f"{key}: {why}, which is not installed here; there: {install}"
                )
            else:
                findings.errors.append(Problem(key, f"{why}, which is not installed: {install}"))
    wanted = [config.track_with] if isinstance(config.track_with, str) else config.track_with
    for name in wanted if "track_with" in config.model_fields_set else []:
        if name not in TRACKERS:
            guess = did_you_mean(name, TRACKERS) or f"known are {', '.join(TRACKERS)}"
            findings.warnings.append(
                f"track_with: there is no tracker {name}; {guess}. Metrics go to metrics.jsonl only"
            )
        elif TRACKERS[name] and importlib.util.find_spec(TRACKERS[name]) is None:
            hint = install_hint("tracking")
            findings.warnings.append(
                f"track_with: {name} is not installed ({hint}); metrics go to metrics.jsonl only"
            )


# -- models ------------------------------------------------------------------------------------------------------------


def _look_at_models(config: BaseConfig, findings: Findings) -> None:
    seen: set[tuple[str, str, bool]] = set()
    for name, role in _started(config).items():
        args, key = role.model_args, f"{config.key_of(name)}.model_args"
        if not role.holds_model:
            continue
        for problem in role.start_problems():
            findings.errors.append(problem.under(config.key_of(name)))
        if role.strategy_name is not None and role.strategy_name.startswith("deepspeed"):
            findings.check(
                f"{config.key_of(name)}.strategy_args.strategy_config",
                _check_deepspeed,
                config,
                role,
            )
        if name == "critic" and args.model_type not in (None, "auto_token_classification"):
            why = f'found "{args.model_type}", expected "auto_token_classification" or null for a value model'
            findings.errors.append(Problem(f"{key}.model_type", why))
        if (
            args.attn_implementation == "flash_attention_2"
            and importlib.util.find_spec("flash_attn") is None
        ):
            why = "needs a CUDA device and the package flash-attn (pip install flash-attn --no-build-isolation)"
            findings.errors.append(
                Problem(f"{key}.attn_implementation", f"{why}; sdpa works everywhere")
            )
        if args.model_name_or_path is None:
            continue  # `missing_for_training` says so
        source = _model_key(config, name, args.model_name_or_path)
        if (source, args.model_name_or_path, args.random_init) not in seen:
            seen.add((source, args.model_name_or_path, args.random_init))
            findings.check(source, _check_model, args, findings)
        _look_at_adapter(key, role, findings)


def _model_key(config: BaseConfig, name: str, model: str) -> str:
    """The key under which a reader of the file finds a role's model."""
    for key in ("reward_pretrain", "pretrain") if name == "critic" else ("pretrain",):
        if getattr(config, key, None) == model:
            return key
    return f"{config.key_of(name)}.model_args.model_name_or_path"


def _check_model(args: Any, findings: Findings) -> None:
    try:
        check_model_files(args)
        name, folder = locate_model(args.model_name_or_path)
        if folder is not None:
            require_tokenizer(folder)
    except (
        ConfigError
    ) as error:  # the key that it names is that of a role, which may have its model from elsewhere
        raise ConfigError(str(error).removeprefix("model_name_or_path: ")) from None
    if folder is None and cached_snapshot(name) is None:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ConfigError(
                f"there is no folder {name!r} here, HF_HUB_OFFLINE is set, and the Hugging Face model of that name is "
                "not in the local cache; download it first, or give a local folder"
            )
        findings.notes.append(
            f"{name} is a Hugging Face name and not in the local cache: its size is not known yet"
        )


def _look_at_adapter(key: str, role: WorkerConfig, findings: Findings) -> None:
    """Adapters and frozen modules, by the names of the tensors in the model's files."""
    args = role.model_args
    trains = str(role.strategy_name).endswith("_train")
    if (
        trains
        and args.freeze_module_prefix
        and (args.is_lora or args.adapter_name_or_path is not None)
    ):
        why = "LoRA freezes everything but its adapter and additional_target; remove freeze_module_prefix"
        findings.errors.append(Problem(f"{key}.freeze_module_prefix", why))
    adapter = Path(args.adapter_name_or_path or "").expanduser()
    if (
        args.adapter_name_or_path is not None
        and adapter.is_dir()
        and not (adapter / ADAPTER_CONFIG).is_file()
    ):
        found = ", ".join(sorted(path.name for path in adapter.iterdir())) or "nothing"
        why = f"{adapter} has no {ADAPTER_CONFIG} (found: {found})"
        findings.errors.append(Problem(f"{key}.adapter_name_or_path", why))
    folder = Path(str(args.model_name_or_path)).expanduser()
    if not trains or not folder.is_dir():
        return
    tensors = findings.check(key, saved_tensors, model_of_run(folder))
    if not tensors:
        return
    modules = {name.rpartition(".")[0] for name in tensors} | {
        "lm_head"
    }  # a tied head is not saved
    known = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    targets = [] if args.adapter_name_or_path is not None or not args.is_lora else args.lora_target
    if isinstance(targets, str):
        if not any(re.fullmatch(targets, module) for module in modules):
            findings.errors.append(
                Problem(
                    f"{key}.lora_target",
                    f"the expression {targets!r} matches no module of the model, which has {known}",
                )
            )
        targets = []
    lists = {
        "lora_target": targets,
        "additional_target": (args.is_lora and args.additional_target) or [],
    }
    for name, wanted in lists.items():
        for target in wanted or []:
            if target not in ("all", "all-linear") and not any(
                f".{module}".endswith(f".{target}") for module in modules
            ):
                guess = did_you_mean(target, known.split(", "))
                why = f"the model has no module {target!r}; {guess or f'it has {known}'}"
                findings.errors.append(Problem(f"{key}.{name}", why))
    for prefix in args.freeze_module_prefix or []:
        if not any(f"{tensor}.".startswith(f"{prefix.rstrip('.')}.") for tensor in tensors):
            why = f"no parameter of the model lies in {prefix!r}; names begin with {', '.join(sorted(tensors)[:3])} ..."
            findings.errors.append(Problem(f"{key}.freeze_module_prefix", why))


def _check_deepspeed(config: BaseConfig, role: WorkerConfig) -> None:
    from roll.distributed.strategy.deepspeed_config import complete_config, zero_stage

    complete_config(role, zero_stage(role, 0), getattr(config, "max_grad_norm", 1.0))


# -- machines ----------------------------------------------------------------------------------------------------------


def _look_at_devices(config: BaseConfig, findings: Findings, machine: Machine | None) -> bool:
    """Whether the GPUs are there that roles name; returns whether a Ray cluster has them, which is not asked here."""
    on_ray = config.execution_backend == "ray"
    address = os.environ.get("RAY_ADDRESS", "")
    if on_ray and address.startswith("ray://"):
        why = f"RAY_ADDRESS={address} is a Ray Client address; run on a machine of the cluster and give its host:port"
        findings.errors.append(Problem("backend", why))
    is_cluster = (
        machine is None
        and on_ray
        and bool(address or Path("/tmp/ray/ray_current_cluster").exists())
    )
    roles = {name: role for name, role in _started(config).items() if role.device_mapping}
    if not roles:
        return is_cluster
    if is_cluster:
        findings.notes.append("the GPUs of the Ray cluster are not looked at; `roll train` does")
    here = machine or this_machine(with_gpus=not is_cluster)
    manager = ResourceManager(config.num_gpus_per_node, config.num_nodes)
    for name, role in roles.items():
        key = config.key_of(name)
        plan = findings.check(
            f"{key}.device_mapping",
            manager.allocate_placement_group,
            role.world_size,
            role.device_mapping,
            key,
        )
        devices = [device for rank in plan or [] for device in rank]
        if devices and not is_cluster:
            findings.check(
                f"{key}.device_mapping",
                missing_gpus,
                key,
                devices,
                role.world_size,
                here.num_gpus,
                num_nodes=here.num_nodes,
                machine=here.name,
                on_ray=on_ray,
            )
        if (
            role.strategy_name == "vllm"
            and not on_ray
            and role.device_mapping
            and role.device_mapping[0] != 0
        ):
            why = (
                f"vLLM takes the first GPU of its process, and this worker has GPU {role.device_mapping[0]}: use "
                "backend: ray, which gives each worker a process that sees its own GPU only"
            )
            findings.errors.append(Problem(f"{key}.device_mapping", why))
    return is_cluster


def _compare_memory(
    config: BaseConfig, findings: Findings, machine: Machine | None, *, is_cluster: bool
) -> None:
    findings.memory = findings.check("pretrain", estimate_memory, config) or {}
    uses_gpus = any(role.device_mapping for role in _started(config).values())
    if findings.memory and not is_cluster:
        here = machine or this_machine(with_gpus=uses_gpus)
        errors, warnings = memory_verdict(
            config,
            findings.memory,
            machine=here.name,
            gpu_bytes=here.gpu_bytes,
            host_bytes=here.host_bytes,
        )
        findings.errors += errors
        findings.warnings += warnings


# -- classes -----------------------------------------------------------------------------------------------------------


def _look_at_worker(config: BaseConfig, name: str, role: WorkerConfig, findings: Findings) -> None:
    key = f"{config.key_of(name)}.worker_cls"
    if role.worker_cls is None:
        findings.errors.append(Problem(key, "missing; name a worker class"))
    elif (
        isinstance(role.worker_cls, str) and _is_ours(role.worker_cls) and role.max_concurrency == 1
    ):
        findings.check(key, _find_class, str(role.worker_cls))
    elif (
        name != "actor_infer"
        or not isinstance(role.worker_cls, str)
        or not _is_ours(role.worker_cls)
    ):
        from roll.distributed.executor.cluster import check_worker_class

        findings.check(key, check_worker_class, role.worker_cls, role.max_concurrency)


def _is_ours(path: str) -> bool:
    return path.startswith("roll.")


def _find_class(path: str) -> None:
    """ConfigError if there is no such class. Ours are looked up in the source: importing them would import torch."""
    if not _is_ours(path):
        import_class(path)
        return
    module, _, name = path.rpartition(".")
    try:
        found = importlib.util.find_spec(MOVED.get(module, module))
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise ConfigError(f"{path!r}: there is no module {module!r}; check the spelling")
    names: set[str] = set()
    for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    if name not in names:
        raise ConfigError(
            f"{path!r}: module {module} has no {name!r}; {did_you_mean(name, names)}".rstrip("; ")
        )


def _look_at_rewards(config: Any, findings: Findings) -> None:
    for domain, reward in getattr(config, "rewards", {}).items():
        if reward.worker_cls is None:
            continue  # an error of the config
        key = f"rewards.{domain}.{'reward_fn' if reward.reward_fn else 'worker_cls'}"
        package = PLAIN_REWARDS.get(str(reward.worker_cls))
        if reward.reward_fn:
            from roll.utils.scoring.pool import check_reward_fn

            findings.check(key, check_reward_fn, reward.reward_fn)
        elif package is None:
            from roll.pipeline.rlvr.rewards.check import check_reward

            findings.check(key, check_reward, reward)
        elif package and importlib.util.find_spec(package) is None:
            why = f"it needs the package {package.replace('_', '-')}: {install_hint('rewards')}"
            findings.errors.append(Problem(key, why))


def _look_at_environments(config: Any, findings: Findings) -> None:
    """Templates, managers and proxies; then every kind of environment in use is made and reset, in its own process."""
    from roll.datasets.chat_template import get_chat_template
    from roll.pipeline.agentic.env import entry_point_of
    from roll.pipeline.agentic.env_host import (
        EXCEPTION,
        NO_OBSERVATION,
        PROTOCOL,
        EnvCall,
        EnvHost,
        EnvSpec,
    )

    tokenizer: Any = _tokenizer_of(config, findings)
    if tokenizer is not None:
        probe = [{"role": "user", "content": "?"}]
        template = findings.check(
            "global_template", get_chat_template, config.global_template, tokenizer
        )
        if template is not None:
            findings.check("global_template", template, probe)
    managers = [
        config.train_env_manager,
        *([config.val_env_manager] if "val_env" in config.active_roles() else []),
    ]
    for manager in managers:
        key = config.key_of(str(manager.name))
        findings.check(f"{key}.group_filter_cls", _find_class, manager.group_filter_cls)
        if manager.llm_proxy.proxy_type not in ("policy", "random"):
            from roll.pipeline.agentic.llm_proxy import create_llm_proxy

            findings.check(
                f"{key}.llm_proxy",
                create_llm_proxy,
                manager.llm_proxy,
                actor_infer=None,
                tokenizer=tokenizer,
            )
    tags = dict.fromkeys(
        tag for manager in managers for tag in manager.tags if tag in config.custom_envs
    )
    specs: dict[str, EnvSpec] = {}
    for number, tag in enumerate(tags):
        template = config.env_template(tag)
        findings.check(f"custom_envs.{tag}.env_manager_cls", _find_class, template.env_manager_cls)
        if template.env_type is not None:  # otherwise `missing_for_training` says so
            found = findings.check(f"custom_envs.{tag}.env_type", entry_point_of, template.env_type)
            if found is not None:
                specs[tag] = EnvSpec(number, found[0], found[1], template.env_config)

    def play(chosen: Mapping[str, EnvSpec]) -> None:
        by_number = {spec.env_id: tag for tag, spec in chosen.items()}
        with EnvHost(chosen.values(), timeout_s=ENV_SECONDS) as host:
            host.submit([EnvCall(number, seed=config.seed) for number in by_number])
            replies = host.collect(wait_s=ENV_SECONDS * len(by_number))
        for reply in replies:
            tag = by_number[reply.env_id]
            if reply.reason in (EXCEPTION, NO_OBSERVATION, PROTOCOL):
                last = reply.detail.strip().splitlines()[-1].removeprefix("roll.exceptions.")
                why = f"cannot be made and reset: {last}"
                findings.errors.append(Problem(f"custom_envs.{tag}.env_config", why))
            elif reply.reason is not None:
                findings.notes.append(
                    f"the environment {tag} was not ready after {ENV_SECONDS:g} s ({reply.reason})"
                )

    try:
        play(specs)
    except (ConfigError, DataError, MissingDependencyError):
        for tag, spec in specs.items():  # one of them cannot be imported: which?
            findings.check(f"custom_envs.{tag}.env_type", play, {tag: spec})


# -- data --------------------------------------------------------------------------------------------------------------


def _tokenizer_of(config: Any, findings: Findings) -> FileTokenizer | None:
    """The policy's tokenizer, or a stand-in for one that is not here; None if its files are broken."""
    name = config.actor_train.model_args.model_name_or_path
    given = Path(str(name)).expanduser()
    folder = Path(locate_model(name)[0]) if name and given.is_dir() else cached_snapshot(str(name))
    return findings.check(_model_key(config, "actor_train", str(name)), FileTokenizer, folder)


def _look_at_data(config: Any, findings: Findings) -> None:
    """Read and encode rows as training does, of large files the first ones."""
    seeds = {
        "seed": config.seed,
        "actor_train.training_args.data_seed": config.actor_train.training_args.data_seed,
    }
    for key, seed in seeds.items():
        if seed is not None and seed < 0:
            findings.errors.append(
                Problem(key, f"found {seed}, expected 0 or more: it decides the order of the rows")
            )
            return
    tokenizer = _tokenizer_of(config, findings)
    for name, length in MAX_LENGTHS[config.kind].items():
        role = getattr(config, name)
        data_args: DataArguments | None = None if role is None else role.data_args
        if data_args is None or not data_args.files:
            continue
        tables, is_whole, key = [], True, f"{name}.data_args.file_name"
        num_errors = len(findings.errors)
        for file in data_args.files:
            found = findings.check(key, peek_table, file, max_bytes=MAX_BYTES, max_rows=MAX_ROWS)
            if found is not None:
                tables += [] if found[0] is None else [found[0]]
                is_whole = is_whole and found[1]
        if tokenizer is None or not tables or len(findings.errors) > num_errors:
            continue
        # Imports numpy, which a broken file need not wait for.
        from roll.pipeline.data import encode_table, make_sampler

        table: Table = tables[0] if len(tables) == 1 else JoinedTable(tables)
        # How long rows are is known only with the real tokens, and whether any is left only with all rows.
        max_length = getattr(config, length) if tokenizer.is_exact and is_whole else sys.maxsize
        with _quiet():
            dataset = findings.check(
                f"{name}.data_args",
                encode_table,
                config,
                data_args,
                table,
                tokenizer,
                max_length,
                show_progress=False,
            )
            if dataset is not None and is_whole and name == "actor_train":
                findings.check(f"{name}.data_args", make_sampler, config, dataset)
        if not is_whole:
            findings.notes.append(
                f"only the first {len(table):,} rows of {table.name} were looked at one by one"
            )
        elif not tokenizer.is_exact:
            findings.notes.append(
                f"how long the rows of {table.name} are is known once the tokenizer is here"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what training will say itself when it reads the data."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _look_at_dumps(config: Any, findings: Findings) -> None:
    folder = Path(config.rollout_mock.dump_dir) / "train"
    missing = [
        step for step in range(config.max_steps) if not (folder / f"step-{step:06d}").is_dir()
    ]
    if missing:
        found = config.max_steps - len(missing)
        why = f"{folder} has no dump for step {missing[0]} (found {found} of {config.max_steps} steps); "
        findings.errors.append(
            Problem(
                "rollout_mock.dump_dir",
                why + "set max_steps to those that were dumped, or dump them first",
            )
        )


# -- files that are no config ------------------------------------------------------------------------------------------


def _look_at_raw_paths(values: Mapping[str, Any], findings: Findings, prefix: str = "") -> None:
    """Models and data files that a file names, where its values make no config."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _look_at_raw_paths(value, findings, f"{key}.")
        elif name in ("pretrain", "reward_pretrain", "model_name_or_path") and isinstance(
            value, str
        ):
            findings.check(key, _locate_only, value)
        elif name == "file_name" and value:
            for file in (
                [value] if isinstance(value, str) else value if isinstance(value, list) else []
            ):
                findings.check(key, peek_table, str(file), max_bytes=0, max_rows=0)


def _locate_only(name: str) -> None:
    try:
        locate_model(name)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("model_name_or_path: ")) from None


def _is_about(key: str, other: str) -> bool:
    """Whether two dotted keys are the same, or one lies below the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
