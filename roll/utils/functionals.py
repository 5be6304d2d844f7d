"""Driver-side steps on a batch. Each reads named columns, calls `roll.algorithms` and writes named columns.

B rows, S columns of `input_ids`, T = S - 1: column t of a token-level tensor speaks of token t + 1, so it pairs with
`response_mask[:, 1:]`. Steps return a new batch that shares the columns it does not replace; the batch, the tensors and
the config that they were given stay as they are. Columns are checked once here: NaN at a valid token is an error.

The usual order in a pipeline:

    data, mask_metrics = get_sample_level_mask(data, config)
    data, reward_metrics = reward_postprocess(data, config, running)
    data, kl_metrics = compute_token_reward(data, config, kl_ctrl)
    data = compute_advantage(data, gamma=1.0, lambd=0.95, adv_estimator="gae", response_mask=...)

ROLL's steps write into the batch that they are given; docs/differences-from-roll.md lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.algorithms import rewards as reward_math
from roll.algorithms.advantages import compute_advantages, discounted_returns, gae
from roll.algorithms.aggregation import Count, aggregate_loss
from roll.algorithms.estimators import RewardNorm, get_estimator
from roll.algorithms.kl import approx_kl
from roll.algorithms.masking import (
    check_finite,
    clip_fraction,
    masked_mean,
    masked_normalize,
    masked_sum,
    masked_var,
    masked_whiten,
    response_level_masked_whiten,
    select,
)
from roll.algorithms.rewards import RunningMoments
from roll.exceptions import ConfigError
from roll.ops.log_probs import entropy_from_logits, log_probs_from_logits
from roll.utils.balancing import batch_balance, get_seqlen_balanced_partitions, log_seqlen_unbalance
from roll.utils.columns import column, row_groups, with_columns
from roll.utils.generation import postprocess_generate
from roll.utils.logging import get_logger
from roll.utils.metrics.reduction import (
    aggregate_metrics,
    append_to_dict,
    flatten_sum,
    reduce_metrics,
    reduce_metrics_list,
)
from roll.utils.sequences import (
    adjust_sequence_length,
    concatenate_input_and_output,
    gather_unpadded_input_ids,
    get_eos_mask,
    get_pad_mask,
    pad_to_length,
    separate_prompt_response,
)

if TYPE_CHECKING:
    from roll.configs.ppo_config import PPOConfig
    from roll.distributed.scheduler.protocol import DataProto
    from roll.utils.kl_controller import KLController

__all__ = [
    "RunningMoments",
    "adjust_sequence_length",
    "agg_loss",
    "aggregate_metrics",
    "append_to_dict",
    "apply_kl_penalty",
    "batch_balance",
    "compute_advantage",
    "compute_approx_kl",
    "compute_clip_fraction",
    "compute_gae_advantage_return",
    "compute_reinforce_return",
    "compute_token_reward",
    "concatenate_input_and_output",
    "difficulty_mask",
    "divide_by_chunk_size",
    "entropy_from_logits",
    "expand_to_token_level",
    "filter_func_args",
    "flatten_sum",
    "gather_unpadded_input_ids",
    "get_eos_mask",
    "get_pad_mask",
    "get_sample_level_mask",
    "get_seqlen_balanced_partitions",
    "group_reward_norm",
    "log_probs_from_logits",
    "log_seqlen_unbalance",
    "masked_mean",
    "masked_normalize",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_to_length",
    "postprocess_generate",
    "reduce_metrics",
    "reduce_metrics_list",
    "response_level_masked_whiten",
    "reward_norm",
    "reward_postprocess",
    "separate_prompt_response",
    "traverse_obj",
    "union_two_dict",
]

Metrics = dict[str, float]

logger = get_logger(__name__)


# --------------------------------------------------------------------------------------------------
# response-level rewards


@torch.no_grad()
def reward_postprocess(
    data: DataProto,
    pipeline_config: PPOConfig,
    running_ctrl: RunningMoments | Mapping[str, RunningMoments] | None,
) -> tuple[DataProto, Metrics]:
    """Normalise and clip `response_level_rewards` (B,).

    The estimator decides the normalisation if it defines one (`grpo`: group mean and group standard deviation),
    otherwise `norm_mean_type` and `norm_std_type` do. A group is the rows with the same `group_id`, or, without such a
    column, `actor_infer.generating_args.num_return_sequences` neighbouring rows. `running_ctrl` holds the running
    moments, alone or by domain; if they are used, this batch updates them first.
    """
    rewards_B = column(data, "response_level_rewards")
    check_finite(rewards_B, name="response_level_rewards")
    limit = _reward_clip(pipeline_config)
    estimator = get_estimator(pipeline_config.adv_estimator)
    norm = estimator.reward_norm
    if norm is None:
        norm = RewardNorm(pipeline_config.norm_mean_type, pipeline_config.norm_std_type)
    by_group = estimator.compares_group or "group" in norm
    groups = row_groups(data, pipeline_config if by_group else None)
    if groups is not None and estimator.group_rewards is not None:
        normalized_B = estimator.group_rewards(rewards_B, groups)
    else:
        running = _running_moments(running_ctrl, data) if "running" in norm else None
        if running is not None:
            running.update(rewards_B)
        normalized_B = reward_math.normalize_rewards(
            rewards_B, mean=norm.mean, std=norm.std, groups=groups, running=running
        )
    normalized_B, clip_frac = reward_math.clip_symmetric(normalized_B, limit)
    metrics = {"critic/reward_clip_frac": clip_frac}
    if groups is not None:
        metrics["critic/zero_std_group_frac"] = reward_math.zero_std_group_frac(rewards_B, groups)
    return with_columns(data, response_level_rewards=normalized_B), metrics


def reward_norm(
    response_level_rewards: Tensor,
    n_sample: int = -1,
    running_ctrl: RunningMoments | Mapping[str, RunningMoments] | None = None,
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
) -> Tensor:
    """Normalise rewards (B,) whose groups are `n_sample` neighbouring rows; see `normalize_rewards`.

    Running moments, alone or as the only entry of `running_ctrl`, take in these rewards first.
    """
    groups = None
    if "group" in (norm_mean_type, norm_std_type):
        groups = reward_math.group_index(len(response_level_rewards), size=n_sample)
    running = None
    if "running" in (norm_mean_type, norm_std_type):
        running = _running_moments(running_ctrl, None)
        running.update(response_level_rewards)
    return reward_math.normalize_rewards(
        response_level_rewards,
        mean=norm_mean_type,
        std=norm_std_type,
        groups=groups,
        running=running,
    )


@torch.no_grad()
def group_reward_norm(
    data: DataProto, n_sample: int = -1, div_std: bool = True, div_std_global: bool = False
) -> DataProto:
    """Subtract the group's mean from `response_level_rewards`; divide by the group's standard deviation, or by that of
    all centred rewards (`div_std_global`), or not at all."""
    rewards_B = column(data, "response_level_rewards")
    groups = row_groups(data)
    if groups is None:
        groups = reward_math.group_index(len(rewards_B), size=n_sample)
    if div_std and not div_std_global:
        normalized_B = reward_math.normalize_rewards(
            rewards_B, mean="group", std="group", groups=groups
        )
    else:
        centred_B = reward_math.normalize_rewards(rewards_B, mean="group", groups=groups)
        normalized_B = reward_math.normalize_rewards(centred_B, std="batch" if div_std else None)
    return with_columns(data, response_level_rewards=normalized_B)


# --------------------------------------------------------------------------------------------------
# masks of samples


@torch.no_grad()
def get_sample_level_mask(data: DataProto, pipeline_config: Any) -> tuple[DataProto, Metrics]:
    """Leave out whole rows: those cut off at the maximal length, too easy or too hard ones, and long wrong ones.

    What was cut off is what `finish_reason` says, or, without that column, rows that fill the width of `responses`.
    Writes `final_response_mask` (B, T), `response_mask[:, 1:]` without the rows left out, and `origin_response_mask`.
    The config is read for `max_len_mask`, `difficulty_mask`, `error_max_len_clip`, and for the thresholds of those on.
    """
    cfg = pipeline_config
    response_mask = column(data, "response_mask")
    mask_BT = response_mask[:, 1:]
    everything_B = torch.ones(len(mask_BT), dtype=torch.bool, device=mask_BT.device)
    keep = {"max_len": everything_B, "difficulty": everything_B, "error_len": everything_B}
    columns: dict[str, Tensor] = {"origin_response_mask": response_mask.clone()}
    if cfg.max_len_mask:
        if "finish_reason" in data:
            is_whole = [reason != "length" for reason in data["finish_reason"]]
            keep["max_len"] = torch.tensor(is_whole, dtype=torch.bool, device=mask_BT.device)
        else:
            keep["max_len"] = reward_math.max_length_mask(
                mask_BT, column(data, "responses").shape[-1]
            )
    if cfg.difficulty_mask:
        groups = row_groups(data, cfg)
        assert groups is not None
        scores_B = column(data, "scores")
        low, high = cfg.difficulty_low_threshold, cfg.difficulty_high_threshold
        keep["difficulty"] = columns["difficulty_mask"] = reward_math.difficulty_mask(
            scores_B, groups, low, high
        )
    if cfg.error_max_len_clip:
        threshold = cfg.error_max_len_threshold
        keep["error_len"] = reward_math.overlong_mask(column(data, "scores"), mask_BT, threshold)
    final_B = keep["max_len"] & keep["difficulty"] & keep["error_len"]
    columns["final_response_mask"] = torch.where(final_B.unsqueeze(1), mask_BT.float(), 0.0)
    metrics = {
        f"actor/{name}_mask_ratio": kept.float().mean().item() for name, kept in keep.items()
    }
    metrics["actor/final_mask_ratio"] = final_B.float().mean().item()
    metrics["actor/samples_used"] = float(final_B.sum())
    metrics["actor/samples_total"] = float(len(final_B))
    return with_columns(data, **columns), metrics


@torch.no_grad()
def difficulty_mask(
    data: DataProto, n_sample: int = -1, low_threshold: float = 0.1, high_threshold: float = 0.95
) -> DataProto:
    """Write `difficulty_mask` (B,): the mean of `scores` in the row's group lies strictly between the thresholds."""
    scores_B = column(data, "scores")
    groups = row_groups(data)
    if groups is None:
        groups = reward_math.group_index(len(scores_B), size=max(n_sample, 1))
    keep_B = reward_math.difficulty_mask(scores_B, groups, low_threshold, high_threshold)
    return with_columns(data, difficulty_mask=keep_B)


# --------------------------------------------------------------------------------------------------
# token-level rewards


@torch.no_grad()
def compute_token_reward(
    data: DataProto, pipeline_config: PPOConfig, kl_ctrl: KLController
) -> tuple[DataProto, Metrics]:
    """Put the response's reward on its last token and subtract the KL penalty: `token_level_rewards` (B, T).

        tok[i, t] = r_i [t is the last response token of i] - beta KL[i, t],   then clipped to +-reward_clip

    beta is `kl_ctrl.value` if `add_token_level_kl`, else 0; only then does the controller hear the divergence. (ROLL
    always updates it, so that the coefficient drifts while it is not used.) The divergence of `old_log_probs` from
    `ref_log_probs` is reported whenever the batch has both; only the penalty needs them. An older column
    `token_level_rewards` becomes `token_level_scores`.
    """
    mask_BT = column(data, "response_mask")[:, 1:]
    limit = _reward_clip(pipeline_config)
    kl_BT = _reference_kl(
        data, mask_BT, pipeline_config.kl_penalty, needed=pipeline_config.add_token_level_kl
    )
    beta = kl_ctrl.value if pipeline_config.add_token_level_kl else 0.0
    return _token_reward(
        data, mask_BT, kl_BT, beta, limit, kl_ctrl if pipeline_config.add_token_level_kl else None
    )


@torch.no_grad()
def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, Metrics]:
    """`compute_token_reward` without a config: the penalty applies whenever the batch has `ref_log_probs`."""
    mask_BT = column(data, "response_mask")[:, 1:]
    with_reference = "ref_log_probs" in data
    kl_BT = _reference_kl(data, mask_BT, kl_penalty, needed=with_reference)
    beta = kl_ctrl.value if with_reference else 0.0
    return _token_reward(data, mask_BT, kl_BT, beta, None, kl_ctrl if with_reference else None)


def expand_to_token_level(data: DataProto) -> Tensor:
    """`response_level_rewards` (B,) on the last response token of each row: (B, T).

    ROLL takes the last attended token, which loses the reward of a row that ends with an observation.
    """
    rewards_B = column(data, "response_level_rewards")
    check_finite(rewards_B, name="response_level_rewards")
    return reward_math.place_at_last_token(rewards_B, column(data, "response_mask")[:, 1:])


def _reference_kl(data: DataProto, mask_BT: Tensor, kind: str, needed: bool) -> Tensor:
    """Divergence from the reference (B, T); 0 without a reference, which is an error if it is `needed`."""
    log_probs: list[Tensor] = []
    for key in ("old_log_probs", "ref_log_probs"):
        if needed or key in data:
            column_BT = column(data, key, "the KL penalty in the reward (add_token_level_kl)")
            if column_BT.is_floating_point():
                check_finite(column_BT, mask_BT, key)
                log_probs.append(column_BT)
            elif needed:
                raise ValueError(
                    f"{key} holds {column_BT.dtype}: a placeholder, not log-probabilities"
                )
    if len(log_probs) < 2:
        return torch.zeros(mask_BT.shape, device=mask_BT.device)
    return approx_kl(*log_probs, kind=kind, mask=mask_BT)


def _token_reward(
    data: DataProto,
    mask_BT: Tensor,
    kl_BT: Tensor,
    beta: float,
    limit: float | None,
    kl_ctrl: KLController | None,
) -> tuple[DataProto, Metrics]:
    rewards_BT = expand_to_token_level(data) - beta * kl_BT
    rewards_BT, clip_frac = reward_math.clip_symmetric(rewards_BT, limit, mask_BT)
    mean_kl = reward_math.row_mean(kl_BT, mask_BT).item()
    if kl_ctrl is not None:
        kl_ctrl.update(current=mean_kl, n_steps=len(mask_BT))
    columns = {"token_level_rewards": rewards_BT}
    if "token_level_rewards" in data:
        columns["token_level_scores"] = column(data, "token_level_rewards")
    metrics = {
        "critic/kl": mean_kl,
        "critic/kl_coef": beta,
        "critic/token_reward_clip_frac": clip_frac,
        "critic/empty_response_frac": (~mask_BT.bool().any(-1)).sum().item() / max(len(mask_BT), 1),
    }
    return with_columns(data, **columns), metrics


# --------------------------------------------------------------------------------------------------
# advantages


@torch.no_grad()
def compute_advantage(
    data: DataProto,
    gamma: float,
    lambd: float,
    adv_estimator: str,
    advantage_clip: float | None = None,
    whiten_advantages: bool = False,
    whiten_rewards: bool = False,
    response_mask: Tensor | None = None,
    pipeline_config: Any = None,
) -> DataProto:
    """Write `advantages`, `returns`, `raw_advantages` (B, T) from `token_level_rewards`, and for `gae` from `values`.

    All recurrences run over the valid tokens of `response_mask` (B, T; default `response_mask[:, 1:]`) only. Also
    replaces `token_level_rewards` by what was used (0 where masked, whitened if asked for) and `values` by 0 where
    masked. With `advantage_clip`, `meta_info["metrics"]` gains `critic/advantage_clip_frac`. ROLL reads only its
    on-policy distillation from `pipeline_config`; a config that turns it on is an error here.
    """
    for key in ("is_pure_opd", "use_opd"):
        if getattr(pipeline_config, key, False):
            raise ConfigError(
                f"{key}: found true, expected false; on-policy distillation is not supported"
            )
    mask_BT = (
        column(data, "response_mask")[:, 1:] if response_mask is None else response_mask
    ).bool()
    rewards_BT = column(data, "token_level_rewards")
    check_finite(rewards_BT, mask_BT, "token_level_rewards")
    values_BT = None
    columns: dict[str, Tensor] = {}
    if get_estimator(adv_estimator).needs_values:
        values_BT = column(data, "values", f"adv_estimator {adv_estimator!r}")
        check_finite(values_BT, mask_BT, "values")
        columns["values"] = select(values_BT, mask_BT)
    if (whiten_rewards or whiten_advantages) and int(mask_BT.sum()) < 2:
        logger.warning("whitening is skipped: the batch has fewer than two response tokens")
    result = compute_advantages(
        rewards=rewards_BT,
        mask=mask_BT,
        estimator=adv_estimator,
        gamma=gamma,
        lam=lambd,
        values=values_BT,
        whiten_rewards=whiten_rewards,
        whiten_advantages=whiten_advantages,
        clip=advantage_clip,
    )
    columns |= {
        "token_level_rewards": result.rewards,
        "raw_advantages": result.raw_advantages,
        "advantages": result.advantages,
        "returns": result.returns,
    }
    metrics = {} if advantage_clip is None else {"critic/advantage_clip_frac": result.clip_frac}
    return with_columns(data, metrics, **columns)


def compute_reinforce_return(
    token_level_rewards: Tensor,
    gamma: float,
    lambd: float = 1.0,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both the discounted returns over the valid tokens; `lambd` is not used."""
    mask = torch.ones_like(token_level_rewards) if response_mask is None else response_mask
    returns = discounted_returns(token_level_rewards, mask, float(gamma))
    return returns, returns.clone()


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    gamma: float,
    lambd: float,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of generalised advantage estimation over the valid tokens."""
    mask = torch.ones_like(token_level_rewards) if response_mask is None else response_mask
    return gae(token_level_rewards, values, mask, float(gamma), float(lambd))


# --------------------------------------------------------------------------------------------------
# ROLL's names for functions of roll.algorithms


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_penalty: str = "kl",
) -> Tensor:
    """See `roll.algorithms.kl.approx_kl`."""
    return approx_kl(log_probs, log_probs_base, kind=kl_penalty, mask=action_mask)


def compute_clip_fraction(
    values: Tensor, clip_max: float, clip_min: float, mask: Tensor | None = None
) -> float:
    """Share of the (valid) entries strictly outside [clip_min, clip_max]."""
    return clip_fraction(values, clip_min, clip_max, mask).item()


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    batch_num_tokens: Count | None = None,
    global_valid_samples: Count | None = None,
    weights: Tensor | None = None,
    norm_factor: Count | None = None,
) -> Tensor:
    """See `roll.algorithms.aggregation.aggregate_loss`."""
    return aggregate_loss(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        num_tokens=batch_num_tokens,
        num_sequences=global_valid_samples,
        weights_B=weights,
        norm_factor=norm_factor,
    )


def _reward_clip(config: PPOConfig) -> float | None:
    """The clip limit of rewards; 0 means none."""
    reward_math.check_clip(config.reward_clip, "reward_clip")
    return config.reward_clip or None


def _running_moments(
    running_ctrl: RunningMoments | Mapping[str, RunningMoments] | None, data: DataProto | None
) -> RunningMoments:
    """The running moments of this batch: the only ones there are, or those of the batch's domain."""
    if isinstance(running_ctrl, RunningMoments):
        return running_ctrl
    if not running_ctrl:
        raise ValueError(
            "running normalisation needs running_ctrl: RunningMoments, or a dict of them by domain"
        )
    domains = (
        sorted({str(domain) for domain in data["domain"]})
        if data is not None and "domain" in data
        else []
    )
    if len(domains) > 1:
        raise ValueError(
            f"running normalisation works on one domain at a time; this batch has {', '.join(domains)}"
        )
    known = list(running_ctrl)
    domain = domains[0] if domains else known[0] if len(known) == 1 else "domain"
    if domain not in running_ctrl:
        raise KeyError(
            f"running_ctrl has no moments of domain {domain!r}; it has {', '.join(map(repr, known))}"
        )
    return running_ctrl[domain]


# -- ROLL's helpers on dicts, sequences and objects ------------------------------------------------


def union_two_dict(dict1: Mapping[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Both dicts in a new one; ValueError if they disagree on a key."""
    for key in dict1.keys() & dict2.keys():
        if dict1[key] != dict2[key]:
            raise ValueError(f"the dicts disagree on {key!r}: {dict1[key]!r} and {dict2[key]!r}")
    return {**dict1, **dict2}


def divide_by_chunk_size(data: Any, chunk_sizes: Sequence[int]) -> list[Any]:
    """Cut an array, tensor or list along its first axis into pieces of the given sizes."""
    if any(size < 1 for size in chunk_sizes) or sum(chunk_sizes) != len(data):
        raise ValueError(
            f"chunk sizes {list(chunk_sizes)} must be positive and sum to the {len(data)} rows"
        )
    pieces, start = [], 0
    for size in chunk_sizes:
        pieces.append(data[start : start + size])
        start += size
    return pieces


def traverse_obj(
    value: Any,
    visitor: Callable[[Any, tuple[Any, ...]], bool],
    path: tuple[Any, ...] = (),
    above: frozenset[int] = frozenset(),
) -> None:
    """Call `visitor(value, path)` on a value and on what its dicts, lists and attributes hold.

    A visitor that returns True stops the walk below its value. `above` holds the ids of the values
    on the way, so that cycles end.
    """
    if id(value) in above or visitor(value, path):
        return
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    else:
        attributes = getattr(value, "__dict__", {})
        children = [(f"attr:{name}", child) for name, child in attributes.items()]
    for step, child in children:
        traverse_obj(child, visitor, (*path, step), above | {id(value)})


def filter_func_args(func: Callable[..., Any], forward_args: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `forward_args` that `func` has a parameter for."""
    parameters = inspect.signature(func).parameters
    return {name: value for name, value in forward_args.items() if name in parameters}
