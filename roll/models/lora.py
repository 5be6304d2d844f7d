"""LoRA through peft, which is imported only here and only when an adapter is asked for (it takes seconds to load).

The reference of a LoRA run is the model itself with the adapter off (`adapter_disabled`), so there is no second copy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roll.configs.model_files import ADAPTER_CONFIG
from roll.exceptions import ConfigError, MissingDependencyError, install_hint

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


class LoraSettings(Protocol):
    """What is read here; `roll.configs.ModelArguments` has all of it."""

    @property
    def adapter_name_or_path(self) -> str | None: ...
    @property
    def lora_target(self) -> str | Sequence[str] | None: ...
    @property
    def lora_rank(self) -> int | None: ...
    @property
    def lora_alpha(self) -> int | float | None: ...
    @property
    def lora_dropout(self) -> float | None: ...
    @property
    def additional_target(self) -> str | Sequence[str] | None: ...
    @property
    def autocast_adapter_dtype(self) -> bool: ...


def is_lora_model(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether peft wraps this model. Costs nothing when peft was never imported: then no model can be wrapped."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The `transformers` model inside a `PeftModel`; the model itself where there is no peft around it."""
    inner = model.get_base_model() if is_lora_model(model) else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"expected a transformers model, or a peft model around one, got {type(inner).__name__}"
        )
    return inner


def split_names(names: str | Sequence[str] | None) -> list[str]:
    """`"q_proj, v_proj"` -> `["q_proj", "v_proj"]`; None -> `[]`."""
    parts = names.split(",") if isinstance(names, str) else names or []
    return [part.strip() for part in parts if part.strip()]


def add_lora(model: PreTrainedModel, settings: LoraSettings, *, is_trainable: bool) -> nn.Module:
    """The model with an adapter: the one in `adapter_name_or_path`, else a new one if the model is to be trained.

    A new adapter changes nothing until it is trained (its B matrices are zero), so a model that is only used for
    inference and has no `adapter_name_or_path` comes back as it is. A loaded adapter brings its own rank, alpha,
    dropout and targets; with `is_trainable` its training continues.

    `lora_target` is a comma-separated list of module names or name endings, `all-linear` (every linear layer except
    the output head), or a regular expression over whole module names, recognised by one of `* $ | (`.
    """
    if settings.adapter_name_or_path is not None:
        return _load_adapter(
            model, settings, settings.adapter_name_or_path, is_trainable=is_trainable
        )
    if settings.lora_target is None or not is_trainable:
        return model
    peft = _import_peft()
    targets = _targets(model, settings.lora_target)
    additional = split_names(settings.additional_target)
    for name in additional:
        if not _matching(model, name):
            raise ConfigError(
                f"additional_target: {type(model).__name__} has no module {name!r}. {_children(model)}"
            )
    rank = settings.lora_rank if settings.lora_rank is not None else 8
    config = peft.LoraConfig(
        task_type=_task_type(model),
        r=rank,
        lora_alpha=settings.lora_alpha if settings.lora_alpha is not None else 2 * rank,
        lora_dropout=settings.lora_dropout or 0.0,
        target_modules=targets,
        modules_to_save=additional or None,
        # One weight that serves as embedding and as head must stay one weight, or it cannot be saved as such.
        ensure_weight_tying=_touches_tied_embedding(model, targets, additional),
    )
    return peft.get_peft_model(
        model, config, autocast_adapter_dtype=settings.autocast_adapter_dtype
    )


@contextmanager
def adapter_disabled(model: nn.Module) -> Generator[None, None, None]:
    """Inside, the model is its own reference: adapters and trained copies of modules are off, bit for bit.

    Only the switches of the adapter layers are touched and each gets its former value back, also after an exception.
    (peft's own context manager sets `requires_grad` of every adapter parameter on the way, which marks the adapter of
    an inference-only model as trainable and disturbs sharded parameters.)
    """
    if not is_lora_model(model):
        raise ValueError(
            f"adapter_disabled needs a model with an adapter, got {type(model).__name__}: without one there is no"
            " untrained version of it to switch to. Use a separate reference model."
        )
    tuners, other = sys.modules["peft.tuners.tuners_utils"], sys.modules["peft.utils.other"]
    layers = [
        m
        for m in model.modules()
        if isinstance(m, (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper))
    ]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


def merged_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The weights of a plain model that computes what the adapted one does: W + scaling * B A, under the plain names.

    Nothing in `model` changes. `state_dict` holds the model's full tensors where it does not (a gathered FSDP state);
    sums are made in float32 and rounded once to the dtype of W.
    """
    if not is_lora_model(model):
        return dict(model.state_dict() if state_dict is None else state_dict)
    state = model.state_dict() if state_dict is None else state_dict
    adapter = model.active_adapter
    merged: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = key.removeprefix(_PEFT_PREFIX)
        if ".lora_" in name or ".original_module." in name:
            continue
        merged[name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")] = (
            tensor
        )
    for name, layer in base_model(model).named_modules():
        if isinstance(layer, sys.modules["peft.tuners.lora"].LoraLayer):
            _check_mergeable(model, name, layer, adapter)
            weight = merged[f"{name}.weight"]
            delta = _delta(state, f"{_PEFT_PREFIX}{name}", layer, adapter).to(weight.device)
            merged[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    return merged


def save_adapter(
    model: PeftModel, folder: Path, state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the adapter in peft's format, which `adapter_name_or_path`, peft and `transformers` read."""
    # False: the vocabulary is never resized here, and "auto" would ask the Hugging Face hub at every save.
    model.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)


def adapter_names(model: PeftModel) -> dict[str, str]:
    """Name of each adapter tensor in a saved adapter -> its name in `model.state_dict()`."""
    keys: Any = {key: key for key in model.state_dict()}
    # peft only selects and renames entries, so names may stand in for tensors.
    return sys.modules["peft"].get_peft_model_state_dict(
        model, state_dict=keys, save_embedding_layers=False
    )


def trainable_summary(model: nn.Module) -> str:
    """`12,288 of 1,234,567 parameters are trainable (1.00%)`."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    return f"{trainable:,} of {total:,} parameters are trainable ({trainable / max(total, 1):.2%})"


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            f"LoRA (lora_target or adapter_name_or_path) needs the package peft: {install_hint('lora')}"
        ) from error
    return peft


def _load_adapter(
    model: PreTrainedModel, settings: LoraSettings, source: str, *, is_trainable: bool
) -> nn.Module:
    peft = _import_peft()
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / ADAPTER_CONFIG).is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ConfigError(
            f"adapter_name_or_path: {source} has no {ADAPTER_CONFIG} (found: {found})"
        )
    try:
        return peft.PeftModel.from_pretrained(
            model,
            str(folder) if folder.is_dir() else source,
            is_trainable=is_trainable,
            autocast_adapter_dtype=settings.autocast_adapter_dtype,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"adapter_name_or_path: no peft adapter could be loaded from {source!r}, which is neither a local adapter"
            f" folder that fits {type(model).__name__} nor a name that the Hugging Face hub gave us: {error}"
        ) from error


def _task_type(model: PreTrainedModel) -> str:
    # peft trains the fresh classification head along with the adapter when it knows of one.
    for suffix, task in (
        ("ForTokenClassification", "TOKEN_CLS"),
        ("ForSequenceClassification", "SEQ_CLS"),
    ):
        if type(model).__name__.endswith(suffix):
            return task
    return "CAUSAL_LM"


def _targets(model: PreTrainedModel, lora_target: str | Sequence[str]) -> str | list[str]:
    if isinstance(lora_target, str):
        if lora_target in ("all", "all-linear"):
            return "all-linear"
        if any(character in lora_target for character in "*$|("):
            if not any(re.fullmatch(lora_target, name) for name, _ in model.named_modules()):
                raise ConfigError(
                    f"lora_target: the expression {lora_target!r} matches no module. {_children(model)}"
                )
            return lora_target
    targets = split_names(lora_target)
    if targets in (["all"], ["all-linear"]):
        return "all-linear"
    for target in targets:
        if not _matching(model, target):
            raise ConfigError(
                f"lora_target: {type(model).__name__} has no module {target!r}. {_children(model)}"
            )
    return targets


def _matching(model: nn.Module, target: str) -> list[str]:
    """Names of the modules that peft means by `target`: that whole name, or names that end in it."""
    return [
        name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")
    ]


def _children(model: nn.Module) -> str:
    linear = {
        name.rpartition(".")[2]
        for name, m in model.named_modules()
        if isinstance(m, (nn.Linear, Conv1D))
    }
    return f"Its linear modules are: {', '.join(sorted(linear))}; `all-linear` stands for all but the output head."


def _touches_tied_embedding(
    model: PreTrainedModel, targets: str | list[str], additional: list[str]
) -> bool:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not embedding.weight:
        return False
    tied = {name for name, module in model.named_modules() if module is embedding or module is head}
    if isinstance(targets, str):
        chosen = {name for name in tied if targets != "all-linear" and re.fullmatch(targets, name)}
    else:
        chosen = {name for target in targets for name in _matching(model, target)}
    return bool(
        tied & (chosen | {name for target in additional for name in _matching(model, target)})
    )


def _check_mergeable(model: PeftModel, name: str, layer: Any, adapter: str) -> None:
    base_layer = layer.get_base_layer()
    parameters = model.named_parameters(remove_duplicate=False)
    owners = [owner for owner, parameter in parameters if parameter is base_layer.weight]
    problem = None
    if layer.lora_variant or layer.lora_magnitude_vector or any(layer.lora_bias.values()):
        problem = "it is not a plain LoRA layer (DoRA and other variants)"
    elif not isinstance(base_layer, (nn.Linear, nn.Embedding, Conv1D)):
        problem = f"it adapts a {type(base_layer).__name__}"
    elif len(owners) > 1:
        problem = f"its weight is shared with another module ({', '.join(owners)}), which the merge would change too"
    elif adapter not in layer.scaling:
        problem = f"it does not belong to the active adapter {adapter!r}"
    if problem:
        raise ConfigError(
            f"cannot merge the adapter on {name}: {problem}. Save the adapter by itself instead."
        )


def _delta(state: Mapping[str, Tensor], prefix: str, layer: Any, adapter: str) -> Tensor:
    """scaling * B A in the layout of the layer's weight: (out, in) for Linear, (tokens, hidden) for Embedding."""
    if isinstance(layer.get_base_layer(), nn.Embedding):
        a, b = (
            state[f"{prefix}.lora_embedding_A.{adapter}"],
            state[f"{prefix}.lora_embedding_B.{adapter}"],
        )
    else:
        a, b = (
            state[f"{prefix}.lora_A.{adapter}.weight"],
            state[f"{prefix}.lora_B.{adapter}.weight"],
        )
    delta: Tensor = (b.float() @ a.float()) * layer.scaling[adapter]
    is_linear = isinstance(layer.get_base_layer(), nn.Linear)
    return delta if is_linear else delta.T
