"""Which model a role holds, and how it is loaded."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from roll.configs.config_model import (
    LATE,
    AtLeastOne,
    ConfigModel,
    Late,
    NoEffect,
    NonNegative,
    NotBuilt,
    Number,
)

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_REGEX_SIGNS = frozenset("*$|(")


class LoraArguments(ConfigModel):
    """Low-rank adapters. A role trains an adapter if, and only if, `lora_target` is set."""

    additional_target: list[str] | None = None
    """Modules outside the adapter that are trained and saved too; a list or names separated by commas."""

    autocast_adapter_dtype: bool = True
    """Keep adapter weights in float32 when the model is in half precision."""

    lora_alpha: Annotated[AtLeastOne, Late] = LATE
    """Scale of the adapter; twice `lora_rank` if left out."""

    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""

    lora_rank: AtLeastOne = 8
    """Rank of the adapter."""

    lora_target: str | list[str] | None = None
    """Modules that get an adapter: `all`, a list, names separated by commas, or a regular expression."""

    @field_validator("lora_target", "additional_target", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        return _names(value)

    @model_validator(mode="after")
    def _scale_from_rank(self) -> LoraArguments:
        if self.lora_alpha is None:
            self.settle(lora_alpha=2 * self.lora_rank)
        return self

    @property
    def is_lora(self) -> bool:
        return self.lora_target is not None


class ModelArguments(LoraArguments):
    """A model by name or folder, its precision and what of it is trained."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset({"flash_attn"})

    model_name_or_path: str | None = None
    """Folder or Hugging Face name of the model; the pipeline's `pretrain` if left out."""

    random_init: bool = False
    """Build the architecture from the model's config.json with weights from the seed: for tests and small demos."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model; ROLL always does."""

    adapter_name_or_path: str | None = None
    """Folder or Hugging Face name of an adapter to start from."""

    attn_implementation: str | None = None
    """Attention of transformers: sdpa, eager, flash_attention_2 (`fa2` for short); null or `auto` lets it choose."""

    moe_aux_loss_coef: Annotated[NonNegative | None, NotBuilt("the router's loss", None)] = None
    """Weight of the load-balancing loss of a mixture of experts."""

    disable_gradient_checkpointing: bool = False
    """Keep all activations in memory instead of computing them again in the backward pass."""

    gradient_checkpointing_use_reentrant: bool | None = None
    """Which form of torch's activation checkpointing to use; null uses the one without reentry."""

    device_map: Annotated[str | None, NoEffect("a worker has one device")] = "balanced"
    """How ROLL spreads a model over the GPUs of one worker."""

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Precision of the parameters."""

    model_type: (
        Literal["auto_sequence_classification", "auto_token_classification", "trl"] | None
    ) = None
    """Head of a value or reward model; null is a language model."""

    num_labels: AtLeastOne = 1
    """Outputs of a value or reward model's head."""

    model_config_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's config.json."""

    freeze_module_prefix: list[str] | None = None
    """Prefixes of parameters that are not trained; a list or names separated by commas."""

    ulysses_size: Annotated[AtLeastOne, NotBuilt("sequence parallelism", 1)] = 1
    """Ranks that share one sequence."""

    model_max_length: AtLeastOne | None = None
    """Longest sequence that the tokenizer announces; null keeps the model's own."""

    @field_validator("freeze_module_prefix", mode="before")
    @classmethod
    def _split_prefixes(cls, value: Any) -> Any:
        return _names(value)

    @field_validator("attn_implementation")
    @classmethod
    def _full_name(cls, value: str | None) -> str | None:
        return "flash_attention_2" if value == "fa2" else value

    @property
    def compute_dtype(self) -> str:
        """torch's name of `dtype`: "bfloat16" for bf16. (A name, because configs work without torch.)"""
        return TORCH_DTYPES[self.dtype]


def _names(value: Any) -> Any:
    """`"q_proj, v_proj"` is a list of two names; a regular expression stays as it is."""
    if not isinstance(value, str) or _REGEX_SIGNS & set(value):
        return value
    return [part.strip() for part in value.split(",")]
