"""Model weights, config and tokenizer in the format of `transformers`, written whole or not at all."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from roll.exceptions import DataError
from roll.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_names,
    base_model,
    is_lora_model,
    merged_state_dict,
    save_adapter,
)

_ADAPTER_FOLDER = "adapter"
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Generator[Path, None, None]:
    """A temporary sibling of `folder` to write into, which takes its name when the block ends without an error.

    At any moment `folder` is absent, the previous one, or the new one with every byte on disk; a process that dies
    leaves at most a hidden `.NAME.tmp-*` behind, which the next save of the same name removes. An existing folder
    that is not empty is an error unless `replace`; it is then renamed to `.NAME.old-*`, the new one takes its place,
    and the old one is deleted. (A process that dies just between these two renames leaves the previous folder, whole,
    under that hidden name; the next save of the same name brings it back first.) One process at a time may write to a
    name.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not replace and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} exists and is not an empty folder; choose another name or pass replace=True"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clean_up_after_a_crash(folder)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        if replace and folder.exists():
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


def _clean_up_after_a_crash(folder: Path) -> None:
    name = glob.escape(folder.name)
    for previous in folder.parent.glob(f".{name}.old-*"):
        if folder.exists():
            shutil.rmtree(previous)
        else:
            previous.rename(folder)
    for stale in folder.parent.glob(f".{name}.tmp-*"):
        shutil.rmtree(stale)


def save_hf_checkpoint(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    merge_adapter: bool | None = None,
    replace: bool = False,
) -> None:
    """`write_hf_files` into `folder` through `atomic_folder`. In a distributed run only rank 0 calls this."""
    with atomic_folder(folder, replace=replace) as temporary:
        write_hf_files(model, tokenizer, temporary, state_dict, merge_adapter=merge_adapter)


def write_hf_files(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    merge_adapter: bool | None = None,
) -> None:
    """Writes safetensors weights, config, generation config and tokenizer, which plain `transformers` reads.

    `state_dict`, with the names of `model.state_dict()`, is written instead of the model's own tensors: full tensors
    gathered from a sharded model.

    With LoRA there are two layouts. By default `folder` holds the adapter in peft's format, small and with the name
    of its base model in it; `from_pretrained(folder)` of peft, or of `transformers` with peft installed, gives base
    and adapter together. With `merge_adapter` it holds the merged weights of a plain model, and the adapter, with
    which training goes on, lies in `folder/adapter`. None merges only where the base model has no name by which it
    could be loaded again (random initialisation).
    """
    base = base_model(model)
    if any(isinstance(tensor, DTensor) for tensor in (state_dict or base.state_dict()).values()):
        raise ValueError(
            "the model is sharded: gather its full state dict on rank 0 and pass it as state_dict"
        )
    if not is_lora_model(model):
        _write_weights(base, folder, dict(state_dict or base.state_dict()))
    elif merge_adapter or (merge_adapter is None and not base.name_or_path):
        _write_weights(base, folder, merged_state_dict(model, state_dict))
        save_adapter(model, folder / _ADAPTER_FOLDER, state_dict)
    else:
        # Without config.json: beside one, transformers would look for the base model's weights here.
        save_adapter(model, folder, state_dict)
    tokenizer.save_pretrained(folder)


def read_hf_weights(model: nn.Module, folder: Path, *, cast: bool = False) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names of `model.state_dict()`, on the CPU, checked against the model.

    Names and shapes must fit; so must dtypes unless `cast`, because float32 weights that went through bfloat16 are
    not the same weights. Tied weights may be saved once. For a LoRA model these are the tensors of the adapter only.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such checkpoint folder")
    if is_lora_model(model):
        for candidate in (folder / ADAPTER_WEIGHTS, folder / _ADAPTER_FOLDER / ADAPTER_WEIGHTS):
            if candidate.is_file():
                names, own, found = adapter_names(model), model.state_dict(), _read_file(candidate)
                _compare(
                    found, {saved: own[ours] for saved, ours in names.items()}, candidate, cast=cast
                )
                return {names[saved]: tensor for saved, tensor in found.items()}
        raise DataError(
            f"{folder} has no {ADAPTER_WEIGHTS}, which a model with LoRA needs ({_found(folder)})"
        )
    base = base_model(model)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        hint = (
            "; it holds a LoRA adapter, and this model has none"
            if (folder / ADAPTER_CONFIG).is_file()
            else ""
        )
        raise DataError(f"{folder} has no model*.safetensors ({_found(folder)}){hint}")
    return _read_model(base, folder, files, cast=cast)


def load_hf_weights(model: nn.Module, folder: Path, *, cast: bool = False) -> None:
    """Copies the checked weights of a checkpoint into the model's own tensors, wherever these are.

    For a sharded model, give the result of `read_hf_weights` to torch's `set_model_state_dict` instead.
    """
    own = model.state_dict()
    if any(isinstance(tensor, DTensor) for tensor in own.values()):
        raise ValueError(
            "the model is sharded: use read_hf_weights and torch.distributed's set_model_state_dict"
        )
    with torch.no_grad():
        for name, tensor in read_hf_weights(model, folder, cast=cast).items():
            own[name].copy_(tensor)


def _write_weights(base: PreTrainedModel, folder: Path, state_dict: dict[str, Tensor]) -> None:
    # A gathered state dict repeats a tied weight under both names as two tensors; the file holds it once.
    for alias, source in (getattr(base, "all_tied_weights_keys", None) or {}).items():
        if alias in state_dict and source in state_dict:
            del state_dict[alias]
    with _exportable(base, folder):
        base.save_pretrained(folder, state_dict=state_dict)
    if not any(folder.glob("model*.safetensors")):
        raise RuntimeError(
            "transformers wrote no weights: in a distributed run, save on rank 0 only"
        )


@contextmanager
def _exportable(base: PreTrainedModel, folder: Path) -> Generator[None, None, None]:
    """Inside, the config is as it should be saved; afterwards `folder` has the generation config as well.

    Training switches `use_cache` off in the config, and a model saved like that would generate slowly for ever. And
    `transformers` refuses to save a generation config that it finds inconsistent, which published models sometimes
    bring along: no reason to lose a checkpoint, so that file is written as it came.
    """
    generation, use_cache = (
        getattr(base, "generation_config", None),
        getattr(base.config, "use_cache", None),
    )
    if generation is not None:
        base.generation_config = GenerationConfig()
        if use_cache is not None:
            base.config.use_cache = generation.use_cache
    try:
        yield
    finally:
        if generation is not None:
            base.generation_config = generation
            base.config.use_cache = use_cache
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json", use_diff=True)


def _read_model(
    base: PreTrainedModel, folder: Path, files: list[Path], *, cast: bool
) -> dict[str, Tensor]:
    """Through `transformers`, which knows which models are saved under other names than they have in memory."""
    own = base.state_dict()
    dtype = (
        torch.float32
        if any(tensor.dtype == torch.float32 for tensor in own.values())
        else base.dtype
    )
    result: Any = type(base).from_pretrained(
        folder,
        config=base.config,
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    loaded, report = result
    problems = [f"{name}: missing in the checkpoint" for name in sorted(report["missing_keys"])]
    problems += [f"{name}: not a tensor of the model" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name}: saved with shape {tuple(saved)}, the model has {tuple(ours)}"
        for name, saved, ours in sorted(report["mismatched_keys"])
    ]
    if not cast:
        problems += [
            f"{name}: saved as {saved}, the model has {own[name].dtype}"
            for name, saved in sorted(_saved_dtypes(files).items())
            if name in own and saved != own[name].dtype
        ]
    _raise_mismatch(folder, problems)
    return {name: tensor for name, tensor in loaded.state_dict().items() if name in own}


def _compare(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: Path, *, cast: bool
) -> None:
    problems = [
        f"{name}: missing in the checkpoint" for name in sorted(expected.keys() - found.keys())
    ]
    problems += [
        f"{name}: not a tensor of the model" for name in sorted(found.keys() - expected.keys())
    ]
    for name in sorted(found.keys() & expected.keys()):
        saved, ours = found[name], expected[name]
        if saved.shape != ours.shape:
            problems.append(
                f"{name}: saved with shape {tuple(saved.shape)}, the model has {tuple(ours.shape)}"
            )
        elif saved.dtype != ours.dtype and not cast:
            problems.append(f"{name}: saved as {saved.dtype}, the model has {ours.dtype}")
    _raise_mismatch(source, problems)


def _raise_mismatch(source: Path, problems: list[str]) -> None:
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise DataError(
            f"{source} does not fit the model; check model_name_or_path, dtype and the LoRA settings:{shown}{more}"
        )


def _saved_dtypes(files: list[Path]) -> dict[str, torch.dtype]:
    dtypes = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                dtypes[name] = _SAFETENSORS_DTYPES.get(handle.get_slice(name).get_dtype())
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def _read_file(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}


def _found(folder: Path) -> str:
    return "found: " + (", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing")


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
