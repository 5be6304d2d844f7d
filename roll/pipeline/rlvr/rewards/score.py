"""The outcome of scoring one sample; see `roll.utils.scoring.score`."""

from roll.utils.scoring.score import Score, dropped, reason_kind, to_score

__all__ = ["Score", "dropped", "reason_kind", "to_score"]
