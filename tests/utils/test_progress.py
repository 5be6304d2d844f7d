"""What a person sees of a run: lines in a file, a bar on a terminal, nothing when not asked."""

from roll.utils import progress
from roll.utils.progress import StepProgress, number


def test_numbers_are_short():
    values = (0.693147, 12.3456, 8120.4, -1234567.0, 0.0)
    assert [number(value) for value in values] == ["0.6931", "12.35", "8,120", "-1,234,567", "0"]


def test_lines_elsewhere_first_last_and_no_more_than_one_a_second(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with StepProgress(4, 0, {"loss": "actor/loss", "acc": "actor/acc"}) as shown:
        for done, seconds in ((1, 2.0), (2, 0.5), (3, 2.0), (4, 0.1)):
            clock[0] += seconds
            shown.update(done, {"actor/loss": 1 / done} | ({"actor/acc": 0.5} if done == 1 else {}))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "step 1/4  loss 1  acc 0.5",
        "step 3/4  loss 0.3333  acc 0.5  left 0:00:01",
        "step 4/4  loss 0.25  acc 0.5  left 0:00:00",
    ]


def time_left(seconds, total=1000, monkeypatch=None):
    """What is said to be left after steps that took these times."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with StepProgress(total, 0, {}, show=False) as shown:
        for done, duration in enumerate(seconds, start=1):
            clock[0] += duration
            shown.update(done, {})
        return shown.left()


def test_the_time_that_is_left_does_not_follow_from_the_first_step(monkeypatch):
    assert time_left([300.0], monkeypatch=monkeypatch) == ""
    assert time_left([300.0, 1.0, 1.0], total=103, monkeypatch=monkeypatch) == "  left 0:01:40"
    assert time_left([300.0], total=1, monkeypatch=monkeypatch) == "  left 0:00:00"


def test_a_stall_counts_little_and_a_validation_in_full(monkeypatch):
    validated = [9.0, *([1.0, 1.0, 1.0, 5.0] * 5)]
    assert time_left(validated, total=121, monkeypatch=monkeypatch) == "  left 0:03:20"
    stalled = [9.0, *([1.0] * 19), 600.0]
    assert time_left(stalled, total=121, monkeypatch=monkeypatch) == "  left 0:02:00"
    assert (
        time_left([*stalled, *([1.0] * 20)], total=141, monkeypatch=monkeypatch) == "  left 0:01:40"
    )


def test_nothing_when_nothing_is_wanted(capsys):
    with StepProgress(2, 0, {"loss": "loss"}, show=False) as shown:
        shown.update(1, {"loss": 1.0})
        shown.say("hello")
        shown.update(2, {"loss": 1.0})
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_bar_with_metrics_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with StepProgress(2, 1, {"loss": "loss"}) as shown:
        shown.say("above [the] bar")
        shown.update(2, {"loss": 0.25})
    text = capsys.readouterr().err
    assert "2/2" in text and "loss 0.25" in text and "above [the] bar" in text
