"""Runs every vector of tests/vectors/*.json, or of the folder that the variable ROLL_VECTORS names.

A file holds `{"function": name, "vectors": [...]}` or `{"functions": {name: [...]}}`. A vector has
`inputs`, `config`, `expected` (named outputs, or `raises`) and `tol`, an absolute and relative
tolerance. An adapter calls the package with a vector's inputs and config and returns the outputs by
name; everything that is expected must be among them.
"""

import builtins
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vector_adapters_losses import ADAPTERS as LOSS_ADAPTERS

from roll.algorithms.kl import AdaptiveKLController, FixedKLController
from roll.algorithms.masking import masked_whiten
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.utils import (
    compute_discounted_returns,
    compute_response_level_rewards,
    compute_segment_masked_mean,
)
from roll.utils.functionals import (
    RunningMoments,
    append_to_dict,
    compute_advantage,
    compute_approx_kl,
    compute_token_reward,
    reduce_metrics,
    reward_postprocess,
)

Json = dict[str, Any]
FOLDER = Path(os.environ.get("ROLL_VECTORS") or Path(__file__).parent / "vectors")
MASK_COLUMNS = ("response_mask", "attention_mask", "position_ids")


def tensor(values: Any) -> Tensor:
    """Nested lists of numbers, in which 'nan', 'inf' and '-inf' are such floats, as float32."""
    return torch.from_numpy(np.asarray(values, dtype=float)).float()


def batch_of(inputs: Json) -> DataProto:
    """Numbers become tensors, masks integer ones; strings become object columns; null columns are
    left out."""
    columns: dict[str, Any] = {}
    for key, values in inputs.items():
        if values is None:
            continue
        is_text = isinstance(values[0], str) and values[0] not in ("nan", "inf", "-inf")
        columns[key] = np.array(values, dtype=object) if is_text else tensor(values)
        if key in MASK_COLUMNS:
            columns[key] = columns[key].long()
    return DataProto.from_single_dict(columns)


def run_reward_postprocess(inputs: Json, config: Json) -> Json:
    options = {
        "adv_estimator": "reinforce",
        "norm_mean_type": None,
        "norm_std_type": None,
        "reward_clip": None,
    }
    settings = SimpleNamespace(
        **options | {key: value for key, value in config.items() if key in options}
    )
    if "num_return_sequences" in config:
        generating_args = SimpleNamespace(num_return_sequences=config["num_return_sequences"])
        settings.actor_infer = SimpleNamespace(generating_args=generating_args)
    before = dict(vars(settings))
    running = RunningMoments()
    running.load_state_dict(inputs.get("state_before", running.state_dict()))
    columns = {
        key: inputs[key]
        for key in ("response_level_rewards", "group_id", "group_ids")
        if key in inputs
    }
    data, metrics = reward_postprocess(batch_of(columns), settings, running)
    assert vars(settings) == before
    return {
        "response_level_rewards": data.batch["response_level_rewards"],
        "reward_clip_frac": metrics["critic/reward_clip_frac"],
        "zero_std_group_frac": metrics.get("critic/zero_std_group_frac"),
        "state_count": running.count,
        "state_mean": running.mean,
        "state_M2": running.m2,
    }


def run_compute_token_reward(inputs: Json, config: Json) -> Json:
    data, metrics = compute_token_reward(
        batch_of(inputs), SimpleNamespace(**config), FixedKLController(config["kl_coef"])
    )
    names = ("kl", "kl_coef", "token_reward_clip_frac", "empty_response_frac")
    outputs = {name: metrics[f"critic/{name}"] for name in names}
    return {"token_level_rewards": data.batch["token_level_rewards"], **outputs}


def run_compute_advantage(inputs: Json, config: Json) -> Json:
    data = compute_advantage(batch_of(inputs), **config)
    names = ("advantages", "returns", "raw_advantages", "token_level_rewards")
    clip_frac = data.meta_info.get("metrics", {}).get("critic/advantage_clip_frac", 0.0)
    return {name: data.batch[name] for name in names} | {"clip_frac": clip_frac}


def run_compute_approx_kl(inputs: Json, config: Json) -> Json:
    log_probs = tensor(inputs["log_probs"]).requires_grad_()
    mask = None if inputs.get("action_mask") is None else tensor(inputs["action_mask"])
    kl = compute_approx_kl(log_probs, tensor(inputs["log_probs_base"]), mask, inputs["kl_penalty"])
    kl.sum().backward()
    return {"kl": kl, "grad_sum_wrt_log_probs": log_probs.grad}


def run_adaptive_kl_controller(inputs: Json, config: Json) -> Json:
    controller = AdaptiveKLController(inputs["init"], inputs["target"], inputs["horizon"])
    values = []
    for current, n_steps in inputs["updates"]:
        controller.update(current=float(current), n_steps=n_steps)
        values.append(controller.value)
    return {"values": values}


def run_gigpo_response_rewards(inputs: Json, config: Json) -> Json:
    norm = SimpleNamespace(
        grouping="traj_group_id",
        norm_mean_type=config["norm_mean"],
        norm_std_type=config["norm_std"],
    )
    settings = SimpleNamespace(
        adv_estimator="gigpo",
        reward_normalization=norm,
        reward_clip=config.get("reward_clip"),
        episode_reward_weight=config["episode_reward_weight"],
        step_reward_weight=config["step_reward_weight"],
    )
    data = DataProto.from_dict({"row": torch.arange(len(inputs["step"]))}, non_tensors=inputs)
    data = compute_discounted_returns(data, "gigpo", gamma=config["step_reward_gamma"])
    data, _ = compute_response_level_rewards(data, settings)
    names = ("step_rewards", "episode_rewards_norm", "step_rewards_norm", "response_level_rewards")
    return {name: data.batch[name] for name in names}


def run_masked_whiten(inputs: Json, config: Json) -> Json:
    return {"out": masked_whiten(tensor(inputs["values"]), tensor(inputs["mask"]), **config)}


def run_segment_masked_mean(inputs: Json, config: Json) -> Json:
    return {"out": compute_segment_masked_mean(tensor(inputs["tensor"]), tensor(inputs["mask"]))}


def run_metric_reduction(inputs: Json, config: Json) -> Json:
    merged: dict[str, list[Any]] = {}
    for metrics in inputs["micro"]:
        append_to_dict(merged, metrics)
    reduced = reduce_metrics(merged)
    return {"reduced": reduced, "full": reduced}


ADAPTERS: dict[str, Callable[[Json, Json], Json]] = {
    "reward_postprocess": run_reward_postprocess,
    "compute_token_reward": run_compute_token_reward,
    "compute_advantage": run_compute_advantage,
    "compute_approx_kl": run_compute_approx_kl,
    "adaptive_kl_controller": run_adaptive_kl_controller,
    "gigpo_response_rewards": run_gigpo_response_rewards,
    "masked_whiten": run_masked_whiten,
    "segment_masked_mean": run_segment_masked_mean,
    "metric_reduction": run_metric_reduction,
    **LOSS_ADAPTERS,
}
# Functions whose outputs are compared only where this input is non-zero.
COMPARED_UNDER = {"masked_whiten": "mask"}


def load_vectors() -> list[Any]:
    cases = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        functions = content.get("functions") or {content["function"]: content["vectors"]}
        for function, vectors in functions.items():
            cases += [
                pytest.param(function, vector, id=f"{function}-{vector['id']}")
                for vector in vectors
            ]
    if not cases:
        raise FileNotFoundError(f"no vectors in {FOLDER}")
    return cases


def expected_errors(text: str) -> tuple[type[BaseException], ...]:
    """The exceptions that a text such as 'ValueError (or KeyError)' names."""
    return tuple(getattr(builtins, name) for name in re.findall(r"\w+(?:Error|Exception)", text))


def state_before(after: Json, batch: list[float]) -> Json:
    """The running moments that lead to `after` when they take in `batch`."""
    count = after["state_count"] - len(batch)
    if count == 0:
        return {"count": 0, "mean": 0.0, "m2": 0.0}
    batch_mean = sum(batch) / len(batch)
    batch_m2 = sum((x - batch_mean) ** 2 for x in batch)
    mean = (after["state_count"] * after["state_mean"] - sum(batch)) / count
    between = (batch_mean - mean) ** 2 * count * len(batch) / after["state_count"]
    return {"count": count, "mean": mean, "m2": after["state_M2"] - batch_m2 - between}


def assert_close(actual: Any, expected: Any, tol: float, where: str) -> None:
    if isinstance(actual, Tensor | np.ndarray):
        actual = actual.tolist()
    if isinstance(expected, dict):
        for key in expected:
            assert key in actual, f"{where} has no {key!r}"
            assert_close(actual[key], expected[key], tol, f"{where}[{key!r}]")
    elif isinstance(expected, list):
        assert isinstance(actual, list) and len(actual) == len(expected), (
            f"{where}: {actual} is not like {expected}"
        )
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, tol, f"{where}[{i}]")
    elif expected is None or isinstance(expected, bool):
        assert actual == expected, f"{where}: {actual}, expected {expected}"
    else:
        want = float(expected)
        same = math.isclose(float(actual), want, rel_tol=tol, abs_tol=tol) or (
            math.isnan(want) and math.isnan(actual)
        )
        assert same, f"{where}: {actual}, expected {want} within {tol}"


@pytest.mark.parametrize(("function", "vector"), load_vectors())
def test_vector(function: str, vector: Json) -> None:
    assert function in ADAPTERS, f"no adapter for {function!r}"
    inputs, config, expected = vector["inputs"], vector.get("config") or {}, vector["expected"]
    if "raises" in expected:
        with pytest.raises(expected_errors(expected["raises"])):
            ADAPTERS[function](inputs, config)
        return
    if "state_count" in expected:
        inputs = inputs | {"state_before": state_before(expected, inputs["response_level_rewards"])}
    outputs = ADAPTERS[function](inputs, config)
    for name, want in expected.items():
        assert name in outputs, f"{function} returns no {name!r}; it returns {sorted(outputs)}"
        got = outputs[name]
        if function in COMPARED_UNDER:
            valid = tensor(inputs[COMPARED_UNDER[function]]).bool()
            got, want = got[valid], tensor(want)[valid].tolist()
        assert_close(got, want, vector["tol"] or 0.0, name)
