"""What the health panel says about made-up runs."""

import math
from pathlib import Path

import pytest
from synthetic_run import write_run

from roll.viewer import health
from roll.viewer.health import RULES, Finding, check, quarters, spikes
from roll.viewer.report import build_report
from roll.viewer.run_data import RunData, read_run
from roll.viewer.samples import StepStats, read_step


def run_with(**metrics: list[float | None]) -> RunData:
    """A run whose metrics are named with __ for /."""
    named = {name.replace("__", "/"): values for name, values in metrics.items()}
    steps = list(range(len(next(iter(named.values()), []))))
    return RunData(Path("run"), "run", {"status": "finished"}, steps=steps, metrics=named)


def only(findings: list[Finding] | None) -> Finding:
    assert findings is not None and len(findings) == 1, findings
    return findings[0]


def train(step: int, **facts: object) -> StepStats:
    return StepStats(step, "train", **facts)  # type: ignore[arg-type]


def test_spikes_and_quarters() -> None:
    series = [(i, 1.0 + 0.01 * (i % 3)) for i in range(20)]
    assert spikes(series) == []
    assert spikes([*series, (20, 30.0), (21, 1.0)]) == [(20, 30.0)]
    assert spikes([(0, 100.0), *series]) == [], "the start has no past to compare with"
    assert spikes([*series, (20, 30.0)], at_least=50.0) == []
    assert quarters([(i, float(i)) for i in range(8)]) == (0.5, 6.5)
    assert quarters([(0, 3.0)]) == (3.0, 3.0)


def test_ratio_off_one_names_the_worst_step() -> None:
    found = only(health.ratio_off_one(run_with(actor__ratio_mean=[1.0, 1.02, 1.8, 0.99]), []))
    assert (found.severity, found.step, found.metric) == ("bad", 2, "actor/ratio_mean")
    assert "1.8" in found.detail and "in 1 of 4 steps" in found.detail
    assert only(health.ratio_off_one(run_with(actor__ratio_mean=[1.0, 0.9]), [])).severity == "warn"
    assert health.ratio_off_one(run_with(actor__ratio_mean=[1.0, 1.04]), []) == []
    assert health.ratio_off_one(run_with(other=[1.0]), []) is None


def test_the_gap_of_samples_and_of_metrics_where_no_samples_tell() -> None:
    stats = [train(i, gap=0.01 * 1.3**i) for i in range(12)]
    found = only(health.gap_growing(run_with(), stats))
    assert found.title == "The log-prob gap is growing" and found.step == 11 and found.samples
    assert health.gap_growing(run_with(), [train(i, gap=0.01) for i in range(12)]) == []
    assert health.gap_growing(run_with(), []) is None
    large = only(health.gap_growing(run_with(), [train(i, gap=0.2) for i in range(12)]))
    assert (large.title, large.severity) == ("The log-prob gap is large", "warn")
    metric = run_with(actor__sampling_gap=[0.01] * 9 + [0.5] * 9)
    assert only(health.gap_growing(metric, [])).metric == "actor/sampling_gap"
    ratio = run_with(actor__train_infer_ratio_token_mean=[1.0] * 4 + [0.6] * 4)
    assert only(health.gap_growing(ratio, [])).step == 4


def test_groups_without_signal() -> None:
    stats = [train(i, groups=10, flat_groups=9, score=0.1) for i in range(4)]
    found = only(health.flat_groups(run_with(), stats))
    assert found.severity == "warn" and "90%" in found.detail
    flat = run_with(critic__zero_std_group_frac=[0.1, 0.9, 0.9, 0.9])
    easy = only(health.flat_groups(flat, [train(0, score=0.95)]))
    assert easy.severity == "info" and "too easy" in easy.detail
    once = run_with(critic__zero_std_group_frac=[0.1, 1.0, 0.1, 0.1])
    assert only(health.flat_groups(once, [])).step == 1
    assert health.flat_groups(run_with(critic__zero_std_group_frac=[0.2, 0.3]), []) == []


def test_truncation() -> None:
    stats = [train(i, finished=10, truncated=6 if i == 3 else 2) for i in range(8)]
    found = only(health.truncation(run_with(), stats))
    assert found.step == 3 and "60%" in found.detail and found.severity == "warn"
    assert health.truncation(run_with(), [train(0, finished=10, truncated=1)]) == []
    assert health.truncation(run_with(), [train(0)]) is None


def test_spikes_of_kl_and_gradient_norm() -> None:
    calm = [0.5 + 0.001 * (i % 5) for i in range(20)]
    run = run_with(actor__grad_norm=[*calm, 40.0, 0.5], critic__kl=[*calm, 0.5, 0.5])
    assert only(RULES["Gradient norm without jumps"](run, [])).step == 20
    assert RULES["KL without jumps"](run, []) == []
    assert RULES["KL without jumps"](run_with(other=[1.0]), []) is None


def test_reward_parts_that_never_vary() -> None:
    parts = {"format": (8, 1.0, 1.0, 1.0), "answer": (8, 0.0, 1.0, 0.5)}
    found = only(health.constant_parts(run_with(), [train(i, parts=parts) for i in range(3)]))
    assert "'format' never varies" in found.title and "all 24 samples" in found.detail
    few = [train(0, parts={"x": (4, 1.0, 1.0, 1.0)})]
    assert health.constant_parts(run_with(), few) == [], "too few to tell"
    assert health.constant_parts(run_with(), [train(0)]) is None


def test_numbers_that_are_not_finite() -> None:
    run = run_with(a=[1.0, 2.0, math.inf], b=[1.0, math.nan, math.nan], c=[1.0, None, 2.0])
    found = only(health.nan_metrics(run, []))
    assert found.title == "b is not a number at step 1" and found.severity == "bad"
    assert "3 logged values" in found.detail
    assert health.nan_metrics(run_with(c=[1.0, None]), []) == []
    odd = [train(4, odd={"advantages": 2}), train(5, odd={"advantages": 1})]
    assert only(health.nan_metrics(run_with(c=[1.0]), odd)).step == 4


def test_skipped_steps() -> None:
    once = run_with(actor__skipped_steps=[0.0] * 10 + [1.0] + [0.0] * 10)
    found = only(health.skipped(once, []))
    assert found.title == "Step 10 was skipped" and found.severity == "warn"
    often = run_with(mask__final_mask_sum_eq_0=[1.0, 1.0, 0.0, 0.0])
    assert only(health.skipped(often, [])).severity == "bad"
    gap = run_with(a=[1.0, 1.0, 1.0])
    gap.steps = [0, 1, 5]
    assert "between step 1 and step 5" in only(health.skipped(gap, [])).detail
    gap.steps = [0, 5, 10]
    assert health.skipped(gap, []) == [], "logged every fifth step"


def test_a_score_that_falls_and_entropy_that_dies() -> None:
    fall = [0.1] * 5 + [0.8] * 5 + [0.2] * 10
    assert only(health.score_falls(run_with(critic__score__mean=fall), [])).step is not None
    assert health.score_falls(run_with(critic__score__mean=[0.1 * i for i in range(10)]), []) == []
    dying = [2.0, 2.0, 1.0, 0.5, 0.2, 0.05, 0.01, 0.01]
    assert only(health.entropy_collapse(run_with(critic__entropy__mean=dying), [])).step == 5


def test_many_discarded_samples() -> None:
    stats = [train(0, samples=10), train(1, samples=10, dropped={"timeout": 6})]
    found = only(health.dropped(run_with(), stats))
    assert found.step == 1 and "timeout" in found.detail
    assert health.dropped(run_with(), [train(0, samples=10, dropped={"x": 1})]) == []


@pytest.mark.parametrize(("state", "severity"), [("failed", "bad"), ("stopped", "info")])
def test_how_the_run_ended(state: str, severity: str) -> None:
    run = run_with(a=[1.0])
    run.info = {"status": state}
    assert only(health.status(run, [])).severity == severity


def test_a_healthy_run_is_called_healthy_and_a_sick_one_sick(tmp_path: Path) -> None:
    verdicts = {}
    for name, sick in (("well", False), ("ill", True)):
        run = read_run(write_run(tmp_path / name, sick=sick))
        stats = [read_step(file, run.problem).stats for file in run.rollouts]
        verdicts[name] = {item.name: item.verdict for item in check(run, stats)}
    assert set(verdicts["well"].values()) == {"ok"}
    well = {"The run ended well", "The score holds", "Entropy stays alive"}
    well.add("Few samples are discarded")
    assert {name for name, verdict in verdicts["ill"].items() if verdict == "ok"} == well


def test_an_empty_run_has_nothing_to_judge_by(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert {item.verdict for item in check(read_run(tmp_path), [])} == {"not measured"}
    assert build_report([tmp_path]).is_file()
