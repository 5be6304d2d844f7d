"""Checkpoints, all of it: where they lie, which are complete and kept, how they are written and
read.

    OUTPUT_DIR/checkpoints/checkpoint-STEP/
      ROLE/                    opens with plain `from_pretrained`: weights, config, tokenizer
        training/optimizer/    torch.distributed.checkpoint; loads with any number of ranks
        training/state.json    schedule, counters, and what made this checkpoint
        training/rng-R.pt      random states of rank R
      pipeline/                the pipeline's state, written last: it makes a checkpoint complete

Each folder appears whole or not at all. `roll check` looks for checkpoints and must not load torch,
so the functions that work with tensors import it themselves.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.exceptions import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from roll.distributed.strategy.train_strategy import TrainStrategy

FORMAT_VERSION = 1
PIPELINE = "pipeline"
TRAINING = "training"
ADAPTER = "adapter"  # where the adapter lies beside merged weights


# -- which checkpoints there are -------------------------------------------------------------------


def checkpoint_folder(output_dir: str | Path, global_step: int) -> Path:
    return Path(output_dir) / "checkpoints" / f"checkpoint-{global_step}"


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    found = []
    for folder in (Path(output_dir) / "checkpoints").glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and (folder / PIPELINE).is_dir():
            found.append((int(match.group(1)), folder))
    return [folder for _, folder in sorted(found)]


def get_latest_ckpt(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(complete_checkpoints(output_dir)), None)


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: bool | str) -> Path | None:
    """The checkpoint to resume from: False is none, True the newest of this run, else a path."""
    if resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        return get_latest_ckpt(output_dir)
    folder = Path(resume_from_checkpoint)
    if not (folder / PIPELINE).is_dir():
        nearby = complete_checkpoints(folder) or complete_checkpoints(output_dir)
        hint = "no complete checkpoint is nearby"
        if nearby:
            hint = f"complete ones nearby: {', '.join(map(str, nearby))}"
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is not a complete checkpoint of a run; {hint}"
        )
    return folder


def read_global_step(checkpoint: Path) -> int:
    """The steps that were done when the checkpoint was made."""
    return _read_json(checkpoint / PIPELINE / "state.json")["global_step"]


def prune_checkpoints(
    output_dir: str | Path, max_ckpt_to_keep: int, keep_steps: Collection[int] = ()
) -> list[Path]:
    """Delete all but the newest `max_ckpt_to_keep` complete checkpoints (0 keeps all) and those
    of `keep_steps`; returns what was deleted."""
    kept = {checkpoint_folder(output_dir, step) for step in keep_steps}
    old = complete_checkpoints(output_dir)[:-max_ckpt_to_keep] if max_ckpt_to_keep > 0 else []
    old = [folder for folder in old if folder not in kept]
    for folder in old:
        # The marker goes first: a deletion that is interrupted leaves nothing that looks complete.
        shutil.rmtree(folder / PIPELINE)
        shutil.rmtree(folder)
    return old


# -- the pipeline's state --------------------------------------------------------------------------


def save_pipeline_state(
    output_dir: str | Path,
    global_step: int,
    states: Mapping[str, Mapping[str, Any]],
    *,
    max_ckpt_to_keep: int = 0,
    keep_steps: Collection[int] = (),
) -> Path:
    """Complete a checkpoint whose roles are saved, then prune the old ones.

    `states` are the state dicts of what the pipeline carries from step to step, by name. They are
    plain values: JSON keeps Python's floats exactly.
    """
    import torch

    folder = checkpoint_folder(output_dir, global_step) / PIPELINE
    with atomic_folder(folder) as temporary:
        text = json.dumps({"global_step": global_step, "states": states}, indent=2)
        (temporary / "state.json").write_text(text + "\n")
        torch.save(random_states(), temporary / "random.pt")
    prune_checkpoints(output_dir, max_ckpt_to_keep, keep_steps)
    return folder


def load_pipeline_state(checkpoint: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """(global step, states) of a complete checkpoint; restores this process's random states."""
    import torch

    saved = _read_json(checkpoint / PIPELINE / "state.json")
    restore_random_states(torch.load(checkpoint / PIPELINE / "random.pt", weights_only=True))
    return saved["global_step"], saved["states"]


# -- a role that trains ----------------------------------------------------------------------------


def save_training(strategy: TrainStrategy, folder: Path, global_step: int) -> dict[str, float]:
    """Write weights, tokenizer and all that exact resume needs to `folder`; all ranks call it.

    Returns the seconds of each part.
    """
    import torch

    started = time.monotonic()
    ranks = strategy.ranks
    state_dict = strategy.full_state_dict()
    with contextlib.ExitStack() as stack:
        # All ranks write into one temporary folder, which rank 0 renames when the last is done.
        temporary = None
        if ranks.rank == 0:
            temporary = str(stack.enter_context(atomic_folder(folder)))
        writing = Path(ranks.share(temporary))
        training = writing / TRAINING
        if ranks.rank == 0:
            write_hf_files(strategy.model, strategy.tokenizer, writing, state_dict)
            training.mkdir()
            state = {
                "format_version": FORMAT_VERSION,
                "global_step": global_step,
                "strategy": strategy.strategy_name,
                "world_size": ranks.size,
                "dtype": str(next(strategy.model.parameters()).dtype),
                "scheduler": strategy.scheduler.state_dict(),
                "bad_steps_in_a_row": strategy.bad_steps_in_a_row,
            }
            (training / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        ranks.barrier()
        weights_done = time.monotonic()
        strategy.save_optimizer(training / "optimizer")
        torch.save(random_states(), training / f"rng-{ranks.rank}.pt")
        ranks.barrier()
    ranks.barrier()
    return {"hf_save": weights_done - started, "total": time.monotonic() - started}


def load_training(strategy: TrainStrategy, folder: Path) -> int:
    """Continue from what `save_training` wrote; returns its global step. All ranks call it.

    With the same number of ranks the run goes on bit by bit as if it had not stopped. With another
    number the optimizer continues exactly and the random states start from the seed.
    """
    import torch

    training, ranks = folder / TRAINING, strategy.ranks
    state = _read_json(training / "state.json")
    dtype = str(next(strategy.model.parameters()).dtype)
    if state["dtype"] != dtype:
        raise DataError(
            f"{folder}: the checkpoint was trained in {state['dtype']} and this run uses {dtype}; "
            "set model_args.dtype to match, or start anew from its weights by setting `pretrain` "
            "to that folder"
        )
    strategy.load_weights(folder)
    if not (training / "optimizer").is_dir():
        raise DataError(
            f"{training / 'optimizer'}: no optimizer state here; to start from the weights alone, "
            "set `pretrain` to this checkpoint"
        )
    strategy.load_optimizer(training / "optimizer")
    strategy.scheduler.load_state_dict(state["scheduler"])
    rates = strategy.scheduler.get_last_lr()
    for group, rate in zip(strategy.scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    strategy.bad_steps_in_a_row = state["bad_steps_in_a_row"]
    if state["world_size"] == ranks.size:
        states = torch.load(training / f"rng-{ranks.rank}.pt", weights_only=True)
        restore_random_states(states)
    else:
        strategy.worker.logger.warning(
            f"{folder} was made by {state['world_size']} ranks and is loaded by {ranks.size}: "
            "weights, optimizer and schedule continue exactly, random states start from the seed"
        )
    return state["global_step"]


def write_optimizer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool
) -> None:
    """The optimizer's state under the names of the parameters. `sharded`: all ranks call this."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = get_optimizer_state_dict(model, optimizer)
    with without_dcp_warning():
        dcp.save({"optimizer": state}, checkpoint_id=folder, no_dist=not sharded)


def read_optimizer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool
) -> None:
    """What `write_optimizer` wrote, from any number of ranks to any number of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with without_dcp_warning():
        dcp.load(state, checkpoint_id=folder, no_dist=not sharded)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])


@contextlib.contextmanager
def without_dcp_warning() -> Iterator[None]:
    """Inside, torch does not remark that a process which says `no_dist` is alone."""
    with warnings.catch_warnings():
        message = "torch.distributed is disabled, unavailable or uninitialized"
        warnings.filterwarnings("ignore", message=message)
        yield


# -- weights in the format of transformers ---------------------------------------------------------


def write_hf_files(
    model: nn.Module, tokenizer: Any, folder: Path, state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Safetensors weights, config, generation config and tokenizer, as plain `transformers` reads.

    `state_dict`, with the names of `model.state_dict()`, is written instead of the model's own
    tensors: full tensors gathered from a sharded model. In a distributed run only rank 0 calls it.

    Of a model with LoRA the adapter is written in peft's format, small and with the name of its
    base model in it. Where the base model has no name by which it could be loaded again (random
    initialisation), the merged weights are, and the adapter lies in `folder/adapter`.
    """
    from torch.distributed.tensor import DTensor

    from roll.models.lora import base_model, is_lora_model, merged_state_dict

    base = base_model(model)
    if any(isinstance(tensor, DTensor) for tensor in (state_dict or base.state_dict()).values()):
        raise ValueError(
            "the model is sharded: gather its full state dict on rank 0 and pass it as state_dict"
        )
    if is_lora_model(model):
        # Without config.json: beside one, transformers would look for the base model's weights.
        # False: the vocabulary is never resized here, and "auto" asks the hub at every save.
        adapter = folder if base.name_or_path else folder / ADAPTER
        model.save_pretrained(str(adapter), state_dict=state_dict, save_embedding_layers=False)
        if adapter != folder:
            _write_model(base, folder, merged_state_dict(model, state_dict))
    else:
        _write_model(base, folder, dict(state_dict or base.state_dict()))
    tokenizer.save_pretrained(folder)


def _write_model(base: Any, folder: Path, state_dict: dict[str, Tensor]) -> None:
    from transformers import GenerationConfig

    # A gathered state dict has a tied weight under both names, as two tensors; the file once.
    for alias, source in (getattr(base, "all_tied_weights_keys", None) or {}).items():
        if alias in state_dict and source in state_dict:
            del state_dict[alias]
    generation = getattr(base, "generation_config", None)
    use_cache = getattr(base.config, "use_cache", None)
    if generation is not None:
        # transformers refuses to save a generation config that it finds inconsistent, which some
        # published models have: no reason to lose a checkpoint, so it is written as it came.
        base.generation_config = GenerationConfig()
        if use_cache is not None:
            # Training switches the cache off; a model saved like that would generate slowly.
            base.config.use_cache = generation.use_cache
    try:
        base.save_pretrained(folder, state_dict=state_dict)
    finally:
        if generation is not None:
            base.generation_config, base.config.use_cache = generation, use_cache
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json", use_diff=True)
    if not any(folder.glob("model*.safetensors")):
        raise RuntimeError(
            "transformers wrote no weights: in a distributed run, save on rank 0 only"
        )


def read_hf_weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names of `model.state_dict()`, on the CPU.

    Names, shapes and dtypes must be those of the model, because float32 weights that went through
    bfloat16 are not the same weights. Of a LoRA model these are the tensors of the adapter only.
    """
    from safetensors import safe_open

    from roll.models.lora import ADAPTER_CONFIG, adapter_names, base_model, is_lora_model

    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such checkpoint folder")
    listing = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
    dtypes: dict[str, Any] = {}
    if is_lora_model(model):
        name = "adapter_model.safetensors"
        file = folder / name if (folder / name).is_file() else folder / ADAPTER / name
        if not file.is_file():
            raise DataError(
                f"{folder} has no {name}, which a model with LoRA needs (found: {listing})"
            )
        ours, own = adapter_names(model), model.state_dict()
        own = {saved: own[mine] for saved, mine in ours.items()}
        with safe_open(file, framework="pt") as handle:
            found = {key: handle.get_tensor(key) for key in handle.keys()}
        dtypes = {key: tensor.dtype for key, tensor in found.items()}
        missing, unexpected = own.keys() - found.keys(), found.keys() - own.keys()
        shapes = [
            (key, found[key].shape, own[key].shape)
            for key in found.keys() & own.keys()
            if found[key].shape != own[key].shape
        ]
        loaded = {ours[key]: tensor for key, tensor in found.items() if key in ours}
    else:
        import torch

        base, files, file = base_model(model), sorted(folder.glob("model*.safetensors")), folder
        if not files:
            hint = ""
            if (folder / ADAPTER_CONFIG).is_file():
                hint = "; it holds a LoRA adapter, and this model has none"
            raise DataError(f"{folder} has no model*.safetensors (found: {listing}){hint}")
        own = base.state_dict()
        is_full = any(tensor.dtype == torch.float32 for tensor in own.values())
        # transformers knows which models are saved under other names than they have in memory.
        result: Any = type(base).from_pretrained(
            folder,
            config=base.config,
            dtype=torch.float32 if is_full else base.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        reloaded, report = result
        missing, unexpected = report["missing_keys"], report["unexpected_keys"]
        shapes = report["mismatched_keys"]
        kinds = {"F64": torch.float64, "F32": torch.float32}
        kinds |= {"BF16": torch.bfloat16, "F16": torch.float16}
        for part in files:
            with safe_open(part, framework="pt") as handle:
                for key in handle.keys():
                    dtype = kinds.get(handle.get_slice(key).get_dtype())
                    if key in own and dtype is not None:
                        dtypes[key] = dtype
        loaded = {key: tensor for key, tensor in reloaded.state_dict().items() if key in own}
    problems = [f"{key}: missing in the checkpoint" for key in sorted(missing)]
    problems += [f"{key}: not a tensor of the model" for key in sorted(unexpected)]
    problems += [
        f"{key}: saved with shape {tuple(saved)}, the model has {tuple(mine)}"
        for key, saved, mine in sorted(shapes)
    ]
    problems += [
        f"{key}: saved as {dtype}, the model has {own[key].dtype}"
        for key, dtype in sorted(dtypes.items(), key=lambda item: item[0])
        if key in own and dtype != own[key].dtype
    ]
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise DataError(
            f"{file} does not fit the model; check model_name_or_path, dtype and the LoRA "
            f"settings:{shown}{more}"
        )
    return loaded


def load_hf_weights(model: nn.Module, folder: Path) -> None:
    """Copy the checked weights of a checkpoint into the model's own tensors, wherever these are."""
    import torch

    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in read_hf_weights(model, folder).items():
            own[name].copy_(tensor)


# -- random numbers --------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) of this process."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """The state of every generator of this process, as tensors and plain values."""
    import numpy as np
    import torch

    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    keys = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [str(name), keys, position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    import numpy as np
    import torch

    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# -- files -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary sibling to write into, which takes the place of `folder` when the block ends
    well.

    At any moment `folder` is absent, the previous one, or the new one with every byte on disk. A
    process that dies leaves at most a hidden `.NAME.tmp-*`, or, between the two renames, the
    previous folder as `.NAME.old-*`; the next save removes the one and brings the other back.
    One process at a time may write to a name.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = glob.escape(folder.name)
    for previous in folder.parent.glob(f".{name}.old-*"):
        if folder.exists():
            shutil.rmtree(previous)
        else:
            previous.rename(folder)
    for stale in folder.parent.glob(f".{name}.tmp-*"):
        shutil.rmtree(stale)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        for path in (*sorted(temporary.rglob("*")), temporary):
            _sync(path)
        if folder.exists():
            previous = folder.with_name(f".{folder.name}.old-{os.getpid()}")
            folder.rename(previous)
            temporary.rename(folder)
            shutil.rmtree(previous)
        else:
            temporary.rename(folder)
        _sync(folder.parent)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
        if not isinstance(value, dict) or "global_step" not in value:
            raise ValueError("it has no global_step")
    except (OSError, ValueError) as error:  # also bad JSON and bad UTF-8
        raise DataError(
            f"{file}: cannot be read ({error}); the checkpoint is damaged or was not written by "
            "roll, use an earlier one"
        ) from None
    version = value.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise DataError(
            f"{file}: format_version is {version!r}, this version of roll reads {FORMAT_VERSION}"
        )
    return value
