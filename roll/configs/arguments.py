"""The four blocks of a role: its model, its training, its data and its sampling; and GPU lists."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from roll.configs.base import (
    LATE,
    AtLeastOne,
    AtLeastZero,
    BelowOne,
    ConfigModel,
    ConfigProblems,
    Late,
    NonNegative,
    Number,
    Positive,
    Whole,
    plain_values,
    wrong,
)

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
POLYNOMIAL_END = 1e-7  # transformers' lr_end
INVERSE_SQRT_TIMESCALE = 10_000  # transformers' timescale for a schedule without warm-up
# The key that bounds the tokens of a row, for each role that reads data.
MAX_LENGTHS: Mapping[str, Mapping[str, str]] = {
    "rlvr": {"actor_train": "prompt_length", "validation": "val_prompt_length"},
    "dpo": {"actor_train": "sequence_length", "validation": "sequence_length"},
    "sft": {"actor_train": "sequence_length", "validation": "val_sequence_length"},
}
HOW_TO_WRITE_DEVICES = (
    "expected a list of GPU numbers; write [0, 1], list(range(0,8)) or list(range(0,4)) + [6, 7]"
)
MAX_DEVICES = 65_536  # far beyond any cluster; keeps a mistyped range from filling the memory


def _names(value: Any) -> Any:
    """`"q_proj, v_proj"` is a list of two names; a regular expression stays as it is."""
    if not isinstance(value, str) or set("*$|(") & set(value):
        return value
    return [part.strip() for part in value.split(",")]


Names = Annotated[list[str], BeforeValidator(_names)]


class LoraArguments(ConfigModel):
    """Low-rank adapters. A role trains an adapter if, and only if, `lora_target` is set."""

    additional_target: Names | None = None
    """Modules outside the adapter that are trained and saved too; a list or names with commas."""

    autocast_adapter_dtype: bool = True
    """Keep adapter weights in float32 when the model is in half precision."""

    lora_alpha: Annotated[AtLeastOne, Late] = LATE
    """Scale of the adapter; twice `lora_rank` if left out."""

    lora_dropout: BelowOne = 0.0
    """Dropout on the adapter's input."""

    lora_rank: AtLeastOne = 8
    """Rank of the adapter."""

    lora_target: Annotated[str | list[str] | None, BeforeValidator(_names)] = None
    """Modules that get an adapter: `all`, a list, names with commas, or a regular expression."""

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

    model_name_or_path: str | None = None
    """Folder or Hugging Face name of the model; the pipeline's `pretrain` if left out."""

    random_init: bool = False
    """Draw the weights from the seed, for the architecture in config.json: for tests and demos."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model; ROLL always does."""

    adapter_name_or_path: str | None = None
    """Folder or Hugging Face name of an adapter to start from."""

    attn_implementation: str | None = None
    """Attention: sdpa, eager, flash_attention_2 (or `fa2`); null lets transformers choose."""

    disable_gradient_checkpointing: bool = False
    """Keep all activations in memory instead of computing them again in the backward pass."""

    gradient_checkpointing_use_reentrant: bool | None = None
    """Which form of torch's activation checkpointing to use; null uses the one without reentry."""

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

    freeze_module_prefix: Names | None = None
    """Prefixes of parameters that are not trained; a list or names with commas."""

    model_max_length: AtLeastOne | None = None
    """Longest sequence that the tokenizer announces; null keeps the model's own."""

    @field_validator("attn_implementation")
    @classmethod
    def _full_name(cls, value: str | None) -> str | None:
        return "flash_attention_2" if value == "fa2" else value

    @property
    def compute_dtype(self) -> str:
        """torch's name of `dtype`, such as "bfloat16". (A name: configs work without torch.)"""
        return TORCH_DTYPES[self.dtype]


class TrainingArguments(ConfigModel):
    """Optimizer, schedule and micro-batches of a role that trains."""

    output_dir: str = ""
    """Where the role writes; set from the pipeline's `output_dir`."""

    max_steps: Annotated[Whole, Field(ge=-1)] = -1
    """Optimizer steps of the run, which is the schedule's length; the pipeline works it out."""

    num_train_epochs: Positive = 1.0
    """Passes over the data, where the pipeline goes over a fixed data set."""

    learning_rate: NonNegative = 5e-5
    """Highest learning rate of the schedule."""

    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ] = "linear"
    """Shape of the learning-rate schedule, by the names of transformers."""

    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""

    adam_beta1: BelowOne = 0.9
    """AdamW's decay of the gradient average."""

    adam_beta2: BelowOne = 0.999
    """AdamW's decay of the squared-gradient average."""

    per_device_train_batch_size: AtLeastOne = 8
    """Rows of a micro-batch on one rank; DPO counts pairs."""

    gradient_accumulation_steps: AtLeastOne = 1
    """Micro-batches of an optimizer step on one rank."""

    seed: Whole = 42
    """Copied from the pipeline's `seed`."""

    data_seed: Whole | None = None
    """Seed of the data order; null uses `seed`."""

    fp16: bool = False
    """Train in float16; follows `model_args.dtype`."""

    bf16: bool = False
    """Train in bfloat16; follows `model_args.dtype`."""

    warmup_ratio: BelowOne = 0.0
    """Share of the optimizer steps that warm the learning rate up; used if `warmup_steps` is 0."""

    warmup_steps: AtLeastZero = 0
    """Optimizer steps that warm the learning rate up."""

    @model_validator(mode="after")
    def _check_together(self) -> TrainingArguments:
        problems = []
        if self.fp16 and self.bf16:
            problems.append(wrong("fp16", True, "false, because bf16 is on", "keep one of them"))
        if self.lr_scheduler_type == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            expected = f"more than {POLYNOMIAL_END:g}, where the polynomial schedule ends"
            problems.append(wrong("learning_rate", self.learning_rate, expected))
        if problems:
            raise ConfigProblems(problems)
        return self

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Optimizer steps of the warm-up in a run of `num_training_steps`."""
        return self.warmup_steps or math.ceil(num_training_steps * self.warmup_ratio)

    def learning_rate_at(self, step: int, total: int) -> float:
        """Learning rate of optimizer step `step` (0 is the first) of `total`, as in transformers.

        A warm-up starts from 0, so with one the first step has learning rate 0. By hand, because
        `roll check` shows it without torch.
        """
        warmup, kind = self.get_warmup_steps(total), self.lr_scheduler_type
        if kind == "constant":
            return self.learning_rate
        if step < warmup:
            return self.learning_rate * step / warmup
        if kind == "constant_with_warmup":
            return self.learning_rate
        if kind == "inverse_sqrt":
            timescale = warmup or INVERSE_SQRT_TIMESCALE
            return self.learning_rate / math.sqrt((step + timescale - warmup) / timescale)
        progress = min((step - warmup) / max(1, total - warmup), 1.0)
        if kind == "linear":
            return self.learning_rate * (1 - progress)
        if kind == "polynomial":
            return POLYNOMIAL_END + (self.learning_rate - POLYNOMIAL_END) * (1 - progress)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class DataArguments(ConfigModel):
    """Files, columns and chat template of a role's data."""

    template: str | None = "native"
    """Chat template that renders conversations; `native` is that of the tokenizer."""

    domain_interleave_probs: dict[str, NonNegative] | None = None
    """Share of each domain in a batch of prompts; the shares add up to 1."""

    file_name: str | list[str] | None = None
    """File or files to read."""

    tag: str | None = "tag"
    """Column that says which kind of task a row is; it selects the reward."""

    prompt: str | None = None
    """Column that holds the prompt as plain text; `prompt` and `messages` exclude each other."""

    response: str | None = "solution"
    """Column that holds the expected answer."""

    messages: str | None = None
    """Column that holds the prompt as chat messages; `prompt` and `messages` exclude each other."""

    custom_data_kwargs_func: str | None = None
    """Dotted path of a function that turns a row into extra arguments of the chat template."""

    @model_validator(mode="after")
    def _check_columns(self) -> DataArguments:
        problems = []
        if self.prompt is not None and self.messages is not None:
            expected = f'null, because prompt is "{self.prompt}"'
            problems.append(wrong("messages", self.messages, expected, "keep one of them"))
        shares = self.domain_interleave_probs
        if shares and abs(sum(shares.values()) - 1) > 1e-6:
            expected = f"shares that add up to 1, not {sum(shares.values()):g}"
            problems.append(wrong("domain_interleave_probs", shares, expected))
        if problems:
            raise ConfigProblems(problems)
        return self

    @property
    def files(self) -> list[str]:
        """`file_name` as a list, whichever way it was written."""
        if self.file_name is None:
            return []
        return [self.file_name] if isinstance(self.file_name, str) else list(self.file_name)


class GeneratingArguments(ConfigModel):
    """Sampling parameters of a role that generates."""

    do_sample: bool = True
    """Sample; false takes the most likely token every time."""

    temperature: NonNegative = 0.95
    """Divides the logits before sampling; 0 takes the most likely token."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = 0.7
    """Sample from the most likely tokens whose probabilities add up to this; 1 keeps all."""

    top_k: Annotated[Whole, Field(ge=-1)] = 50
    """Sample from this many of the most likely tokens; 0 or -1 keeps all of them."""

    min_p: BelowOne = 0.0
    """Drop tokens less likely than this fraction of the most likely one; 0 keeps all of them."""

    max_length: AtLeastOne = 8192
    """Longest prompt plus response, in tokens; used only where `max_new_tokens` is 0."""

    max_new_tokens: AtLeastZero = 8192
    """Longest response, in tokens. RLVR sets it to `sequence_length - prompt_length`."""

    repetition_penalty: Positive = 1.0
    """Penalty on tokens that occurred before; 1 is none."""

    num_return_sequences: AtLeastOne = 1
    """Responses per prompt: RLVR's `num_return_sequences_in_group`; 1 in the agentic pipeline."""

    stop_strings: list[str] | None = None
    """Texts that end a response."""

    include_stop_str_in_output: bool | None = None
    """Keep the text of `stop_strings` that ended a response, as null does; false drops it."""

    def to_dict(self) -> dict[str, Any]:
        """What a generator takes: one limit on the length, and no key left to the engine."""
        values = plain_values(self)
        del values["max_length" if self.max_new_tokens > 0 else "max_new_tokens"]
        if self.include_stop_str_in_output is None:
            del values["include_stop_str_in_output"]
        return values


def parse_device_mapping(value: Any) -> list[int]:
    """GPU numbers from a list, or from the text of a Python expression of lists, ranges and `+`.

    >>> parse_device_mapping("list(range(0,3)) + [6]")
    [0, 1, 2, 6]

    Raises:
        ValueError: saying what is wrong and what is accepted.
    """
    devices = value
    if isinstance(value, str):
        try:
            devices = _evaluate(ast.parse(value.strip(), mode="eval").body)
        except (SyntaxError, RecursionError):
            raise ValueError(HOW_TO_WRITE_DEVICES) from None
    if not isinstance(devices, (list, tuple, range)):
        raise ValueError(HOW_TO_WRITE_DEVICES)
    if not devices:
        raise ValueError("expected at least one GPU number; leave the key out to run without GPUs")
    seen: set[int] = set()
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise ValueError(f"{HOW_TO_WRITE_DEVICES} ({device!r} is none)")
        if device in seen:
            raise ValueError(f"expected every GPU once; {device} is named twice")
        seen.add(device)
    return list(devices)


def _evaluate(node: ast.expr) -> Any:
    # By hand: `eval` would run what a file says, and `ast.literal_eval` knows no ranges.
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_evaluate(left), _evaluate(right)]
            if all(isinstance(part, list) for part in parts):
                return parts[0] + parts[1]
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            values = _evaluate(inner)
            if isinstance(values, list):
                return values
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if 1 <= len(bounds) <= 3:
            numbers = [_evaluate(bound) for bound in bounds]
            if all(isinstance(number, int) for number in numbers) and numbers[2:] != [0]:
                span = range(*numbers)
                if len(span) > MAX_DEVICES:
                    raise ValueError(f"expected at most {MAX_DEVICES} GPUs, not {len(span)}")
                return list(span)
    raise ValueError(HOW_TO_WRITE_DEVICES)
