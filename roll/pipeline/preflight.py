"""Everything about a run that can be found wrong before a model is loaded, all of it at once.

`roll train` and `roll check` both call `examine`, so what one refuses the other refuses, in the
same words. Most of it needs no torch, whose import alone takes longer than a check should. What
only a class can say (a worker of the user's own) is asked of the class, which may import it.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
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
from roll.configs.strategy_info import strategy_info
from roll.configs.worker_config import WorkerConfig
from roll.datasets.file_tokenizer import FileTokenizer
from roll.datasets.tables import JoinedTable, Table, needs_datasets, peek_table
from roll.distributed.scheduler.resource_manager import ResourceManager, missing_gpus
from roll.exceptions import ConfigError, DataError, MissingDependencyError, install_hint
from roll.models.checkpoint import read_global_step
from roll.pipeline.registry import read_config
from roll.rewards.check import check_reward
from roll.roll_paths import MOVED
from roll.utils.import_utils import import_class
from roll.utils.machine import Machine, this_machine
from roll.utils.run_folder import resume_point

MAX_BYTES, MAX_ROWS = 32 * 2**20, 5_000  # of a data file: read and encoded in about a second
ENV_SECONDS = 20.0  # that an environment may take to be made and reset
EXTRAS = {"peft": "lora"}  # of packages whose extra has another name
TRACKERS = {"tensorboard", "wandb", "trackio"}  # packages, beside those that need none:
PLAIN_TRACKERS = ("stdout", "jsonl", "none")
_HF_OFFLINE = ("1", "ON", "YES", "TRUE")


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

    def error(self, key: str, why: str) -> None:
        self.errors.append(Problem(key, why))

    def check(self, key: str, question: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The answer to a question; an error that it raises is noted under `key`, or its own."""
        try:
            return question(*args, **options)
        except (ConfigError, DataError, MissingDependencyError) as error:
            # A model's folder may be named by another key than that of the role.
            message = str(error).removeprefix(f"{key} ").removeprefix("model_name_or_path: ")
            named, _, rest = message.partition(": ")
            names_a_key = bool(rest) and re.fullmatch(r"[a-z_]+(\.[\w-]+)*", named) is not None
            if names_a_key and (named == key or named.startswith(f"{key.split('.')[0]}.")):
                self.error(named, rest)
            else:
                self.error(key, rest if names_a_key and key.endswith(named) else message)
        except (ImportError, SyntaxError) as error:
            self.error(key, f"cannot be imported: {type(error).__name__}: {error}")
        return None


@dataclass(frozen=True)
class Checked:
    """A config file with all that was found."""

    path: Path
    loaded: LoadedConfig | None
    """None where no config can be made of the file; with errors, parts of it may be missing."""

    errors: list[str]
    """With file and line."""

    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    memory: dict[str, MemoryEstimate] = field(default_factory=dict)

    def require(self) -> LoadedConfig:
        """The config, if it can be trained with; else a ConfigError with all errors, one a line."""
        if self.errors or self.loaded is None:
            raise ConfigError("\n".join(self.errors))
        return self.loaded


def examine(
    path: str | Path, overrides: Sequence[str] = (), machine: Machine | None = None
) -> Checked:
    """Look at a config file, and at everything that a run of it needs before its models.

    Args:
        machine: compare with this machine instead of the one that this program runs on; whether its
            packages are installed and its devices there cannot be known.

    Raises:
        ConfigError: the file is missing, is not YAML, or has references that do not resolve.
    """
    composition = compose(path, overrides)
    loaded, problems, left_out = read_config(composition)
    if loaded is None:
        findings, warnings = Findings(), []
        _look_at_raw_paths(composition.values, findings)
    else:
        findings = preflight(loaded.config, machine, compare_memory=not left_out)
        findings.errors = [*loaded.config.missing_for_training(), *findings.errors]
        warnings = [*loaded.warnings(), *findings.warnings]
    for problem in findings.errors:
        # What was left out was named already, and what follows from that is not the file's fault.
        key = f"{problem.key}."
        about = [key.startswith(f"{other}.") or f"{other}.".startswith(key) for other in left_out]
        if not any(about):
            problems.append(problem)
    errors = composition.located(problems)
    return Checked(composition.path, loaded, errors, warnings, findings.notes, findings.memory)


def preflight(
    config: BaseConfig, machine: Machine | None = None, *, compare_memory: bool = True
) -> Findings:
    """Every check that a run of this config makes before it loads a model; see `examine`."""
    findings = Findings()
    _look_at_run_folder(config, findings)
    _look_at_packages(config, findings, is_elsewhere=machine is not None)
    _look_at_models(config, findings)
    is_cluster = _look_at_devices(config, findings, machine)
    for name, role in _started(config).items():
        key, path = f"{config.key_of(name)}.worker_cls", role.worker_cls
        is_ours = isinstance(path, str) and path.startswith("roll.")
        if path is None:
            findings.error(key, "missing; name a worker class")
        elif is_ours and role.max_concurrency == 1:
            findings.check(key, _find_class, path)
        elif name != "actor_infer" or not is_ours:
            from roll.distributed.executor.cluster import check_worker_class

            findings.check(key, check_worker_class, path, role.max_concurrency)
    if config.pipeline_cls is not None:
        findings.check("pipeline_cls", import_class, str(config.pipeline_cls))
    if getattr(config, "is_replay", False):
        _look_at_dumps(config, findings)
    elif config.kind == "agentic":
        _look_at_environments(config, findings)
    elif config.kind in MAX_LENGTHS:
        _look_at_data(config, findings)
        _look_at_rewards(config, findings)
    if findings.errors or not compare_memory:
        return findings
    findings.memory = findings.check("pretrain", estimate_memory, config) or {}
    if findings.memory and not is_cluster:
        uses_gpus = any(role.device_mapping for role in _started(config).values())
        here = machine or this_machine(with_gpus=uses_gpus)
        sizes = {"gpu_bytes": here.gpu_bytes, "host_bytes": here.host_bytes}
        errors, warnings = memory_verdict(config, findings.memory, machine=here.name, **sizes)
        findings.errors += errors
        findings.warnings += warnings
    return findings


def _started(config: BaseConfig) -> dict[str, WorkerConfig]:
    """The roles that a pipeline makes workers for."""
    return {name: role for name, role in config.active_roles().items() if name != "validation"}


# -- the run and its programs ----------------------------------------------------------------------


def _look_at_run_folder(config: BaseConfig, findings: Findings) -> None:
    resume = config.resume_from_checkpoint
    key = "exp_name" if resume is False else "resume_from_checkpoint"
    found = findings.check(key, resume_point, config.output_dir, config.exp_name, resume)
    checkpoint = found[1] if found else None
    if checkpoint is not None:
        done = findings.check("resume_from_checkpoint", read_global_step, checkpoint)
        if done is not None and done >= config.max_steps:
            left = f"max_steps is {config.max_steps}: nothing is left"
            findings.warnings.append(f"{checkpoint} is after {done} steps and {left}")
    folder = Path(config.output_dir).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        findings.error("output_dir", f"{folder} is a file; name a folder, which is made if need be")
    elif not os.access(folder, os.W_OK | os.X_OK):
        findings.error("output_dir", f"{folder} cannot be written to; name another folder")


def _look_at_packages(config: BaseConfig, findings: Findings, *, is_elsewhere: bool) -> None:
    """Packages that strategies, the backend and trackers need."""
    needed: dict[str, tuple[str, str]] = {}  # package: (key, what needs it)
    if config.execution_backend == "ray":
        why = "a run with several workers of a model, or with backend: ray, needs Ray"
        needed["ray"] = ("backend", why)
    for name, role in _started(config).items():
        if role.strategy_name is None:
            continue
        key, args, info = config.key_of(name), role.model_args, strategy_info(role.strategy_name)
        if info.package is not None:
            why = f"the strategy {role.strategy_name} needs {info.package}"
            needed.setdefault(info.package, (f"{key}.strategy_args.strategy_name", why))
        if args.adapter_name_or_path is not None or (args.is_lora and info.trains):
            which = "lora_target" if args.is_lora else "adapter_name_or_path"
            needed.setdefault("peft", (f"{key}.model_args.{which}", "an adapter needs peft"))
    for package, (key, why) in needed.items():
        if importlib.util.find_spec(package) is not None:
            continue
        install = install_hint(EXTRAS.get(package, package))
        if package == "vllm":
            install += ", on a GPU machine pip install vllm"
        if is_elsewhere:
            there = f"which is not installed here; there: {install}"
            findings.warnings.append(f"{key}: {why}, {there}")
        else:
            findings.error(key, f"{why}, which is not installed: {install}")
    if "track_with" not in config.model_fields_set:
        return
    for name in [config.track_with] if isinstance(config.track_with, str) else config.track_with:
        known = [*sorted(TRACKERS), *PLAIN_TRACKERS]
        if name not in known:
            guess = did_you_mean(name, known) or f"known are {', '.join(known)}"
            why = f"there is no tracker {name}; {guess}. Metrics go to metrics.jsonl only"
            findings.warnings.append(f"track_with: {why}")
        elif name in TRACKERS and importlib.util.find_spec(name) is None:
            why = f"{name} is not installed ({install_hint('tracking')})"
            findings.warnings.append(f"track_with: {why}; metrics go to metrics.jsonl only")


# -- models ----------------------------------------------------------------------------------------


def _look_at_models(config: BaseConfig, findings: Findings) -> None:
    seen: set[tuple[str, str, bool]] = set()
    for name, role in _started(config).items():
        args, key = role.model_args, f"{config.key_of(name)}.model_args"
        if not role.holds_model:
            continue
        for problem in role.start_problems():
            findings.errors.append(problem.under(config.key_of(name)))
        if str(role.strategy_name).startswith("deepspeed"):
            from roll.distributed.strategy.deepspeed_config import complete_config, zero_stage

            def complete(role: WorkerConfig = role) -> None:
                limit = getattr(config, "max_grad_norm", 1.0)
                complete_config(role, zero_stage(role, 0), limit)

            findings.check(f"{config.key_of(name)}.strategy_args.strategy_config", complete)
        if name == "critic" and args.model_type not in (None, "auto_token_classification"):
            expected = 'expected "auto_token_classification" or null for a value model'
            findings.error(f"{key}.model_type", f'found "{args.model_type}", {expected}')
        is_flash = args.attn_implementation == "flash_attention_2"
        if is_flash and importlib.util.find_spec("flash_attn") is None:
            install = "(pip install flash-attn --no-build-isolation)"
            why = f"needs a CUDA device and the package flash-attn {install}"
            findings.error(f"{key}.attn_implementation", f"{why}; sdpa works everywhere")
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
    check_model_files(args)
    name, folder = locate_model(args.model_name_or_path)
    if folder is not None:
        require_tokenizer(folder)
    if folder is not None or cached_snapshot(name) is not None:
        return
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _HF_OFFLINE:
        raise ConfigError(
            f"there is no folder {name!r} here, HF_HUB_OFFLINE is set, and the Hugging Face model "
            "of that name is not in the local cache; download it first, or give a local folder"
        )
    unknown = "a Hugging Face name and not in the local cache: its size is not known yet"
    findings.notes.append(f"{name} is {unknown}")


def _look_at_adapter(key: str, role: WorkerConfig, findings: Findings) -> None:
    """Adapters and frozen modules, by the names of the tensors in the model's files."""
    args, trains = role.model_args, strategy_info(str(role.strategy_name)).trains
    is_adapted = args.is_lora or args.adapter_name_or_path is not None
    if trains and args.freeze_module_prefix and is_adapted:
        why = "LoRA freezes everything but its adapter and additional_target"
        findings.error(f"{key}.freeze_module_prefix", f"{why}; remove freeze_module_prefix")
    adapter = Path(args.adapter_name_or_path or "").expanduser()
    is_there = args.adapter_name_or_path is not None and adapter.is_dir()
    if is_there and not (adapter / ADAPTER_CONFIG).is_file():
        found = ", ".join(sorted(path.name for path in adapter.iterdir())) or "nothing"
        why = f"{adapter} has no {ADAPTER_CONFIG} (found: {found})"
        findings.error(f"{key}.adapter_name_or_path", why)
    folder = Path(str(args.model_name_or_path)).expanduser()
    if not trains or not folder.is_dir():
        return
    tensors = findings.check(key, saved_tensors, model_of_run(folder))
    if not tensors:
        return
    # A tied head is not saved.
    modules = {name.rpartition(".")[0] for name in tensors} | {"lm_head"}
    known = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    targets = args.lora_target if args.adapter_name_or_path is None else None
    if isinstance(targets, str):
        if not any(re.fullmatch(targets, module) for module in modules):
            why = f"the expression {targets!r} matches no module of the model, which has {known}"
            findings.error(f"{key}.lora_target", why)
        targets = None
    others = args.additional_target if args.is_lora else None
    for name, wanted in (("lora_target", targets), ("additional_target", others)):
        for target in wanted or []:
            is_known = any(f".{module}".endswith(f".{target}") for module in modules)
            if target not in ("all", "all-linear") and not is_known:
                guess = did_you_mean(target, known.split(", ")) or f"it has {known}"
                findings.error(f"{key}.{name}", f"the model has no module {target!r}; {guess}")
    for prefix in args.freeze_module_prefix or []:
        if not any(f"{tensor}.".startswith(f"{prefix.rstrip('.')}.") for tensor in tensors):
            first = ", ".join(sorted(tensors)[:3])
            why = f"no parameter of the model lies in {prefix!r}; names begin with {first} ..."
            findings.error(f"{key}.freeze_module_prefix", why)


# -- machines and classes --------------------------------------------------------------------------


def _look_at_devices(config: BaseConfig, findings: Findings, machine: Machine | None) -> bool:
    """Whether the GPUs are there; returns whether a Ray cluster has them, which is not asked."""
    on_ray = config.execution_backend == "ray"
    address = os.environ.get("RAY_ADDRESS", "")
    if on_ray and address.startswith("ray://"):
        fix = "run on a machine of the cluster and give its host:port"
        findings.error("backend", f"RAY_ADDRESS={address} is a Ray Client address; {fix}")
    has_cluster = bool(address or Path("/tmp/ray/ray_current_cluster").exists())
    is_cluster = machine is None and on_ray and has_cluster
    roles = {name: role for name, role in _started(config).items() if role.device_mapping}
    if not roles:
        return is_cluster
    if is_cluster:
        findings.notes.append("the GPUs of the Ray cluster are not looked at; `roll train` does")
    here = machine or this_machine(with_gpus=not is_cluster)
    manager = ResourceManager(config.num_gpus_per_node, config.num_nodes)
    for name, role in roles.items():
        role_key, size, devices = config.key_of(name), role.world_size, role.device_mapping
        key = f"{role_key}.device_mapping"
        allocate = manager.allocate_placement_group
        plan = findings.check(key, allocate, size, devices, role_key)
        placed = [device for rank in plan or [] for device in rank]
        if placed and not is_cluster:
            there = {"num_nodes": here.num_nodes, "machine": here.name, "on_ray": on_ray}
            findings.check(key, missing_gpus, role_key, placed, size, here.num_gpus, **there)
        if role.strategy_name == "vllm" and not on_ray and devices and devices[0] != 0:
            why = (
                f"vLLM takes the first GPU of its process, and this worker has GPU {devices[0]}: "
                "use backend: ray, which gives each worker a process that sees its own GPU only"
            )
            findings.error(key, why)
    return is_cluster


def _find_class(path: str) -> None:
    """ConfigError if there is no such class. Ours are looked up in the source, without torch."""
    if not path.startswith("roll."):
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
        why = f"module {module} has no {name!r}; {did_you_mean(name, names)}"
        raise ConfigError(f"{path!r}: {why}".rstrip("; "))


def _look_at_rewards(config: Any, findings: Findings) -> None:
    for domain, reward in getattr(config, "rewards", {}).items():
        if reward.worker_cls is None:
            continue  # an error of the config
        key = f"rewards.{domain}.{'reward_fn' if reward.reward_fn else 'worker_cls'}"
        idle = findings.check(key, check_reward, reward)
        if idle:
            findings.warnings.append(f"rewards.{domain}: {idle}")


def _look_at_environments(config: Any, findings: Findings) -> None:
    """Templates, managers and proxies; every environment in use is reset, in its own process."""
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
        key, probe = "global_template", [{"role": "user", "content": "?"}]
        template = findings.check(key, get_chat_template, config.global_template, tokenizer)
        if template is not None:
            findings.check(key, template, probe)
    managers = [config.train_env_manager]
    if "val_env" in config.active_roles():
        managers.append(config.val_env_manager)
    for manager in managers:
        key = config.key_of(str(manager.name))
        findings.check(f"{key}.group_filter_cls", _find_class, manager.group_filter_cls)
        if manager.llm_proxy.proxy_type not in ("policy", "random"):
            from roll.pipeline.agentic.llm_proxy import create_llm_proxy

            proxy = {"actor_infer": None, "tokenizer": tokenizer}
            findings.check(f"{key}.llm_proxy", create_llm_proxy, manager.llm_proxy, **proxy)
    specs: dict[str, EnvSpec] = {}
    for number, tag in enumerate(config.tags_in_use()):
        template, key = config.env_template(tag), f"custom_envs.{tag}"
        findings.check(f"{key}.env_manager_cls", _find_class, template.env_manager_cls)
        if template.env_type is not None:  # otherwise `missing_for_training` says so
            found = findings.check(f"{key}.env_type", entry_point_of, template.env_type)
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
                findings.error(f"custom_envs.{tag}.env_config", why)
            elif reply.reason is not None:
                late = f"was not ready after {ENV_SECONDS:g} s ({reply.reason})"
                findings.notes.append(f"the environment {tag} {late}")

    try:
        play(specs)
    except (ConfigError, DataError, MissingDependencyError):
        for tag, spec in specs.items():  # one of them cannot be imported: which?
            findings.check(f"custom_envs.{tag}.env_type", play, {tag: spec})


# -- data ------------------------------------------------------------------------------------------


def _tokenizer_of(config: Any, findings: Findings) -> FileTokenizer | None:
    """The policy's tokenizer, or a stand-in for one that is not here; None if it is broken."""
    name = config.actor_train.model_args.model_name_or_path
    if name and Path(name).expanduser().is_dir():
        folder = Path(locate_model(name)[0])
    else:
        folder = cached_snapshot(str(name))
    return findings.check(_model_key(config, "actor_train", str(name)), FileTokenizer, folder)


def _look_at_data(config: Any, findings: Findings) -> None:
    """Read and encode rows as training does, of large files the first ones."""
    data_seed = config.actor_train.training_args.data_seed
    seeds = {"seed": config.seed, "actor_train.training_args.data_seed": data_seed}
    for key, seed in seeds.items():
        if seed is not None and seed < 0:
            why = f"found {seed}, expected 0 or more: it decides the order of the rows"
            findings.error(key, why)
            return
    tokenizer = _tokenizer_of(config, findings)
    for name, length in MAX_LENGTHS[config.kind].items():
        role, num_errors = getattr(config, name), len(findings.errors)
        data_args: DataArguments | None = None if role is None else role.data_args
        tables, is_whole, key = [], True, f"{name}.data_args"
        for file in data_args.files if data_args is not None else ():
            limits = {"max_bytes": MAX_BYTES, "max_rows": MAX_ROWS}
            found = findings.check(f"{key}.file_name", peek_table, file, **limits)
            if found is not None:
                tables += [] if found[0] is None else [found[0]]
                is_whole = is_whole and found[1]
                if found[0] is None and needs_datasets(str(file)):
                    where = "is no file here, so it is taken for a dataset of the Hugging Face Hub"
                    findings.notes.append(f"{file} {where}; its rows are read when training starts")
        if tokenizer is None or not tables or len(findings.errors) > num_errors:
            continue
        # Imports numpy, which a broken file need not wait for.
        from roll.pipeline.data import encode_table, make_sampler

        table: Table = tables[0] if len(tables) == 1 else JoinedTable(tables)
        # How long rows are is known only with the real tokens, and whether any is left only with
        # all rows.
        max_length = getattr(config, length) if tokenizer.is_exact and is_whole else sys.maxsize
        # Training will say itself what it says when it reads the data.
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            given = (config, data_args, table, tokenizer, max_length)
            dataset = findings.check(key, encode_table, *given, show_progress=False)
            if dataset is not None and is_whole and name == "actor_train":
                findings.check(key, make_sampler, config, dataset)
        finally:
            logging.disable(before)
        if not is_whole:
            part = f"only the first {len(table):,} rows of {table.name}"
            findings.notes.append(f"{part} were looked at one by one")
        elif not tokenizer.is_exact:
            when = "is known once the tokenizer is here"
            findings.notes.append(f"how long the rows of {table.name} are {when}")


def _look_at_dumps(config: Any, findings: Findings) -> None:
    folder, steps = Path(config.rollout_mock.dump_dir) / "train", config.max_steps
    missing = [step for step in range(steps) if not (folder / f"step-{step:06d}").is_dir()]
    if missing:
        found = f"(found {steps - len(missing)} of {steps} steps)"
        fix = "set max_steps to those that were dumped, or dump them first"
        why = f"{folder} has no dump for step {missing[0]} {found}; {fix}"
        findings.error("rollout_mock.dump_dir", why)


def _look_at_raw_paths(values: Mapping[str, Any], findings: Findings, prefix: str = "") -> None:
    """Models and data files that a file names, where its values make no config."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _look_at_raw_paths(value, findings, f"{key}.")
        elif name in ("pretrain", "reward_pretrain", "model_name_or_path"):
            if isinstance(value, str):
                findings.check(key, locate_model, value)
        elif name == "file_name" and isinstance(value, str | list):
            for file in [value] if isinstance(value, str) else value:
                findings.check(key, peek_table, str(file), max_bytes=0, max_rows=0)
