"""Gradients and optimizer state inside DeepSpeed's ZeRO optimizers: all that roll knows of their internals.

ZeRO flattens the parameters, cuts the result over the ranks and gives torch's AdamW one flat float32 tensor per group.
Here gradients, moments and master weights have the names and shapes of the parameters again. So a checkpoint is
written in the layout of the other strategies (see checkpoint), loads with any number of ranks and at any stage, and no
pickled object of DeepSpeed's is ever loaded, which its own checkpoints need.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from roll.distributed.strategy.ranks import Ranks
from roll.exceptions import DataError

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
LOAD_ELEMENTS = (
    2**28
)  # of parameters whose whole state a rank holds at a time while loading: 1 GiB a tensor


class ZeroState:
    """What an engine's ZeRO optimizer holds for the trainable parameters of a model. All ranks call every method."""

    def __init__(
        self, engine: Any, optimizer: torch.optim.Optimizer, model: nn.Module, ranks: Ranks
    ) -> None:
        self.engine = engine
        self.zero = engine.optimizer
        self.optimizer = optimizer
        self.ranks = ranks
        self.is_stage3 = engine.zero_optimization_stage() == 3
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    # -- gradients -----------------------------------------------------------------------------------------------------

    def grad_norm(self) -> Tensor:
        """Of the sum over all ranks, before clipping; inf if any element is not finite."""
        if self.is_stage3:
            norms = torch.stack([norm.float() for norm in self.zero._get_norm_groups()])
            # -1 is how DeepSpeed says that a group's norm is not finite.
            norm = torch.where((norms < 0).any(), torch.inf, torch.linalg.vector_norm(norms))
        else:
            norm = torch.as_tensor(self.zero.scaled_global_norm())
        return norm / self.zero.loss_scale

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole gradient, between the last backward pass of a step and the optimizer's step."""
        for name, parameter in self.parameters.items():
            # Not DeepSpeed's safe_get_full_grad: a gradient that this rank has not shared yet comes first there.
            gradient: Any = (
                self.zero.get_fp32_grad_for_param(parameter)
                if self.is_stage3
                else _extended(parameter).get_full_hp_grad()
            )
            yield name, gradient / self.zero.loss_scale

    def discard_gradients(self) -> None:
        """DeepSpeed's answer to an overflow: gradients are dropped, weights and optimizer state stay, fp16 scales less.

        Every stage asks for the next loss scale right before it looks at `overflow`, so that is the place to say so.
        """
        zero, update_scale = self.zero, self.zero._update_scale

        def overflow(has_overflow: bool = False) -> None:
            zero.overflow = True
            update_scale(True)

        zero._update_scale = overflow
        try:
            self.engine.step()
        finally:
            del zero._update_scale

    # -- optimizer state -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Every parameter's state whole, the parameters dealt out over the ranks that write them."""
        self._create_moments()
        step = self._flat_states()[0]["step"]
        mine: dict[str, dict[str, Tensor]] = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            whole = {key: self._whole_state(parameter, key) for key in self._keys()}
            if index % self.ranks.size == self.ranks.rank:
                mine[name] = {
                    "step": step.clone(),
                    **{key: value.cpu().clone() for key, value in whole.items()},
                }
        state: dict[str, Any] = {"state": mine} if mine else {}
        if self.ranks.rank == 0:
            (group,) = self.optimizer.param_groups
            state["param_groups"] = [{**group, "params": list(self.parameters)}]
        with _quiet():
            dcp.save({"optimizer": state}, checkpoint_id=folder, no_dist=self.ranks.size == 1)

    def load(self, folder: Path) -> None:
        """Read what `save`, or another strategy, wrote; only tensors are read."""
        if not folder.is_dir():
            raise DataError(
                f"{folder}: no optimizer state here; to start from the weights alone, set `pretrain` to this checkpoint"
            )
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        missing = [
            name for name in self.parameters if f"optimizer.state.{name}.exp_avg" not in saved
        ]
        if missing:
            raise DataError(
                f"{folder}: no optimizer state for {', '.join(missing[:5])}; is another model trained here?"
            )
        self._create_moments()
        # A run in half precision without master weights has none to give.
        keys = [
            key
            for key in self._keys()
            if f"optimizer.state.{next(iter(self.parameters))}.{key}" in saved
        ]
        for bucket in self._buckets():
            step = torch.zeros(())
            state = {
                name: {"step": step, **{key: torch.empty(_shape(parameter)) for key in keys}}
                for name, parameter in bucket.items()
            }
            with _quiet():
                dcp.load({"optimizer": {"state": state}}, checkpoint_id=folder, no_dist=True)
            for name, parameter in bucket.items():
                for key in keys:
                    self._set_state(parameter, key, state[name][key])
            for flat_state in self._flat_states():
                flat_state["step"].copy_(step)

    def refresh_master_weights(self) -> None:
        """After the model's weights were written from outside."""
        self.zero.refresh_fp32_params()

    def _keys(self) -> tuple[str, ...]:
        is_float32 = next(iter(self.parameters.values())).dtype == torch.float32
        return MOMENTS if is_float32 else (*MOMENTS, MASTER)

    def _flat_parameters(self) -> list[Tensor]:
        return (
            self.zero.fp32_partitioned_groups_flat
            if self.is_stage3
            else self.zero.single_partition_of_fp32_groups
        )

    def _flat_states(self) -> list[dict[str, Tensor]]:
        return [self.optimizer.state[flat] for flat in self._flat_parameters()]

    def _create_moments(self) -> None:
        """AdamW makes its state in its first step; before that it is this."""
        for flat in self._flat_parameters():
            if not self.optimizer.state.get(flat):
                moments = {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}
                self.optimizer.state[flat] = {"step": torch.tensor(0.0), **moments}
        if not self.is_stage3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def _whole_state(self, parameter: nn.Parameter, key: str) -> Tensor:
        state_key = None if key == MASTER else key
        if self.is_stage3:
            return self.zero.get_full_hp_param(parameter, state_key)
        return _extended(parameter).get_full_hp_param(state_key)

    def _set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        state_key = None if key == MASTER else key
        if not self.is_stage3:
            _extended(parameter).set_full_hp_param(value, state_key)
            return
        # This rank's part; DeepSpeed's own method for whole values fails where the last part is padded.
        length = _extended(parameter).ds_tensor.numel()
        padded = torch.nn.functional.pad(
            value.flatten(), (0, length * self.ranks.size - value.numel())
        )
        self.zero.set_local_hp_param(
            padded.narrow(0, length * self.ranks.rank, length), parameter, state_key
        )

    def _buckets(self) -> Iterator[dict[str, nn.Parameter]]:
        bucket: dict[str, nn.Parameter] = {}
        size = 0
        for name, parameter in self.parameters.items():
            elements = _shape(parameter).numel()
            if bucket and size + elements > LOAD_ELEMENTS:
                yield bucket
                bucket, size = {}, 0
            bucket[name] = parameter
            size += elements
        if bucket:
            yield bucket


def _extended(parameter: nn.Parameter) -> Any:
    """The parameter with the methods that DeepSpeed has put on it."""
    return parameter


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole parameter, which at stage 3 is elsewhere."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a process which says `no_dist` is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
