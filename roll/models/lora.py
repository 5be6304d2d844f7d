"""LoRA through peft, which is imported only here and only when an adapter is asked for (seconds).

The reference of a LoRA run is the model itself with the adapter off, so there is no second copy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roll.configs.model_files import ADAPTER_CONFIG as ADAPTER_CONFIG
from roll.exceptions import ConfigError, MissingDependencyError, install_hint

if TYPE_CHECKING:
    from peft import PeftModel

    from roll.configs import ModelArguments

_PEFT_PREFIX = "base_model.model."
_TASKS = {"ForTokenClassification": "TOKEN_CLS", "ForSequenceClassification": "SEQ_CLS"}


def is_lora_model(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether peft wraps this model. Where peft was never imported, no model can be wrapped."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The `transformers` model inside a `PeftModel`; without peft around it, the model itself."""
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


def add_lora(model: PreTrainedModel, args: ModelArguments, *, is_trainable: bool) -> nn.Module:
    """The model with an adapter: the one in `adapter_name_or_path`, else a new one to be trained.

    A new adapter changes nothing until it is trained (its B matrices are zero), so a model for
    inference without `adapter_name_or_path` comes back as it is. A loaded adapter brings its own
    rank, alpha, dropout and targets; with `is_trainable` its training continues.

    `lora_target` is a comma-separated list of module names or name endings, `all-linear` (every
    linear layer except the output head), or a regular expression over whole module names,
    recognised by one of `* $ | (`.
    """
    source = args.adapter_name_or_path
    if source is None and (args.lora_target is None or not is_trainable):
        return model
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            "LoRA (lora_target or adapter_name_or_path) needs the package peft: "
            f"{install_hint('lora')}"
        ) from error
    if source is not None:
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
                autocast_adapter_dtype=args.autocast_adapter_dtype,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"adapter_name_or_path: no peft adapter could be loaded from {source!r}, which is "
                f"neither a local adapter folder that fits {type(model).__name__} nor a name that "
                f"the Hugging Face hub gave us: {error}"
            ) from error
    names = [name for name, _ in model.named_modules()]
    targets, chosen = _targets(model, names, args.lora_target)
    additional = split_names(args.additional_target)
    chosen |= _matching(model, names, additional, "additional_target")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # One weight that serves as embedding and as head must stay one, or it cannot be saved as such.
    is_tied = head is not None and getattr(head, "weight", None) is embedding.weight
    modules = dict(model.named_modules())
    touches_tied = is_tied and any(modules[name] in (embedding, head) for name in chosen)
    rank = args.lora_rank if args.lora_rank is not None else 8
    kind = next((suffix for suffix in _TASKS if type(model).__name__.endswith(suffix)), "")
    config = peft.LoraConfig(
        # peft trains the fresh classification head along with the adapter when it knows of one.
        task_type=_TASKS.get(kind, "CAUSAL_LM"),
        r=rank,
        lora_alpha=args.lora_alpha if args.lora_alpha is not None else 2 * rank,
        lora_dropout=args.lora_dropout or 0.0,
        target_modules=targets,
        modules_to_save=additional or None,
        ensure_weight_tying=touches_tied,
    )
    return peft.get_peft_model(model, config, autocast_adapter_dtype=args.autocast_adapter_dtype)


def _targets(
    model: nn.Module, names: list[str], lora_target: Any
) -> tuple[str | list[str], set[str]]:
    """`lora_target` as peft takes it, and the modules by name that it means."""
    if split_names(lora_target) in (["all"], ["all-linear"]):
        return "all-linear", set()
    if isinstance(lora_target, str) and any(character in lora_target for character in "*$|("):
        found = {name for name in names if re.fullmatch(lora_target, name)}
        if not found:
            raise ConfigError(
                f"lora_target: the expression {lora_target!r} matches no module. {_linear(model)}"
            )
        return lora_target, found
    targets = split_names(lora_target)
    return targets, _matching(model, names, targets, "lora_target")


def _matching(model: nn.Module, names: list[str], targets: list[str], key: str) -> set[str]:
    """The modules that peft means by `targets`: those whole names, and names that end in them."""
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in names if name == target or name.endswith(f".{target}")}
        if not found:
            raise ConfigError(
                f"{key}: {type(model).__name__} has no module {target!r}. {_linear(model)}"
            )
        chosen |= found
    return chosen


def _linear(model: nn.Module) -> str:
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    return (
        f"Its linear modules are: {', '.join(sorted(linear))}; `all-linear` stands for all but the "
        "output head."
    )


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its own reference: adapters and trained copies of modules are off.

    peft's own context manager sets `requires_grad` of every adapter parameter on the way, which
    marks the adapter of an inference-only model as trainable and disturbs sharded parameters. Here
    only the switches of the adapter layers are touched.
    """
    if not is_lora_model(model):
        raise ValueError(
            f"adapter_disabled needs a model with an adapter, got {type(model).__name__}: without "
            "one there is no untrained version of it to switch to. Use a separate reference model."
        )
    tuners, other = sys.modules["peft.tuners.tuners_utils"], sys.modules["peft.utils.other"]
    kinds = (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper)
    before = [(m, m._disable_adapters) for m in model.modules() if isinstance(m, kinds)]
    try:
        for layer, _ in before:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in before:
            layer._disable_adapters = disabled


def merged_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The weights of a plain model that computes what the adapted one does: W + scaling * B A.

    Nothing in `model` changes. `state_dict` holds the model's full tensors where it does not (a
    gathered FSDP state); sums are made in float32 and rounded once to the dtype of W.
    """
    state = model.state_dict() if state_dict is None else state_dict
    if not is_lora_model(model):
        return dict(state)
    adapter = model.active_adapter
    merged: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = key.removeprefix(_PEFT_PREFIX)
        if ".lora_" not in name and ".original_module." not in name:
            name = name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")
            merged[name] = tensor
    for name, layer in base_model(model).named_modules():
        if not isinstance(layer, sys.modules["peft.tuners.lora"].LoraLayer):
            continue
        base_layer = layer.get_base_layer()
        parameters = model.named_parameters(remove_duplicate=False)
        owners = [owner for owner, parameter in parameters if parameter is base_layer.weight]
        problem = None
        if layer.lora_variant or layer.lora_magnitude_vector or any(layer.lora_bias.values()):
            problem = "it is not a plain LoRA layer (DoRA and other variants)"
        elif not isinstance(base_layer, (nn.Linear, nn.Embedding, Conv1D)):
            problem = f"it adapts a {type(base_layer).__name__}"
        elif len(owners) > 1:
            problem = f"its weight is shared ({', '.join(owners)}), and the merge would change both"
        elif adapter not in layer.scaling:
            problem = f"it does not belong to the active adapter {adapter!r}"
        if problem:
            raise ConfigError(
                f"cannot merge the adapter on {name}: {problem}. Leave it out of lora_target."
            )
        is_embedding = isinstance(base_layer, nn.Embedding)
        prefix = f"{_PEFT_PREFIX}{name}.lora_" + ("embedding_" if is_embedding else "")
        leaf = adapter if is_embedding else f"{adapter}.weight"
        a, b = state[f"{prefix}A.{leaf}"], state[f"{prefix}B.{leaf}"]
        delta = (b.float() @ a.float()) * layer.scaling[adapter]
        if not isinstance(base_layer, nn.Linear):
            delta = delta.T  # Embedding and Conv1D keep their weights the other way round
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = (weight.float() + delta.to(weight.device)).to(weight.dtype)
    return merged


def adapter_names(model: PeftModel) -> dict[str, str]:
    """Name of each adapter tensor in a saved adapter -> its name in `model.state_dict()`."""
    keys: Any = {key: key for key in model.state_dict()}
    # peft only selects and renames entries, so names may stand in for tensors.
    return sys.modules["peft"].get_peft_model_state_dict(
        model, state_dict=keys, save_embedding_layers=False
    )
