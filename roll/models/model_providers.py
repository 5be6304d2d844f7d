"""Tokenizers and models from a local folder or a Hugging Face name: actor, reference, value,
reward.

Every provider returns the model on the CPU: where it goes, and whether it is sharded, is the
strategy's decision. Loading or initialising a model leaves the caller's random state as it was.

Differences from ROLL: code that lies in a model repository runs only with `trust_remote_code`; a
value model has no dropout; weights that the folder lacks are an error instead of random numbers
(except a new value head); `freeze_module_prefix: model.layers.1` freezes layer 1, not also 10 to
19.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available
from transformers.utils.hub import is_offline_mode

from roll.configs.model_files import (
    locate_model,
    require_config,
    require_tokenizer,
    require_weights,
)
from roll.exceptions import ConfigError, MissingDependencyError
from roll.models.lora import add_lora, base_model, split_names

if TYPE_CHECKING:
    from roll.configs import ModelArguments

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REWARD_MODELS = {
    "auto_sequence_classification": AutoModelForSequenceClassification,
    "auto_token_classification": AutoModelForTokenClassification,
}


def default_tokenizer_provider(
    model_args: ModelArguments, model_name_or_path: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the left, with its chat template.

    A tokenizer without a padding token pads with its end-of-sequence token. That is safe because
    every loss and log-prob goes by masks, never by comparing ids with the padding token.
    """
    source, folder = locate_model(model_name_or_path or model_args.model_name_or_path)
    if folder is not None:
        require_tokenizer(folder)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source, padding_side="left", trust_remote_code=model_args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _unavailable("tokenizer", source, folder, error) from error
    if model_args.model_max_length is not None:
        tokenizer.model_max_length = model_args.model_max_length
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"model_name_or_path: the tokenizer of {source} has neither pad_token nor "
                "eos_token; set one in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
        message = "the tokenizer of %s has no padding token: %r is used"
        logger.info(message, source, tokenizer.eos_token)
    return tokenizer


def default_actor_model_provider(
    tokenizer: PreTrainedTokenizerBase,
    model_args: ModelArguments,
    training_args: object | None = None,
    is_trainable: bool = False,
) -> nn.Module:
    """A causal language model: the policy, or with `is_trainable=False` one for forward passes.

    The result is a `transformers` model, or a `PeftModel` around one where LoRA is asked for.
    Trainable models are in training mode with gradient checkpointing; others are in evaluation mode
    and no parameter needs a gradient. `training_args` belongs to every provider and is not read.
    """
    return _provide(AutoModelForCausalLM, tokenizer, model_args, is_trainable, new_head=False)


def default_value_model_provider(
    tokenizer: PreTrainedTokenizerBase,
    model_args: ModelArguments,
    training_args: object | None = None,
    is_trainable: bool = False,
) -> nn.Module:
    """One number (`num_labels`) per token: `model(...).logits` is (B, S, num_labels).

    Starting from a language model, the value head is new: it is drawn from the current torch seed.
    """
    if model_args.model_type not in (None, "auto_token_classification"):
        raise ConfigError(
            "model_type: a value model is 'auto_token_classification' (the default), got "
            f"{model_args.model_type!r}"
        )
    kind = AutoModelForTokenClassification
    return _provide(kind, tokenizer, model_args, is_trainable, new_head=True)


def default_reward_model_provider(
    tokenizer: PreTrainedTokenizerBase,
    model_args: ModelArguments,
    training_args: object | None = None,
    is_trainable: bool = False,
) -> nn.Module:
    """A reward model: `logits` is (B, num_labels), or (B, S, num_labels) by token classification.

    A `model_type` of None follows the architecture that the model's config names, else sequence
    classification. The latter looks at the last token that is not the padding token, so where
    padding is the end-of-sequence token it looks at the token before it, as `transformers` does.
    Only a reward model to be trained may start from a language model with a new head.
    """
    model_type = model_args.model_type
    if model_type is None:
        architectures = _load_config(model_args).architectures or [""]
        by_token = architectures[0].endswith("ForTokenClassification")
        model_type = "auto_token_classification" if by_token else "auto_sequence_classification"
    if model_type not in REWARD_MODELS:
        raise ConfigError(
            f"model_type: a reward model is one of {', '.join(REWARD_MODELS)}, got {model_type!r}"
        )
    kind = REWARD_MODELS[model_type]
    return _provide(kind, tokenizer, model_args, is_trainable, new_head=is_trainable)


def freeze_by_prefix(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Stops training of every parameter in the named modules: `model.layers.1` is not layer 10.

    A weight that serves as embedding and as head counts as the embedding's.
    """
    parameters = dict(model.named_parameters())
    for prefix in prefixes:
        inside = prefix.rstrip(".") + "."
        found = [name for name in parameters if name == prefix or name.startswith(inside)]
        if not found:
            modules = [name for name, _ in model.named_modules() if name]
            near = difflib.get_close_matches(prefix, [*modules, *parameters], n=5, cutoff=0.4)
            raise ConfigError(
                f"freeze_module_prefix: no parameter of {type(model).__name__} lies in {prefix!r}; "
                f"nearest names: {', '.join(near or modules[:5])}"
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"freeze_module_prefix: {', '.join(prefixes)} freezes the whole model")


def _provide(
    auto_class: Any,
    tokenizer: PreTrainedTokenizerBase,
    args: ModelArguments,
    is_trainable: bool,
    *,
    new_head: bool,
) -> nn.Module:
    frozen = split_names(args.freeze_module_prefix)
    is_adapted = args.lora_target is not None or args.adapter_name_or_path is not None
    if is_trainable and frozen and is_adapted:
        raise ConfigError(
            "freeze_module_prefix and LoRA are both set: LoRA freezes everything but its adapter "
            "and additional_target; remove freeze_module_prefix"
        )
    if args.dtype not in DTYPES:
        raise ConfigError(f"dtype: one of {', '.join(DTYPES)} is expected, got {args.dtype!r}")
    config = _load_config(args)
    if auto_class is not AutoModelForCausalLM:
        config.num_labels = args.num_labels
        # The token classifiers of transformers drop 10% of the features: noise in every value.
        config.classifier_dropout = 0.0
    attention = args.attn_implementation  # None lets transformers choose
    if attention == "auto":
        attention = None
    if attention in ("fa2", "flash_attention_2"):
        if not is_flash_attn_2_available():
            raise MissingDependencyError(
                f"attn_implementation: {attention} needs a CUDA device and the package flash-attn "
                "(pip install flash-attn --no-build-isolation); `attn_implementation: sdpa` works "
                "everywhere"
            )
        attention = "flash_attention_2"
    options = {"attn_implementation": attention, "trust_remote_code": args.trust_remote_code}
    # The model is drawn from the current seed, and drawing it moves nobody else's random numbers.
    with torch.random.fork_rng(devices=[]):
        if args.random_init:
            inner = auto_class.from_config(config, dtype=torch.float32, **options)
            # Drawn in float32 and rounded: one seed gives one model in every dtype. Parameters
            # only: the buffers of rotary embeddings stay in float32, as after from_pretrained.
            for parameter in inner.parameters():
                parameter.data = parameter.data.to(DTYPES[args.dtype])
            inner.config.dtype = DTYPES[args.dtype]
            # These weights lie in no folder: what is saved must not point to that of the config.
            inner.name_or_path = inner.config.name_or_path = ""
        else:
            inner = _load_weights(auto_class, config, args, options, new_head=new_head)
        if inner.config.pad_token_id is None:
            inner.config.pad_token_id = tokenizer.pad_token_id
        model = add_lora(inner, args, is_trainable=is_trainable)
    if not is_trainable:
        return model.requires_grad_(False).eval()
    if frozen:
        freeze_by_prefix(model, frozen)
    _prepare_training(base_model(model), args)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    message = "%s: %s of %s parameters are trainable (%s)"
    share = f"{trained / max(total, 1):.2%}"
    logger.info(message, type(inner).__name__, f"{trained:,}", f"{total:,}", share)
    return model.train()


def _prepare_training(model: PreTrainedModel, args: ModelArguments) -> None:
    """Switch the cache off and gradient checkpointing on; warn of dropout."""
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        # generate() goes by this one, and checkpoints get it back into the model's config.
        generation_config.use_cache = getattr(model.config, "use_cache", True)
    model.config.use_cache = False
    if not args.disable_gradient_checkpointing:
        reentrant = bool(args.gradient_checkpointing_use_reentrant)
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if not reentrant:
            model.disable_input_require_grads()  # only the reentrant kind needs them
    dropout = [
        f"{key}={value}"
        for key, value in model.config.to_dict().items()
        if "drop" in key and isinstance(value, float) and value > 0
    ]
    if dropout:
        logger.warning(
            "the config of %s has dropout (%s): log-probs in training will differ from those of "
            "inference. Set it to 0 in model_config_kwargs unless that is what you want.",
            type(model).__name__,
            ", ".join(dropout),
        )


def _load_config(args: ModelArguments) -> PreTrainedConfig:
    source, folder = locate_model(args.model_name_or_path)
    if folder is not None:
        require_config(folder)
    try:
        loaded: Any = AutoConfig.from_pretrained(
            source,
            trust_remote_code=args.trust_remote_code,
            return_unused_kwargs=True,
            **args.model_config_kwargs,
        )
    except (OSError, ValueError) as error:
        raise _unavailable("config", source, folder, error) from error
    config, unused = loaded
    for key in args.model_config_kwargs:
        if key in unused:
            near = difflib.get_close_matches(key, config.to_dict(), n=3)
            raise ConfigError(
                f"model_config_kwargs: {type(config).__name__} has no field {key!r}"
                + (f"; nearest: {', '.join(near)}" if near else "")
            )
    return config


def _load_weights(
    auto_class: Any,
    config: PreTrainedConfig,
    args: ModelArguments,
    options: dict[str, Any],
    *,
    new_head: bool,
) -> PreTrainedModel:
    source, folder = locate_model(args.model_name_or_path)
    if folder is not None:
        require_weights(folder)
    try:
        model, report = auto_class.from_pretrained(
            source,
            config=config,
            dtype=DTYPES[args.dtype],
            ignore_mismatched_sizes=True,  # reported below, with both shapes
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise _unavailable("weights", source, folder, error) from error
    if report["mismatched_keys"]:
        lines = [
            f"\n  {name}: saved {tuple(saved)}, the config says {tuple(ours)}"
            for name, saved, ours in sorted(report["mismatched_keys"])
        ]
        raise ConfigError(
            f"model_name_or_path: weights of {source} do not have the shapes of the config "
            f"(model_config_kwargs and num_labels included):{''.join(lines[:20])}"
        )
    missing = sorted(report["missing_keys"])
    head = [name for name in missing if not name.startswith(f"{model.base_model_prefix}.")]
    name = type(model).__name__
    if missing and not (new_head and missing == head):
        raise ConfigError(
            f"model_name_or_path: {source} lacks weights that {name} needs: "
            f"{', '.join(missing[:10])}{' ...' if len(missing) > 10 else ''}. It holds another "
            "kind of model, or is incomplete."
        )
    if missing:
        logger.info("%s is new in %s: initialised from the current seed", ", ".join(head), name)
    return model


def _unavailable(what: str, source: str, folder: Path | None, error: Exception) -> ConfigError:
    if folder is not None:
        return ConfigError(f"model_name_or_path: the {what} in {folder} could not be read: {error}")
    hint = "without a network, set HF_HUB_OFFLINE=1 to use the local cache, or give a local folder"
    if is_offline_mode():
        hint = "HF_HUB_OFFLINE is set, so only the local cache was searched"
    return ConfigError(
        f"model_name_or_path: there is no folder {source!r} here, and the {what} of the Hugging "
        f"Face model of that name could not be fetched ({hint}): {error}"
    )
