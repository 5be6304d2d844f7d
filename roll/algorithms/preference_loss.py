"""Losses on pairs of answers to one prompt, one preferred to the other: DPO and its variants.

A batch interleaves its pairs: row 2i is the chosen answer of pair i, row 2i+1 the rejected one. P
is the number of pairs, R = 2P that of rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.algorithms.aggregation import Count, at_least_one
from roll.algorithms.masking import check_mask, select


def split_pairs(values_R: Tensor, name: str = "the batch") -> tuple[Tensor, Tensor]:
    """Even rows (chosen) and odd rows (rejected)."""
    if len(values_R) % 2:
        raise ValueError(
            f"{name} has {len(values_R)} rows, but chosen and rejected rows alternate, so their "
            "number must be even; choose micro-batch sizes that do not split a pair"
        )
    return values_R[0::2], values_R[1::2]


def completion_mask(attention_mask_RS: Tensor, prompt_lens_R: Tensor) -> Tensor:
    """(R, S-1), True where column t predicts a token of the completion: token t+1 is attended and
    at least `prompt_lens` attended tokens come before it. Works for padding on either side.

    Example: attention [0, 0, 1, 1, 1] with 2 prompt tokens -> [False, False, False, True].
    """
    if prompt_lens_R.shape != attention_mask_RS.shape[:1]:
        raise ValueError(
            f"prompt_id_lens must have one entry per row, ({len(attention_mask_RS)},), got "
            f"{tuple(prompt_lens_R.shape)}"
        )
    attended_RS = attention_mask_RS.bool()
    index_RS = attended_RS.cumsum(-1) - 1
    return (attended_RS & (index_RS >= prompt_lens_R.unsqueeze(-1)))[:, 1:]


def sequence_log_probs(
    log_probs_RT: Tensor, attention_mask_RS: Tensor, prompt_lens_R: Tensor
) -> tuple[Tensor, Tensor]:
    """(log_probs_R, lengths_R): sum of the completion's log-probabilities and its number of tokens,
    for each row.

    An empty completion has log-probability 0 and length 0.
    """
    mask_RT = completion_mask(attention_mask_RS, prompt_lens_R)
    name = "per-token log-probabilities (one column fewer than the attention mask)"
    check_mask(log_probs_RT, mask_RT, name)
    return select(log_probs_RT, mask_RT).sum(-1), mask_RT.sum(-1)


def pair_accuracy(margins_P: Tensor) -> Tensor:
    """(P,): 1 for a pair whose chosen answer has the higher reward, 0 for the other way round, 0.5
    for a tie.

    A policy that equals its reference ties everywhere: it knows nothing, which is 0.5. (ROLL and
    TRL say 0.)
    """
    return (margins_P > 0).float() + 0.5 * (margins_P == 0).float()


@dataclass(frozen=True)
class Pairs:
    """What a variant sees: log-ratios to the reference of chosen and rejected answers, (P,), and
    the settings."""

    chosen: Tensor
    rejected: Tensor
    policy_margin: Tensor  # log p(chosen) - log p(rejected) of the policy
    reference_margin: Tensor  # and of the reference
    chosen_mean: Tensor | None  # log-ratios divided by the number of tokens, if lengths are known
    rejected_mean: Tensor | None
    beta: float
    label_smoothing: float
    discopop_tau: float

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def mean_margin(self) -> Tensor:
        if self.chosen_mean is None or self.rejected_mean is None:
            raise ValueError(
                "this loss type averages over tokens: it needs the lengths of the completions"
            )
        return self.chosen_mean - self.rejected_mean

    def smoothed_logistic(self, margin: Tensor) -> Tensor:
        """-log sigmoid(beta margin), with probability `label_smoothing` that the label is
        flipped."""
        right, wrong = F.logsigmoid(self.beta * margin), F.logsigmoid(-self.beta * margin)
        return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong


def _exo_pair(pairs: Pairs) -> Tensor:
    if pairs.label_smoothing == 0:
        raise ValueError(
            "loss type 'exo_pair' needs label_smoothing > 0 (it takes its logarithm); try 1e-3"
        )
    z = pairs.beta * pairs.margin
    log_right, log_wrong = math.log1p(-pairs.label_smoothing), math.log(pairs.label_smoothing)
    right, wrong = F.logsigmoid(z), F.logsigmoid(-z)
    return right.exp() * (right - log_right) + wrong.exp() * (wrong - log_wrong)


def _robust(pairs: Pairs) -> Tensor:
    z, flip = pairs.beta * pairs.margin, pairs.label_smoothing
    return (-(1 - flip) * F.logsigmoid(z) + flip * F.logsigmoid(-z)) / (1 - 2 * flip)


def _nca_pair(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _discopop(pairs: Pairs) -> Tensor:
    z = pairs.beta * pairs.margin
    # k exp(-z) with k = sigmoid(z / tau): one exponent, because exp(-z) alone overflows where k
    # vanishes.
    blended = torch.exp(F.logsigmoid(z / pairs.discopop_tau) - z)
    return torch.sigmoid(-z / pairs.discopop_tau) * -F.logsigmoid(z) + blended


# With d = chosen - rejected, the margin of the log-ratios, and s the label smoothing:
PREFERENCE_LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    # DPO (arXiv:2305.18290); s > 0: conservative DPO
    "sigmoid": lambda p: p.smoothed_logistic(p.margin),
    # DPO on log-ratios per token
    "sigmoid_norm": lambda p: -F.logsigmoid(p.beta * p.mean_margin),
    # IPO (arXiv:2310.12036) on summed log-probabilities: ROLL's `ipo: true`
    "ipo_sum": lambda p: (p.margin - 1 / (2 * p.beta)).square(),
    # IPO on log-ratios per token, as its authors recommend
    "ipo": lambda p: (p.mean_margin - 1 / (2 * p.beta)).square(),
    # SLiC (arXiv:2305.10425)
    "hinge": lambda p: F.relu(1 - p.beta * p.margin),
    # unbiased under label noise s (arXiv:2403.00409)
    "robust": _robust,
    # reverse KL to the smoothed labels (arXiv:2402.00856)
    "exo_pair": _exo_pair,
    # arXiv:2402.05369
    "nca_pair": _nca_pair,
    # binary classifier (arXiv:2404.04656), without its running baseline
    "bco_pair": lambda p: -F.logsigmoid(p.beta * p.chosen) - F.logsigmoid(-p.beta * p.rejected),
    # arXiv:2405.00675
    "sppo_hard": lambda p: (
        (p.chosen - 0.5 / p.beta).square() + (p.rejected + 0.5 / p.beta).square()
    ),
    # arXiv:2408.06266: chosen up, rejected down
    "apo_zero": lambda p: torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    # both down, rejected further
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.beta * p.margin),
    # arXiv:2406.05882: sorts the margins, so it depends on which pairs share a micro-batch
    "aot": lambda p: p.smoothed_logistic(
        p.policy_margin.sort().values - p.reference_margin.sort().values
    ),
    # the same for unpaired answers
    "aot_unpaired": lambda p: p.smoothed_logistic(
        p.chosen.sort().values - p.rejected.sort().values
    ),
    # arXiv:2406.08414
    "discopop": _discopop,
}
# The others ignore label smoothing.
SMOOTHED_LOSSES = frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"})


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of the batch and, for each pair and without gradient, what it came from. All (P,)
    but `loss`."""

    loss: Tensor
    losses_P: Tensor
    chosen_rewards_P: Tensor  # beta (log p - log p_ref)
    rejected_rewards_P: Tensor


def preference_loss(
    *,
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    reference_chosen_P: Tensor | None,
    reference_rejected_P: Tensor | None,
    chosen_lens_P: Tensor | None = None,
    rejected_lens_P: Tensor | None = None,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    num_pairs: Count | None = None,
) -> PreferenceLoss:
    """Sum of the pairs' losses divided by `num_pairs`, the pairs of the whole step (default: of
    this batch).

    The inputs are summed log-probabilities of the completions, (P,); `ipo` and `sigmoid_norm` also
    need their lengths in tokens. References None means reference-free: a reference that gives every
    answer log-probability 0.
    """
    if loss_type not in PREFERENCE_LOSSES:
        raise ValueError(
            f"unknown preference loss {loss_type!r}; known: {', '.join(PREFERENCE_LOSSES)}"
        )
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    if not discopop_tau > 0:
        raise ValueError(f"discopop_tau must be positive, got {discopop_tau}")
    policy_chosen_P, policy_rejected_P = _float(policy_chosen_P), _float(policy_rejected_P)
    if reference_chosen_P is None:
        reference_chosen_P = torch.zeros_like(policy_chosen_P)
    if reference_rejected_P is None:
        reference_rejected_P = torch.zeros_like(policy_rejected_P)
    given = (policy_chosen_P, policy_rejected_P, reference_chosen_P, reference_rejected_P)
    shapes = [tuple(tensor.shape) for tensor in given]
    if len(set(shapes)) > 1:
        raise ValueError(
            "policy and reference, chosen and rejected, must have one log-probability per pair: "
            f"{shapes}"
        )
    chosen_P = policy_chosen_P - reference_chosen_P
    rejected_P = policy_rejected_P - reference_rejected_P
    chosen_mean = rejected_mean = None
    if chosen_lens_P is not None and rejected_lens_P is not None:
        # An empty completion has length 0 and log-ratio 0.
        chosen_mean = chosen_P / chosen_lens_P.clamp(min=1)
        rejected_mean = rejected_P / rejected_lens_P.clamp(min=1)
    pairs = Pairs(
        chosen=chosen_P,
        rejected=rejected_P,
        policy_margin=policy_chosen_P - policy_rejected_P,
        reference_margin=_float(reference_chosen_P - reference_rejected_P),
        chosen_mean=chosen_mean,
        rejected_mean=rejected_mean,
        beta=beta,
        label_smoothing=label_smoothing,
        discopop_tau=discopop_tau,
    )
    losses_P = PREFERENCE_LOSSES[loss_type](pairs)
    return PreferenceLoss(
        loss=losses_P.sum() / at_least_one(len(losses_P) if num_pairs is None else num_pairs),
        losses_P=losses_P.detach(),
        chosen_rewards_P=beta * chosen_P.detach(),
        rejected_rewards_P=beta * rejected_P.detach(),
    )


def _float(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
