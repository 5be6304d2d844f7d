"""What looks wrong in a run, in words, with the step to look at. Pure functions of metrics and sample statistics.

Each rule looks at one thing and answers with findings, an empty list if all is well, or None if the run holds nothing
to judge by. `check(run, stats)` asks all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from roll.viewer.run_data import RunData
from roll.viewer.samples import StepStats

SEVERITIES = ("bad", "warn", "info")


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong."""

    severity: str
    """"bad": numbers cannot be trusted or the run is broken; "warn": look at it; "info": good to know."""

    title: str
    detail: str
    """What was seen, why it matters and what to try."""

    step: int | None = None
    metric: str | None = None
    samples: bool = False
    """Whether the samples of `step` show it, rather than the curve."""


@dataclass(frozen=True)
class Check:
    """What came of one rule."""

    name: str
    verdict: str
    """"ok", "found" or "not measured"."""

    findings: list[Finding]


Series = list[tuple[int, float]]
Rule = Callable[[RunData, Sequence[StepStats]], list[Finding] | None]


def check(run: RunData, stats: Sequence[StepStats]) -> list[Check]:
    """All rules, in the order in which a person should worry."""
    checks = []
    for name, rule in RULES.items():
        findings = rule(run, stats)
        verdict = "not measured" if findings is None else "found" if findings else "ok"
        checks.append(Check(name, verdict, findings or []))
    return checks


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(item) for item in checks]


def metric_series(run: RunData, name: str) -> Series:
    """(step, value) where the metric was logged and finite."""
    values = zip(run.steps, run.metrics.get(name, []), strict=False)
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def first_metric(run: RunData, *names: str) -> tuple[str, Series] | None:
    """The first of these metrics that was logged; names also match behind a domain (`math/critic/kl`)."""
    for name in names:
        for key in run.metrics:
            if (
                (key == name or key.endswith(f"/{name}"))
                and not key.startswith("val/")
                and (series := metric_series(run, key))
            ):
                return key, series
    return None


def spikes(
    series: Series, *, factor: float = 5.0, window: int = 20, at_least: float = 0.0
) -> Series:
    """Points that stand far above the `window` points before them: more than `factor` times their median, ten typical
    deviations above it, and twice their largest. The first eight points have no past to compare with."""
    found = []
    for i in range(8, len(series)):
        past = [value for _, value in series[max(0, i - window) : i]]
        middle = median(past)
        deviation = median(abs(value - middle) for value in past)
        step, value = series[i]
        if value > max(factor * abs(middle), middle + 10 * deviation, 2 * max(past), at_least):
            found.append((step, value))
    return found


def quarters(series: Series) -> tuple[float, float]:
    """The means of the first and of the last quarter."""
    size = max(1, len(series) // 4)
    first, last = series[:size], series[-size:]
    return sum(v for _, v in first) / size, sum(v for _, v in last) / size


def status(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    state = run.info.get("status")
    if state == "failed":
        why = str(run.info.get("error") or "The last lines of its log say why.")
        return [Finding("bad", "The run failed", why, run.steps[-1] if run.steps else None)]
    if state == "stopped":
        last = run.steps[-1] if run.steps else None
        return [
            Finding(
                "info",
                "The run was stopped before its end",
                "It can be resumed from its last checkpoint.",
                last,
            )
        ]
    return [] if state == "finished" else None


def nan_metrics(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    found = []
    for name, values in run.metrics.items():
        odd = [
            step
            for step, v in zip(run.steps, values, strict=True)
            if v is not None and not math.isfinite(v)
        ]
        if odd:
            found.append((odd[0], name, len(odd)))
    findings = []
    if found:
        step, name, _ = min(found)
        others = f", and {len(found) - 1} more metrics later" if len(found) > 1 else ""
        times = sum(count for _, _, count in found)
        findings.append(
            Finding(
                "bad",
                f"{name} is not a number at step {step}",
                f"{times} logged value{'s are' if times > 1 else ' is'} NaN or infinite: first {name}{others}. From "
                "there on weights may be broken."
                " Look at the learning rate, the gradient norm before it, and rewards that are not finite.",
                step,
                name,
            )
        )
    odd_tokens = [
        (item.step, sum(item.odd.values()), ", ".join(item.odd)) for item in stats if item.odd
    ]
    if odd_tokens:
        step, count, columns = odd_tokens[0]
        detail = f"{count} trained or generated tokens of step {step} have a {columns} that is NaN or infinite."
        findings.append(
            Finding(
                "bad", f"Tokens without a finite number at step {step}", detail, step, samples=True
            )
        )
    return findings if run.metrics or stats else None


def skipped(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    findings = []
    for name in run.metrics:
        if name.endswith(("skipped_steps", "final_mask_sum_eq_0")):
            hit = [(step, value) for step, value in metric_series(run, name) if value > 0]
            if hit:
                what = (
                    "its gradient was not finite"
                    if name.endswith("skipped_steps")
                    else "no token was left to train on"
                )
                detail = f"{len(hit)} of {len(run.steps)} steps changed nothing, because {what}."
                title = (
                    f"Step {hit[0][0]} was skipped"
                    if len(hit) == 1
                    else f"{len(hit)} steps were skipped"
                )
                severity = "bad" if len(hit) > max(1, len(run.steps) // 10) else "warn"
                findings.append(Finding(severity, title, detail, hit[0][0], name))
    gaps = [(a, b) for a, b in zip(run.steps, run.steps[1:], strict=False) if b - a > 1]
    regular = (
        len({b - a for a, b in zip(run.steps, run.steps[1:], strict=False)}) <= 1
    )  # logged every nth step
    if gaps and not regular:
        a, b = gaps[0]
        detail = f"Nothing was logged between step {a} and step {b} ({len(gaps)} such gaps)."
        findings.append(Finding("warn", "Steps are missing from the log", detail, a))
    return findings if run.steps else None


def ratio_off_one(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    known = first_metric(run, "actor/ratio_mean")
    if known is None:
        return None
    name, series = known
    step, worst = max(series, key=lambda point: abs(point[1] - 1))
    off = abs(worst - 1)
    if off <= 0.05:
        return []
    many = sum(abs(value - 1) > 0.05 for _, value in series)
    detail = (
        f"The mean ratio of new to old probability is {worst:.3g} at step {step}, and off by more than 5% in {many} of "
        f"{len(series)} steps. Near 1 the update is on the data that was sampled; far from it the clip throws "
        "gradients away. Fewer passes over a batch, a smaller learning rate or fresher samples bring it back."
    )
    return [
        Finding("bad" if off > 0.5 else "warn", "The policy ratio is off 1", detail, step, name)
    ]


def gap_growing(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    series = [
        (item.step, item.gap) for item in stats if item.gap is not None and item.split == "train"
    ]
    name = None
    if not series:
        known = first_metric(
            run,
            "actor/sampling_gap",
            "actor/train_infer_diff_token_mean",
            "actor/train_infer_ratio_token_mean",
        )
        if known is None:
            return None
        name, raw = known
        series = [(step, abs(value - 1) if "ratio" in name else abs(value)) for step, value in raw]
    step, worst = max(series, key=lambda point: point[1])
    first, last = quarters(series)
    grows = len(series) >= 4 and last > 2 * first and last > 0.02
    if not grows and worst <= 0.1:
        return []
    how = f"grew from {first:.2g} to {last:.2g}" if grows else f"reaches {worst:.2g}"
    detail = (
        f"The trainer and the sampler disagree about the same tokens: the mean gap of their log-probs {how}. "
        "The gradient is then taken for a policy that did not produce the data. Check that weights reach the sampler, "
        "precision, and sampling settings such as top-p; the train/infer correction limits the damage."
    )
    title = "The log-prob gap is growing" if grows else "The log-prob gap is large"
    return [
        Finding(
            "bad" if max(worst, last) > 0.3 else "warn",
            title,
            detail,
            step,
            name,
            samples=name is None,
        )
    ]


def flat_groups(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    series = [
        (item.step, item.flat_groups / item.groups)
        for item in stats
        if item.groups and item.split == "train"
    ]
    name = None
    if known := first_metric(
        run, "critic/zero_std_group_frac"
    ):  # of all groups, not only of those that were kept
        name, series = known
    if not series:
        return None
    _, late = quarters(series)
    step, worst = max(series, key=lambda point: point[1])
    if late <= 0.7 and worst < 0.999:
        return []
    score = next((item.score for item in reversed(stats) if item.score is not None), None)
    easy = score is not None and score > 0.8
    if late <= 0.7:
        detail = f"At step {step} every group had equal scores, so that step taught nothing."
        return [Finding("info", "One step without any signal", detail, step, name, samples=True)]
    detail = (
        f"In {late:.0%} of the groups of the last quarter all answers got the same score, so they give no gradient. "
        + ("The tasks have become too easy: harder ones would teach more." if easy else "")
        + (
            ""
            if easy
            else "The tasks may be too hard or too easy; more samples per prompt or other tasks help."
        )
    )
    return [
        Finding(
            "info" if easy else "warn",
            "Most groups carry no signal",
            detail,
            step,
            name,
            samples=True,
        )
    ]


def truncation(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    series = [
        (item.step, item.truncated / item.finished)
        for item in stats
        if item.finished and item.split == "train"
    ]
    name = None
    if not series:
        known = first_metric(run, "token/total_response_length/clip", "actor/max_len_mask_ratio")
        if known is None:
            return None
        name, series = known
    step, worst = max(series, key=lambda point: point[1])
    _, late = quarters(series)
    if late <= 0.1 and worst <= 0.3:
        return []
    detail = (
        f"{late:.0%} of the answers of the last quarter, and {worst:.0%} at step {step}, ended because they hit the "
        "length limit. Their score says little about them. Raise the response length, or mask such answers."
    )
    return [
        Finding(
            "bad" if late > 0.5 else "warn",
            "Answers are cut off",
            detail,
            step,
            name,
            samples=name is None,
        )
    ]


def spike_rule(what: str, advice: str, floor: float, *stems: str) -> Rule:
    """A rule for sudden jumps of the metrics whose last part is one of `stems`."""

    def rule(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
        names = [
            name
            for name in run.metrics
            if name.rpartition("/")[2] in stems and not name.startswith("val/")
        ]
        findings = []
        for name in names:
            found = spikes(metric_series(run, name), at_least=floor)
            if found:
                step, value = max(found, key=lambda point: point[1])
                times = "once" if len(found) == 1 else f"{len(found)} times"
                detail = f"{name} jumped {times} far above what it was before; at step {step} to {value:.3g}. {advice}"
                findings.append(
                    Finding(
                        "warn", f"{what} jumps to {value:.3g} at step {step}", detail, step, name
                    )
                )
        return findings if names else None

    return rule


def constant_parts(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    lowest: dict[str, float] = {}
    highest: dict[str, float] = {}
    count: dict[str, int] = {}
    for item in stats:
        for name, (number, low, high, _) in item.parts.items():
            lowest[name], highest[name] = (
                min(low, lowest.get(name, low)),
                max(high, highest.get(name, high)),
            )
            count[name] = count.get(name, 0) + number
    if not count:
        return None
    return [
        Finding(
            "warn",
            f"The reward part {name!r} never varies",
            f"It is {lowest[name]:g} in all {count[name]} samples, so it teaches nothing. Either every answer deserves "
            "it, or the function that computes it does not see what it should.",
            stats[-1].step,
            samples=True,
        )
        for name in count
        if count[name] >= 8 and lowest[name] == highest[name]
    ]


def score_falls(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    known = first_metric(run, "critic/score/mean", "rollout/score/mean", "critic/rewards/mean")
    if known is None or len(known[1]) < 8:
        return None
    name, series = known
    size = max(2, len(series) // 8)
    means = [
        (series[i + size - 1][0], sum(v for _, v in series[i : i + size]) / size)
        for i in range(len(series) - size + 1)
    ]
    best_step, best = max(means, key=lambda point: point[1])
    start, end = means[0][1], means[-1][1]
    if (
        best > start
        and best - end > 0.5 * (best - start)
        and best - end > 0.05 * max(1.0, abs(best))
    ):
        detail = f"It rose to {best:.3g} around step {best_step} and is back at {end:.3g}. Compare samples of both times."
        return [Finding("warn", "The score fell after its best", detail, best_step, name)]
    return []


def entropy_collapse(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    known = first_metric(run, "critic/entropy/mean", "actor/entropy")
    if known is None or len(known[1]) < 8:
        return None
    name, series = known
    first, last = quarters(series)
    if first > 0 and last < 0.05 * first:
        step = next(step for step, value in series if value < 0.05 * first)
        detail = f"It fell from {first:.2g} to {last:.2g}: the model gives the same answer every time and stops exploring."
        return [Finding("warn", "Entropy has collapsed", detail, step, name)]
    return []


def dropped(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    if not stats:
        return None
    reasons: dict[str, int] = {}
    for item in stats:
        for reason, number in item.dropped.items():
            reasons[reason] = reasons.get(reason, 0) + number
    total, lost = sum(item.samples for item in stats), sum(reasons.values())
    if lost <= 0.2 * total:
        return []
    reason = max(reasons, key=lambda key: reasons[key])
    step = max(stats, key=lambda item: sum(item.dropped.values()) / max(item.samples, 1)).step
    detail = f"{lost} of {total} logged samples were not trained on; most often: {reason} ({reasons[reason]})."
    return [Finding("warn", "Many samples are discarded", detail, step, samples=True)]


RULES: dict[str, Rule] = {
    "The run ended well": status,
    "Numbers are finite": nan_metrics,
    "No step was skipped": skipped,
    "Policy ratio near 1": ratio_off_one,
    "Trainer and sampler agree": gap_growing,
    "Groups carry signal": flat_groups,
    "Answers end by themselves": truncation,
    "KL without jumps": spike_rule(
        "KL",
        "The policy moved far in one step: look at the batch before it.",
        0.05,
        "kl",
        "kl_loss",
        "approxkl",
        "policykl",
    ),
    "Gradient norm without jumps": spike_rule(
        "The gradient norm",
        "Clipping limits it; if it comes back, lower the learning rate.",
        0.5,
        "grad_norm",
    ),
    "Reward parts vary": constant_parts,
    "The score holds": score_falls,
    "Entropy stays alive": entropy_collapse,
    "Few samples are discarded": dropped,
}
