"""The age of samples: when a group is too old, and what a step says of its own."""

from pathlib import Path

from roll.pipeline.staleness import is_stale, staleness_metrics


def test_the_oldest_token_of_a_group_counts():
    assert not is_stale([[4, 5], [4]], step=5, max_staleness=1)
    assert is_stale([[4, 5], [3, 5]], step=5, max_staleness=1)
    assert not is_stale([[3]], step=5, max_staleness=2)


def test_metrics_by_hand():
    samples = [[3, 3, 5], [5], {4}, {4, 5}]
    assert staleness_metrics(samples, step=5, num_dropped=2) == {
        "rollout/dropped/stale": 2.0,
        "rollout/staleness/mean": 1.0,  # (2 + 0 + 1 + 1) / 4
        "rollout/staleness/max": 2.0,
        "scheduler/off_policy_ratio": 0.75,
        "rollout/mixed_version_samples": 2.0,
    }
    assert staleness_metrics([], step=5, num_dropped=3) == {"rollout/dropped/stale": 3.0}


def test_both_pages_state_the_rule_in_the_same_words():
    docs = Path(__file__).parents[2] / "docs"
    rules = set()
    for page in ("rlvr.md", "agentic.md"):
        text = (docs / page).read_text(encoding="utf-8")
        start, end = text.index("Staleness is the step that trains"), text.index("and replaced. ")
        rules.add(text[start:end])
    assert len(rules) == 1 and "`rollout/dropped/stale`" in rules.pop()
