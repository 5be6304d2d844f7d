"""Policy losses of a token: what is done with its importance ratio. The only place that knows them
by name.

`pg_variant` in a config is a key of POLICY_LOSSES or the dotted path of a `Surrogate` in a module
of your own (docs/custom-loss.md). Configs read the table too, so this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from roll.algorithms.estimators import by_path

if TYPE_CHECKING:
    from torch import Tensor


class TokenTerms(NamedTuple):
    """What a surrogate is made of, each (B, T) and 0 (the ratio: 1) where masked."""

    log_probs_BT: Tensor
    log_ratio_BT: Tensor  # log p - log p_old of each token alone, within +-20
    ratio_BT: Tensor  # as `ratio_type` forms it
    advantages_BT: Tensor


class Surrogate(Protocol):
    """A loss for each token, and where the ratio was cut off.

    A class in POLICY_LOSSES is built from the worker's keys that its `config_keys` name, or by its
    `from_config(pipeline_config, worker_config)`.
    """

    # The ratio counts as out of range below `low` and above `high`; None: no such bound.
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor | None]:
        """(loss_BT, clipped_BT): the loss to minimise, and where a bound decided it (None:
        nowhere)."""
        ...


@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  (arXiv:1707.06347; unequal:
    arXiv:2503.14476).

    For A < 0 that has no upper bound; `dual_clip` = c > 1 limits it to -c A (arXiv:1912.09729). As
    in ROLL, the dual clip does not count as clipped.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    through_ratio: ClassVar[bool] = True  # the gradient goes through the ratio

    def __post_init__(self) -> None:
        _check_clip_range(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"the dual clip constant must be greater than 1, got {self.dual_clip}")

    @classmethod
    def from_config(cls, pipeline_config: Any, worker_config: Any) -> PPOClip:
        """`pg_clip_low`, `pg_clip_high` if `use_pg_clip_range`, else `pg_clip` for both. The dual
        clip is `dual_clip_c`, else ROLL's 1 + 2 pg_clip (1 + 2 pg_clip_high without `pg_clip`)."""
        config, clip = pipeline_config, pipeline_config.pg_clip
        if config.use_pg_clip_range:
            low, high = config.pg_clip_low, config.pg_clip_high
        elif clip is not None:
            low = high = clip
        else:
            raise ValueError(
                "pg_clip is None; set it, or set use_pg_clip_range with pg_clip_low and "
                "pg_clip_high"
            )
        dual_clip = None
        if config.dual_clip_loss:
            # Not a field of ROLL's configurations, so one written for them does not have it.
            dual_clip = getattr(config, "dual_clip_c", None)
            if dual_clip is None:
                dual_clip = 1 + 2 * (high if clip is None else clip)
        return cls(clip_low=low, clip_high=high, dual_clip=dual_clip)

    @property
    def low(self) -> float:
        return 1 - self.clip_low

    @property
    def high(self) -> float:
        return 1 + self.clip_high

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor | None]:
        ratio_BT, advantages_BT = terms.ratio_BT, terms.advantages_BT
        free_BT = ratio_BT * advantages_BT
        bounded_BT = ratio_BT.clamp(self.low, self.high) * advantages_BT
        clipped_BT = bounded_BT < free_BT
        loss_BT = -bounded_BT.where(clipped_BT, free_BT)
        if self.dual_clip is not None:
            # The bound is a constant of the policy: where it holds, the gradient is 0.
            limit_BT = -self.dual_clip * advantages_BT
            loss_BT = limit_BT.where((advantages_BT < 0) & (loss_BT > limit_BT), loss_BT)
        return loss_BT, clipped_BT


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """-A log p: no ratio at all."""

    low: None = None
    high: None = None

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor | None]:
        return -terms.advantages_BT * terms.log_probs_BT, None


@dataclass(frozen=True, kw_only=True)
class TruncatedIS:
    """TIS: -sg[clip(r, low, high)] A log p. The ratio is a weight, no gradient goes through it."""

    low: float = 0.0
    high: float = 1.0

    config_keys: ClassVar[dict[str, str]] = {"low": "tis_lower_bound", "high": "tis_upper_bound"}

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"TIS bounds must satisfy 0 <= low <= high, got low={self.low}, high={self.high}"
            )

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor | None]:
        weight_BT = terms.ratio_BT.detach().clamp(self.low, self.high)
        return -weight_BT * terms.advantages_BT * terms.log_probs_BT, weight_BT != terms.ratio_BT


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p (arXiv:2506.13585): a clipped token still
    learns.

    With `drop_clipped` the tokens that PPO would clip (A > 0 above the range, A < 0 below it) are
    left out.
    """

    clip_low: float = 0.1
    clip_high: float = 0.1
    drop_clipped: bool = False

    config_keys: ClassVar[dict[str, str]] = {
        "clip_low": "cispo_epsilon_low",
        "clip_high": "cispo_epsilon_high",
        "drop_clipped": "cispo_use_unified_mask",
    }

    def __post_init__(self) -> None:
        # clip_low = 1 means no lower bound, the setting of the paper.
        _check_clip_range(self.clip_low, self.clip_high, allow_no_lower_bound=True)

    @property
    def low(self) -> float:
        return 1 - self.clip_low

    @property
    def high(self) -> float:
        return 1 + self.clip_high

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor | None]:
        ratio_BT, advantages_BT = terms.ratio_BT.detach(), terms.advantages_BT
        weight_BT = ratio_BT.clamp(self.low, self.high)
        clipped_BT = weight_BT != ratio_BT
        if self.drop_clipped:
            too_high_BT = (advantages_BT > 0) & (ratio_BT > self.high)
            too_low_BT = (advantages_BT < 0) & (ratio_BT < self.low)
            weight_BT = weight_BT.masked_fill(too_high_BT | too_low_BT, 0.0)
        return -weight_BT * advantages_BT * terms.log_probs_BT, clipped_BT


@dataclass(frozen=True, kw_only=True)
class TOPR:
    """Tapered off-policy REINFORCE (arXiv:2503.14286): -A log p where A > 0, else -sg[min(r, 1)] A
    log p.

    Good behaviour is imitated however unlikely it has become; bad behaviour is pushed away only
    while it is likely. The sign of A, the reward after the baseline, separates the two, as in the
    paper (ROLL: the sign of the raw score).
    """

    positive_weight: float = 1.0
    negative_weight: float = 1.0
    low: None = None
    high: float = 1.0

    config_keys: ClassVar[dict[str, str]] = {
        "positive_weight": "topr_positive_weight",
        "negative_weight": "topr_negative_weight",
    }

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor | None]:
        negative_BT = terms.advantages_BT <= 0
        taper_BT = terms.ratio_BT.detach().clamp(max=self.high)
        weight_BT = (self.negative_weight * taper_BT).where(negative_BT, self.positive_weight)
        loss_BT = -weight_BT * terms.advantages_BT * terms.log_probs_BT
        return loss_BT, negative_BT & (terms.ratio_BT > self.high)


@dataclass(frozen=True, kw_only=True)
class KimiK15:
    """-A log p + tau/2 (log p - log p_old)^2 (arXiv:2501.12599, eq. 3): a square holds the policy.

    As in ROLL, the square is that of each token, whatever the ratio type: a mean over tokens would
    let opposite moves cancel, and the policy could go anywhere at no cost.
    """

    tau: float = 0.1
    low: None = None
    high: None = None

    config_keys: ClassVar[dict[str, str]] = {"tau": "kimi15_tau"}

    def __call__(self, terms: TokenTerms) -> tuple[Tensor, Tensor | None]:
        square_BT = 0.5 * self.tau * terms.log_ratio_BT.square()
        return -terms.advantages_BT * terms.log_probs_BT + square_BT, None


POLICY_LOSSES: dict[str, Any] = {
    "ppo": PPOClip,
    "vanilla": Reinforce,
    "tis": TruncatedIS,
    "topr": TOPR,
    "cispo": CISPO,
    "kimi15": KimiK15,
}


def get_policy_loss(name: str | None) -> Any:
    """The surrogate, or its class, called `name` or at that dotted path; None is PPO's."""
    if name is None:
        return PPOClip
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    problem = f"unknown pg_variant {name!r}; known: {', '.join(POLICY_LOSSES)}"
    found = by_path(name, problem)
    if not callable(found):
        raise ValueError(f"{problem}, and it is a {type(found).__name__}, not a surrogate")
    return found


def surrogate_of(pipeline_config: Any, worker_config: Any) -> Surrogate:
    """The surrogate that `worker_config.pg_variant` names: PPO's where it is None or not a
    field."""
    found = get_policy_loss(getattr(worker_config, "pg_variant", None))
    if not isinstance(found, type):
        return found
    if hasattr(found, "from_config"):
        return found.from_config(pipeline_config, worker_config)
    # ROLL reads these keys as options without declaring them, so a config may not have them.
    keys = getattr(found, "config_keys", {}).items()
    return found(
        **{
            argument: getattr(worker_config, key)
            for argument, key in keys
            if hasattr(worker_config, key)
        }
    )


def _check_clip_range(low: float, high: float, *, allow_no_lower_bound: bool = False) -> None:
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip bounds must not be negative, got low={low}, high={high}")
    if low > 1 or (low == 1 and not allow_no_lower_bound):
        raise ValueError(
            f"the lower clip bound must be below 1 (the ratio is clipped to 1 - low), got {low}"
        )
