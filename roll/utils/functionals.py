"""Driver-side steps on a batch. Each reads named columns, calls `roll.algorithms` and writes
columns.

B rows, S columns of `input_ids`, T = S - 1: column t of a token-level tensor speaks of token t + 1,
so it pairs with `response_mask[:, 1:]`. Steps return a new batch that shares the columns it does
not replace; the batch, the tensors and the config that they were given stay as they are. Columns
are checked once here: NaN at a valid token is an error. The usual order in a pipeline:

    data, mask_metrics = get_sample_level_mask(data, config)
    data, reward_metrics = reward_postprocess(data, config, running)
    data, kl_metrics = compute_token_reward(data, config, kl_ctrl)
    data = compute_advantage(data, gamma=1.0, lambd=0.95, adv_estimator="gae", response_mask=...)

ROLL's steps write into the batch that they are given; docs/differences-from-roll.md lists them.
Below the four steps are the other names that ROLL's users import from here.
"""
# ruff: noqa: F401, some of those are imported for them

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.algorithms import rewards as reward_math
from roll.algorithms.advantages import compute_advantages, discounted_returns, gae
from roll.algorithms.aggregation import Count, aggregate_loss
from roll.algorithms.estimators import RewardNorm, get_estimator
from roll.algorithms.kl import KLController, approx_kl
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

if TYPE_CHECKING:
    from roll.configs.ppo_config import PPOConfig
    from roll.distributed.scheduler.protocol import DataProto

Metrics = dict[str, float]
Running = RunningMoments | Mapping[str, RunningMoments] | None

logger = get_logger(__name__)


@torch.no_grad()
def get_sample_level_mask(data: DataProto, pipeline_config: Any) -> tuple[DataProto, Metrics]:
    """Leave out whole rows: those cut off at the maximal length, too easy or too hard ones, and
    long wrong ones.

    What was cut off is what `finish_reason` says, or, without that column, rows that fill the width
    of `responses`. Writes `final_response_mask` (B, T), `response_mask[:, 1:]` without the rows
    left out, and `origin_response_mask`. The config is read for `max_len_mask`, `difficulty_mask`,
    `error_max_len_clip`, and for the thresholds of those that are on.
    """
    cfg = pipeline_config
    response_mask = column(data, "response_mask")
    mask_BT = response_mask[:, 1:]
    everything_B = torch.ones(len(mask_BT), dtype=torch.bool, device=mask_BT.device)
    keep = {"max_len": everything_B, "difficulty": everything_B, "error_len": everything_B}
    columns: dict[str, Tensor] = {"origin_response_mask": response_mask.clone()}
    if cfg.max_len_mask and "finish_reason" in data:
        is_whole = [reason != "length" for reason in data["finish_reason"]]
        keep["max_len"] = torch.tensor(is_whole, dtype=torch.bool, device=mask_BT.device)
    elif cfg.max_len_mask:
        width = column(data, "responses").shape[-1]
        keep["max_len"] = reward_math.max_length_mask(mask_BT, width)
    if cfg.difficulty_mask:
        groups = row_groups(data, cfg)
        assert groups is not None
        low, high = cfg.difficulty_low_threshold, cfg.difficulty_high_threshold
        is_fit_B = reward_math.difficulty_mask(column(data, "scores"), groups, low, high)
        keep["difficulty"] = columns["difficulty_mask"] = is_fit_B
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
def reward_postprocess(
    data: DataProto, pipeline_config: PPOConfig, running_ctrl: Running
) -> tuple[DataProto, Metrics]:
    """Normalise and clip `response_level_rewards` (B,).

    The estimator decides the normalisation if it defines one (`grpo`: group mean and group standard
    deviation), otherwise `norm_mean_type` and `norm_std_type` do. A group is the rows with the same
    `group_id`, or, without such a column, `actor_infer.generating_args.num_return_sequences`
    neighbouring rows. `running_ctrl` holds the running moments, alone or by domain; if they are
    used, this batch updates them first.
    """
    config = pipeline_config
    rewards_B = column(data, "response_level_rewards")
    check_finite(rewards_B, name="response_level_rewards")
    reward_math.check_clip(config.reward_clip, "reward_clip")
    estimator = get_estimator(config.adv_estimator)
    norm = estimator.reward_norm
    if norm is None:
        norm = RewardNorm(config.norm_mean_type, config.norm_std_type)
    by_group = estimator.compares_group or "group" in norm
    groups = row_groups(data, config if by_group else None)
    if groups is not None and estimator.group_rewards is not None:
        normalized_B = estimator.group_rewards(rewards_B, groups)
    else:
        running = _running_moments(running_ctrl, data) if "running" in norm else None
        if running is not None:
            running.update(rewards_B)
        normalized_B = reward_math.normalize_rewards(
            rewards_B, mean=norm.mean, std=norm.std, groups=groups, running=running
        )
    # A limit of 0 means none.
    normalized_B, clip_frac = reward_math.clip_symmetric(normalized_B, config.reward_clip or None)
    metrics = {"critic/reward_clip_frac": clip_frac}
    if groups is not None:
        metrics["critic/zero_std_group_frac"] = reward_math.zero_std_group_frac(rewards_B, groups)
    return with_columns(data, response_level_rewards=normalized_B), metrics


@torch.no_grad()
def compute_token_reward(
    data: DataProto, pipeline_config: PPOConfig, kl_ctrl: KLController
) -> tuple[DataProto, Metrics]:
    """Put the response's reward on its last token and subtract the KL penalty:
    `token_level_rewards` (B, T).

        tok[i, t] = r_i [t is the last response token of i] - beta KL[i, t], clipped to
        +-reward_clip

    beta is `kl_ctrl.value` if `add_token_level_kl`, else 0; only then does the controller hear the
    divergence. (ROLL always updates it, so that the coefficient drifts while it is not used.) The
    divergence of `old_log_probs` from `ref_log_probs` is reported whenever the batch has both; only
    the penalty needs them. An older column `token_level_rewards` becomes `token_level_scores`.
    """
    config = pipeline_config
    reward_math.check_clip(config.reward_clip, "reward_clip")
    controller = kl_ctrl if config.add_token_level_kl else None
    return _token_reward(data, config.kl_penalty, controller, config.reward_clip or None)


def _token_reward(
    data: DataProto, kl_kind: str, kl_ctrl: KLController | None, limit: float | None
) -> tuple[DataProto, Metrics]:
    """`kl_ctrl` None means no penalty, and that the log-probabilities may be missing."""
    mask_BT = column(data, "response_mask")[:, 1:]
    log_probs: list[Tensor] = []
    for key in ("old_log_probs", "ref_log_probs"):
        if kl_ctrl is None and key not in data:
            continue
        column_BT = column(data, key, "the KL penalty in the reward (add_token_level_kl)")
        if column_BT.is_floating_point():
            check_finite(column_BT, mask_BT, key)
            log_probs.append(column_BT)
        elif kl_ctrl is not None:
            raise ValueError(f"{key} holds {column_BT.dtype}: a placeholder, not log-probabilities")
    kl_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    if len(log_probs) == 2:
        kl_BT = approx_kl(*log_probs, kind=kl_kind, mask=mask_BT)
    beta = 0.0 if kl_ctrl is None else kl_ctrl.value
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
    """Write `advantages`, `returns`, `raw_advantages` (B, T) from `token_level_rewards`, and from
    `values` if the estimator needs them.

    All recurrences run over the valid tokens of `response_mask` (B, T; default `response_mask[:,
    1:]`) only. Also replaces `token_level_rewards` by what was used (0 where masked, whitened if
    asked for) and `values` by 0 where masked. With `advantage_clip`, `meta_info["metrics"]` gains
    `critic/advantage_clip_frac`. ROLL reads only its on-policy distillation from `pipeline_config`;
    a config that turns it on is an error here.
    """
    for key in ("is_pure_opd", "use_opd"):
        if getattr(pipeline_config, key, False):
            raise ConfigError(
                f"{key}: found true, expected false; on-policy distillation is not supported"
            )
    if response_mask is None:
        response_mask = column(data, "response_mask")[:, 1:]
    mask_BT = response_mask.bool()
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


# -- ROLL's other names: rewards and advantages ----------------------------------------------------


def reward_norm(
    response_level_rewards: Tensor,
    n_sample: int = -1,
    running_ctrl: Running = None,
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
) -> Tensor:
    """Normalise rewards (B,) whose groups are `n_sample` neighbouring rows; see
    `normalize_rewards`.

    Running moments, alone or as the only entry of `running_ctrl`, take in these rewards first.
    """
    rewards_B, scopes = response_level_rewards, (norm_mean_type, norm_std_type)
    groups = running = None
    if "group" in scopes:
        groups = reward_math.group_index(len(rewards_B), size=n_sample)
    if "running" in scopes:
        running = _running_moments(running_ctrl, None)
        running.update(rewards_B)
    return reward_math.normalize_rewards(
        rewards_B, mean=norm_mean_type, std=norm_std_type, groups=groups, running=running
    )


@torch.no_grad()
def group_reward_norm(
    data: DataProto, n_sample: int = -1, div_std: bool = True, div_std_global: bool = False
) -> DataProto:
    """Subtract the group's mean from `response_level_rewards`; divide by the group's standard
    deviation, or by that of all centred rewards (`div_std_global`), or not at all."""
    rewards_B = column(data, "response_level_rewards")
    groups = row_groups(data)
    if groups is None:
        groups = reward_math.group_index(len(rewards_B), size=n_sample)
    std = "group" if div_std and not div_std_global else None
    rewards_B = reward_math.normalize_rewards(rewards_B, mean="group", std=std, groups=groups)
    if div_std and div_std_global:
        rewards_B = reward_math.normalize_rewards(rewards_B, std="batch")
    return with_columns(data, response_level_rewards=rewards_B)


@torch.no_grad()
def difficulty_mask(
    data: DataProto, n_sample: int = -1, low_threshold: float = 0.1, high_threshold: float = 0.95
) -> DataProto:
    """Write `difficulty_mask` (B,): the group's mean of `scores` lies strictly between the
    thresholds."""
    scores_B = column(data, "scores")
    groups = row_groups(data)
    if groups is None:
        groups = reward_math.group_index(len(scores_B), size=max(n_sample, 1))
    keep_B = reward_math.difficulty_mask(scores_B, groups, low_threshold, high_threshold)
    return with_columns(data, difficulty_mask=keep_B)


@torch.no_grad()
def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, Metrics]:
    """`compute_token_reward` without a config: the penalty applies whenever there are
    `ref_log_probs`."""
    return _token_reward(data, kl_penalty, kl_ctrl if "ref_log_probs" in data else None, None)


def expand_to_token_level(data: DataProto) -> Tensor:
    """`response_level_rewards` (B,) on the last response token of each row: (B, T).

    ROLL takes the last attended token, which loses the reward of a row that ends with an
    observation.
    """
    rewards_B = column(data, "response_level_rewards")
    check_finite(rewards_B, name="response_level_rewards")
    return reward_math.place_at_last_token(rewards_B, column(data, "response_mask")[:, 1:])


def compute_reinforce_return(
    token_level_rewards: Tensor,
    gamma: float,
    lambd: float = 1.0,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both the discounted returns over the valid tokens; `lambd` is not
    used."""
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


def _running_moments(running_ctrl: Running, data: DataProto | None) -> RunningMoments:
    """The running moments of this batch: the only ones there are, or those of the batch's
    domain."""
    if isinstance(running_ctrl, RunningMoments):
        return running_ctrl
    if not running_ctrl:
        raise ValueError(
            "running normalisation needs running_ctrl: RunningMoments, or a dict of them by domain"
        )
    known, domains = list(running_ctrl), []
    if data is not None and "domain" in data:
        domains = sorted({str(domain) for domain in data["domain"]})
    if len(domains) > 1:
        raise ValueError(
            "running normalisation works on one domain at a time; this batch has "
            f"{', '.join(domains)}"
        )
    domain = domains[0] if domains else known[0] if len(known) == 1 else "domain"
    if domain not in running_ctrl:
        raise KeyError(
            f"running_ctrl has no moments of domain {domain!r}; it has "
            f"{', '.join(map(repr, known))}"
        )
    return running_ctrl[domain]


# -- ROLL's other names: losses --------------------------------------------------------------------


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


# -- ROLL's other names: padded sequences ----------------------------------------------------------


def get_eos_mask(
    response_id: Tensor, eos_token: int = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first `eos_token` of each row. Example, eos 1: [5, 1, 7] -> [1, 1,
    0]."""
    is_eos = response_id == eos_token
    return (is_eos.cumsum(-1) - is_eos.long() == 0).to(dtype)


def get_pad_mask(
    response_id: Tensor, pad_token: int = 0, eos_token: int = 1, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 on every token that is not padding. If the two tokens are the same, the first one of a row
    is its end, not padding. ValueError for a row that starts with padding and then has tokens.

    Example, pad 0: [5, 6, 0] -> [1, 1, 0]; with eos 0 as well: [5, 0, 0] -> [1, 1, 0].
    """
    is_pad = response_id == pad_token
    mask = ~is_pad
    if eos_token == pad_token:
        mask |= is_pad & (is_pad.cumsum(-1) == 1)
    left_padded = ~mask[:, 0] & mask.any(-1)
    if left_padded.any():
        rows = left_padded.nonzero().flatten().tolist()
        raise ValueError(
            f"response_id starts with the padding token {pad_token} in rows {rows}: pad on the "
            "right"
        )
    return mask.to(dtype)


def pad_to_length(tensor: Tensor, length: int, pad_value: float, dim: int = -1) -> Tensor:
    """Cut `tensor` to `length` entries along `dim`, or fill it up on the right with `pad_value`."""
    missing = length - tensor.size(dim)
    if missing <= 0:
        return tensor.narrow(dim, 0, length)
    after_dim = tensor.ndim - 1 - dim % tensor.ndim
    return F.pad(tensor, [0, 0] * after_dim + [0, missing], value=pad_value)


def adjust_sequence_length(
    sequence: Tensor, target_length: int, origin_seq_len: int, pad_value: float = 0
) -> Tensor:
    """Bring the sequence axis of a tensor from `origin_seq_len` to `target_length` entries.

    The axis is the last one whose size is `origin_seq_len`, or `origin_seq_len - 1` for next-token
    columns, which then become `target_length - 1`. The first axis counts rows and is never taken. A
    tensor without such an axis comes back as it is.
    """
    for dim in range(sequence.ndim - 1, 0, -1):
        for shift in (0, 1):
            if sequence.size(dim) == origin_seq_len - shift:
                return pad_to_length(sequence, target_length - shift, pad_value, dim)
    return sequence


def concatenate_input_and_output(
    input_ids: Tensor, output_ids: Tensor, num_return_sequences: int
) -> Tensor:
    """Put each prompt before its responses: (P, I) and (P * n, O) to (P * n, I + O)."""
    return torch.cat((input_ids.repeat_interleave(num_return_sequences, dim=0), output_ids), dim=1)


def gather_unpadded_input_ids(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The attended tokens of each row as a list."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def separate_prompt_response(
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, pad_id: int
) -> tuple[Tensor, Tensor]:
    """The prompt and the response of each row: `input_ids` with all else replaced by `pad_id`."""
    attended, response = attention_mask.bool(), response_mask.bool()
    return (
        torch.where(attended & ~response, input_ids, pad_id),
        torch.where(attended & response, input_ids, pad_id),
    )


# -- ROLL's other names: dicts, sequences and objects ----------------------------------------------


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
