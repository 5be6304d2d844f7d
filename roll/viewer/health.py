"""What looks wrong in a run, in words, with the step to look at.

Each rule looks at one thing and answers with findings, an empty list if all is well, or None if the
run holds nothing to judge by. `check(run, stats)` asks all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from roll.viewer.run_data import RunData
from roll.viewer.samples import StepStats


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong.

    `severity`: "bad" if numbers cannot be trusted or the run is broken; "warn": look at it; "info".
    `detail`: what was seen, why it matters and what to try. `samples`: whether the samples of
    `step` show it, rather than the curve.
    """

    severity: str
    title: str
    detail: str
    step: int | None = None
    metric: str | None = None
    samples: bool = False


@dataclass(frozen=True)
class Check:
    """What came of one rule: `verdict` is "ok", "found" or "not measured"."""

    name: str
    verdict: str
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


def metric_series(run: RunData, name: str) -> Series:
    """(step, value) where the metric was logged and finite."""
    values = zip(run.steps, run.metrics.get(name, []), strict=False)
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def first_metric(run: RunData, *names: str) -> tuple[str, Series] | None:
    """The first of these metrics that was logged; also behind a domain (`math/critic/kl`)."""
    for name in names:
        for key in run.metrics:
            if (key == name or key.endswith(f"/{name}")) and not key.startswith("val/"):
                series = metric_series(run, key)
                if series:
                    return key, series
    return None


def spikes(series: Series, *, at_least: float = 0.0) -> Series:
    """Points that stand far above the 20 points before them: more than 5 times their median, ten
    typical deviations above it, and twice their largest. The first 8 have no past to compare."""
    found = []
    for i in range(8, len(series)):
        past = [value for _, value in series[max(0, i - 20) : i]]
        middle = median(past)
        deviation = median(abs(value - middle) for value in past)
        step, value = series[i]
        if value > max(5 * abs(middle), middle + 10 * deviation, 2 * max(past), at_least):
            found.append((step, value))
    return found


def quarters(series: Series) -> tuple[float, float]:
    """The means of the first and of the last quarter."""
    size = max(1, len(series) // 4)
    first, last = series[:size], series[-size:]
    return sum(v for _, v in first) / size, sum(v for _, v in last) / size


def status(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    state = run.info.get("status")
    last = run.steps[-1] if run.steps else None
    if state == "failed":
        why = str(run.info.get("error") or "The last lines of its log say why.")
        return [Finding("bad", "The run failed", why, last)]
    if state == "stopped":
        how = "It can be resumed from its last checkpoint."
        return [Finding("info", "The run was stopped before its end", how, last)]
    return [] if state == "finished" else None


def nan_metrics(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    found = []
    for name, values in run.metrics.items():
        points = zip(run.steps, values, strict=True)
        odd = [step for step, v in points if v is not None and not math.isfinite(v)]
        if odd:
            found.append((odd[0], name, len(odd)))
    findings = []
    if found:
        step, name, _ = min(found)
        others = f", and {len(found) - 1} more metrics later" if len(found) > 1 else ""
        times = sum(count for _, _, count in found)
        detail = (
            f"{times} logged value{'s are' if times > 1 else ' is'} NaN or infinite: first "
            f"{name}{others}. From there on weights may be broken. Look at the learning rate, the "
            "gradient norm before it, and rewards that are not finite."
        )
        title = f"{name} is not a number at step {step}"
        findings.append(Finding("bad", title, detail, step, name))
    for item in stats:
        if item.odd:
            count, columns = sum(item.odd.values()), ", ".join(item.odd)
            detail = (
                f"{count} trained or generated tokens of step {item.step} have a {columns} that "
                "is NaN or infinite."
            )
            title = f"Tokens without a finite number at step {item.step}"
            findings.append(Finding("bad", title, detail, item.step, samples=True))
            break
    return findings if run.metrics or stats else None


def skipped(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    findings = []
    reasons = {
        "skipped_steps": "its gradient was not finite",
        "final_mask_sum_eq_0": "no token was left to train on",
    }
    for name in run.metrics:
        why = [reason for ending, reason in reasons.items() if name.endswith(ending)]
        hit = [step for step, value in metric_series(run, name) if value > 0]
        if why and hit:
            detail = f"{len(hit)} of {len(run.steps)} steps changed nothing, because {why[0]}."
            title = f"{len(hit)} steps were skipped"
            if len(hit) == 1:
                title = f"Step {hit[0]} was skipped"
            severity = "bad" if len(hit) > max(1, len(run.steps) // 10) else "warn"
            findings.append(Finding(severity, title, detail, hit[0], name))
    pairs = list(zip(run.steps, run.steps[1:], strict=False))
    gaps = [(a, b) for a, b in pairs if b - a > 1]
    if gaps and len({b - a for a, b in pairs}) > 1:  # otherwise every nth step is logged
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
        f"The mean ratio of new to old probability is {worst:.3g} at step {step}, and off by more "
        f"than 5% in {many} of {len(series)} steps. Near 1 the update is on the data that was "
        "sampled; far from it the clip throws gradients away. Fewer passes over a batch, a smaller "
        "learning rate or fresher samples bring it back."
    )
    severity = "bad" if off > 0.5 else "warn"
    return [Finding(severity, "The policy ratio is off 1", detail, step, name)]


def gap_growing(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    trained = [item for item in stats if item.split == "train"]
    series = [(item.step, item.gap) for item in trained if item.gap is not None]
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
        neutral = 1 if "ratio" in name else 0
        series = [(step, abs(value - neutral)) for step, value in raw]
    step, worst = max(series, key=lambda point: point[1])
    first, last = quarters(series)
    grows = len(series) >= 4 and last > 2 * first and last > 0.02
    if not grows and worst <= 0.1:
        return []
    how, title = f"reaches {worst:.2g}", "The log-prob gap is large"
    if grows:
        how, title = f"grew from {first:.2g} to {last:.2g}", "The log-prob gap is growing"
    detail = (
        f"The trainer and the sampler disagree about the same tokens: the mean gap of their "
        f"log-probs {how}. The gradient is then taken for a policy that did not produce the data. "
        "Check that weights reach the sampler, precision, and sampling settings such as top-p; the "
        "train/infer correction limits the damage."
    )
    severity = "bad" if max(worst, last) > 0.3 else "warn"
    return [Finding(severity, title, detail, step, name, samples=name is None)]


def flat_groups(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    known = first_metric(run, "critic/zero_std_group_frac")
    if known is not None:  # of all groups, not only of those whose samples are kept
        name, series = known
    else:
        name, series = None, []
        for item in stats:
            if item.groups and item.split == "train":
                series.append((item.step, item.flat_groups / item.groups))
    if not series:
        return None
    _, late = quarters(series)
    step, worst = max(series, key=lambda point: point[1])
    if late <= 0.7 and worst < 0.999:
        return []
    if late <= 0.7:
        detail = f"At step {step} every group had equal scores, so that step taught nothing."
        return [Finding("info", "One step without any signal", detail, step, name, samples=True)]
    score = next((item.score for item in reversed(stats) if item.score is not None), None)
    severity = "warn"
    advice = "The tasks may be too hard or too easy; more samples per prompt or other tasks help."
    if score is not None and score > 0.8:
        severity = "info"
        advice = "The tasks have become too easy: harder ones would teach more."
    detail = (
        f"In {late:.0%} of the groups of the last quarter all answers got the same score, so they "
        f"give no gradient. {advice}"
    )
    return [Finding(severity, "Most groups carry no signal", detail, step, name, samples=True)]


def truncation(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    finished = [item for item in stats if item.finished and item.split == "train"]
    name, series = None, [(item.step, item.truncated / item.finished) for item in finished]
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
        f"{late:.0%} of the answers of the last quarter, and {worst:.0%} at step {step}, ended "
        "because they hit the length limit. Their score says little about them. Raise the response "
        "length, or mask such answers."
    )
    severity = "bad" if late > 0.5 else "warn"
    return [Finding(severity, "Answers are cut off", detail, step, name, samples=name is None)]


def spike_rule(what: str, advice: str, floor: float, *stems: str) -> Rule:
    """A rule for sudden jumps of the metrics whose last part is one of `stems`."""

    def rule(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
        names = [name for name in run.metrics if name.rpartition("/")[2] in stems]
        names = [name for name in names if not name.startswith("val/")]
        findings = []
        for name in names:
            found = spikes(metric_series(run, name), at_least=floor)
            if found:
                step, value = max(found, key=lambda point: point[1])
                times = "once" if len(found) == 1 else f"{len(found)} times"
                detail = (
                    f"{name} jumped {times} far above what it was before; at step {step} to "
                    f"{value:.3g}. {advice}"
                )
                title = f"{what} jumps to {value:.3g} at step {step}"
                findings.append(Finding("warn", title, detail, step, name))
        return findings if names else None

    return rule


def constant_parts(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    seen: dict[str, list[tuple[int, float, float, float]]] = {}
    for item in stats:
        for name, part in item.parts.items():
            seen.setdefault(name, []).append(part)
    findings = []
    for name, parts in seen.items():
        count = sum(number for number, *_ in parts)
        lowest = min(low for _, low, _, _ in parts)
        if count < 8 or lowest != max(high for _, _, high, _ in parts):
            continue
        detail = (
            f"It is {lowest:g} in all {count} samples, so it teaches nothing. Either every answer "
            "deserves it, or the function that computes it does not see what it should."
        )
        title = f"The reward part {name!r} never varies"
        findings.append(Finding("warn", title, detail, stats[-1].step, samples=True))
    return findings if seen else None


def score_falls(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    known = first_metric(run, "critic/score/mean", "rollout/score/mean", "critic/rewards/mean")
    if known is None or len(known[1]) < 8:
        return None
    name, series = known
    size = max(2, len(series) // 8)
    means = []
    for i in range(len(series) - size + 1):
        means.append((series[i + size - 1][0], sum(v for _, v in series[i : i + size]) / size))
    best_step, best = max(means, key=lambda point: point[1])
    start, end = means[0][1], means[-1][1]
    fall = best - end
    if best <= start or fall <= 0.5 * (best - start) or fall <= 0.05 * max(1.0, abs(best)):
        return []
    detail = (
        f"It rose to {best:.3g} around step {best_step} and is back at {end:.3g}. Compare samples "
        "of both times."
    )
    return [Finding("warn", "The score fell after its best", detail, best_step, name)]


def entropy_collapse(run: RunData, stats: Sequence[StepStats]) -> list[Finding] | None:
    known = first_metric(run, "critic/entropy/mean", "actor/entropy")
    if known is None or len(known[1]) < 8:
        return None
    name, series = known
    first, last = quarters(series)
    if first <= 0 or last >= 0.05 * first:
        return []
    step = next(step for step, value in series if value < 0.05 * first)
    detail = (
        f"It fell from {first:.2g} to {last:.2g}: the model gives the same answer every time and "
        "stops exploring."
    )
    return [Finding("warn", "Entropy has collapsed", detail, step, name)]


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
    detail = (
        f"{lost} of {total} logged samples were not trained on; most often: {reason} "
        f"({reasons[reason]})."
    )
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
        *("kl", "kl_loss", "approxkl", "policykl"),
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
