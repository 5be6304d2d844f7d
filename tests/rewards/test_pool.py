"""Pools of score processes: every way to misbehave costs one sample, and no process is left."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from process_checks import children, eventually, marked, running

from roll.exceptions import ConfigError, RollError
from roll.rewards.pool import ScorePool, check_reward_fn

FILE = Path(__file__).with_name("score_functions.py")
GOOD = {"prompt": "1+1", "response": "2", "ground_truth": "2"}
BAD = {"prompt": "1+1", "response": "3", "ground_truth": "2"}


def make_pool(name: str = "score", **options) -> ScorePool:
    options = {"num_processes": 2, "timeout_s": 60.0, "memory_mb": 300, **options}
    return ScorePool(f"{FILE}:{name}", **options)


def values(scores) -> list[float | None]:
    return [score.value for score in scores]


@pytest.fixture(scope="module")
def pool():
    with make_pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty_pool():
    """Waits longer than a busy machine holds up a row that does nothing, and no longer."""
    with make_pool(timeout_s=2.0) as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left():
    before = set(children())  # of other tests: torch, for one, keeps processes for compiling
    yield
    assert eventually(lambda: set(children()) <= before and not marked("score-daemon"))


def outcome(pool: ScorePool, prompt: str):
    """What became of one odd row between ordinary ones, which have to be scored as ever."""
    scores = pool.score([GOOD, BAD, GOOD, {**GOOD, "prompt": prompt}, BAD, GOOD])
    assert values(scores[:3] + scores[4:]) == [1.0, 0.0, 1.0, 0.0, 1.0]
    return scores[3]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("raise", "exception: ValueError: no such answer (score_functions.py:"),
        ("nan", "nan"),
        ("inf", "nan"),
        ("text", "type: returned '0.5' (str); expected a number"),
        ("none", "none"),
        ("allocate", "memory"),
        ("eat", "memory"),
        ("bomb", "killed: more than 64 processes"),
        ("exit", "killed: exit code 3"),
        ("sys.exit", "exception: SystemExit: 3"),
        ("crash", "killed: signal SIGSEGV"),
        ("stdin", "exception: EOFError"),
        ("kill parent", "killed: with the process"),
        ("close files", "killed: exit code"),
    ],
)
def test_a_sample_that_cannot_be_scored_is_dropped_with_its_reason(pool, prompt, reason):
    score = outcome(pool, prompt)
    assert score.value is None and score.reason.startswith(reason)


@pytest.mark.parametrize("prompt", ["loop", "deaf", "fork and hang", "daemon and hang"])
def test_a_sample_that_takes_too_long_is_dropped(hasty_pool, prompt):
    score = outcome(hasty_pool, prompt)
    assert (score.value, score.reason) == (None, "timeout")


@pytest.mark.parametrize(
    ("prompt", "value", "parts"),
    [
        ("parts", 1.25, {"format": 0.25, "answer": 1.0}),
        ("total", 3.0, {"format": 0.25, "score": 3.0}),
        ("fork", 0.5, {}),
        ("daemon", 0.5, {}),
        ("print", 0.5, {}),
        ("subprocess", 0.5, {}),
        ("modules", 0.0, {}),
    ],
)
def test_a_sample_that_can_be_scored_is(pool, prompt, value, parts):
    score = outcome(pool, prompt)
    assert (score.value, score.parts, score.reason) == (value, parts, None)
    # What it starts ends with it, and nobody hears the answer of a fork that came back.
    assert eventually(lambda: not marked("score-daemon"))
    assert values(pool.score([GOOD, BAD] * 4)) == [1.0, 0.0] * 4


def test_the_innocent_are_not_dropped_for_a_thread_that_an_earlier_sample_left():
    rows = [{**GOOD, "prompt": "time bomb"}, *[{**GOOD, "prompt": "slow"}] * 3]
    with make_pool(num_processes=1) as pool:
        assert values(pool.score(rows)) == [0.5] * 4


def test_waiting_for_a_turn_does_not_count_as_time():
    with make_pool(num_processes=1, timeout_s=2.0) as pool:
        assert values(pool.score([{**GOOD, "prompt": "nap"}] * 4)) == [0.5] * 4


def test_rows_are_scored_in_parallel(tmp_path):
    # Each waits until all eight are there.
    rows = [{**GOOD, "prompt": "meet", "response": str(tmp_path)}] * 8
    with make_pool(num_processes=8) as pool:
        assert values(pool.score(rows)) == [0.5] * 8


def test_processes_are_kept_for_the_next_call_and_many_rows_cost_little(pool):
    rows = [{**GOOD, "prompt": "pid"}] * 4
    assert set(values(pool.score(rows))) & set(values(pool.score(rows)))
    started = time.process_time()  # of this process alone: others on the machine do not count
    assert values(pool.score([GOOD, BAD] * 1000)) == [1.0, 0.0] * 1000
    assert (time.process_time() - started) / 2000 < 1e-3
    assert pool.score([]) == []


def test_threads_take_turns(pool):
    results = {}

    def score(index):
        results[index] = values(pool.score([GOOD, BAD] * 20))

    threads = [threading.Thread(target=score, args=[index]) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(4)] == [[1.0, 0.0] * 20] * 4


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("positional", {"prompt": "", "response": "2", "ground_truth": "2", "tag": "x"}, 1.0),
        ("keyword_only", {"prompt": "", "response": "b", "tests": ["a", "b"]}, 1.0),
        ("option", {"prompt": "", "response": "", "ground_truth": None, "extra": 2.0}, 12.0),
    ],
)
def test_functions_get_what_they_take(name, row, value):
    with make_pool(name, num_processes=1, options={"bonus": 10.0}) as pool:
        assert pool.score([row])[0].value == value


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score", "names no function; expected my_file.py:score"),
        (f"{FILE.parent}/score_function.py:score", "there is no file .* mean score_functions.py"),
        (f"{FILE}:scor", "score_functions.py has no 'scor'; did you mean 'score'"),
        (f"{FILE}:not_a_function", r"not_a_function is 3 \(int\); expected a function"),
        (
            f"{FILE}:too_few",
            r"expected a function score\(prompt, response, .* found too_few\(prompt, answer\)",
        ),
        ("no_such_package.module:score", "there is no module 'no_such_package'"),
        ("roll.exceptions:score", "has no 'score'; it has "),
    ],
)
def test_a_function_that_is_not_there(spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_reward_fn(spec)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\n\nx = 1 / 0\n", r"ZeroDivisionError: division by zero \(broken.py:3\)"),
        ("def score(:\n", r"SyntaxError: .*\(broken.py:1\)"),
        ("import no_such_library\n", r"No module named 'no_such_library' \(broken.py:1\)"),
        ("raise SystemExit(3)\n", r"SystemExit: 3 \(broken.py:1\)"),
        ("import os\nos._exit(5)\n", "its process ended with 5"),
        ("from roll.exceptions import *\nraise MissingDependencyError('pip x')\n", "^pip x$"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, source, message):
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as caught:
        check_reward_fn(f"{tmp_path}/broken.py:score")
    assert "Traceback" not in str(caught.value)


def test_a_relative_file_is_looked_for_here_and_imports_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 4.0\n")
    source = "from helper_of_mine import VALUE\ndef score(p, r, g): return VALUE\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with ScorePool("mine.py:score") as pool:
        monkeypatch.chdir("/")
        assert pool.score([GOOD])[0].value == 4.0


HELPED = """
import os, subprocess
server = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def score(prompt, response, ground_truth):
    if prompt == "exit":
        os._exit(1)
    return float(os.path.exists(f"/proc/{server.pid}"))
"""


def test_helpers_that_the_module_starts_live_as_long_as_the_pool(tmp_path):
    (tmp_path / "helped.py").write_text(HELPED)
    before = {child.pid for child in children()}
    with ScorePool(f"{tmp_path}/helped.py:score") as pool:
        rows = [GOOD, {**GOOD, "prompt": "exit"}, GOOD]
        assert values(pool.score(rows)) == [1.0, None, 1.0]
    assert eventually(lambda: {child.pid for child in children()} <= before)


def test_processes_that_never_get_to_work_are_not_started_for_ever(tmp_path):
    at_fork = "import os\nos.register_at_fork(after_in_child=lambda: os._exit(7))\n"
    (tmp_path / "stillborn.py").write_text(f"{at_fork}def score(p, r, g): return 1.0\n")
    message = "3 processes in a row ended before they could score anything .*exit code 7"
    with ScorePool(f"{tmp_path}/stillborn.py:score") as pool:
        for _ in range(2):
            with pytest.raises(RollError, match=message):
                pool.score([GOOD])


def test_close_ends_everything_and_so_does_forgetting_a_pool():
    before = {child.pid for child in children()}
    pool = make_pool()
    pool.score([GOOD] * 4)
    assert {child.pid for child in children()} > before
    pool.close()
    pool.close()
    assert eventually(lambda: {child.pid for child in children()} <= before)
    with pytest.raises(RollError, match="closed"):
        pool.score([GOOD])
    make_pool().score([GOOD])
    assert eventually(lambda: {child.pid for child in children()} <= before)


def test_a_pool_that_is_closed_while_it_scores_ends_at_once():
    before = {child.pid for child in children()}
    pool = make_pool()
    raised = []

    def score() -> None:
        with pytest.raises(RollError) as error:
            pool.score([{**GOOD, "prompt": "loop"}] * 2)
        raised.append(str(error.value))

    thread = threading.Thread(target=score)
    thread.start()
    assert eventually(pool._lock.locked)
    pool.close()
    thread.join()
    assert raised == ["the pool of score processes was closed"]
    assert eventually(lambda: {child.pid for child in children()} <= before)


def test_a_nursery_that_dies_between_two_calls_costs_no_row():
    before = {child.pid for child in children()}
    with make_pool() as pool:
        new = [child for child in children() if child.pid not in before]
        (nursery,) = [child for child in new if pool.spec in child.cmdline()]
        nursery.kill()
        assert eventually(lambda: not nursery.is_running() or nursery.status() == "zombie")
        assert values(pool.score([GOOD])) == [1.0]


OWNER = """
from roll.rewards.pool import ScorePool
pool = ScorePool({spec!r}, num_processes=2, timeout_s=60)
print("started", flush=True)
pool.score([{{"prompt": {prompt!r}, "response": "", "ground_truth": ""}}] * 2)
"""


@pytest.mark.parametrize("prompt", ["loop", "daemon and hang"])
def test_everything_ends_when_the_owner_is_killed(prompt):
    program = OWNER.format(spec=f"{FILE}:score", prompt=prompt)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"started\n"
    assert eventually(lambda: len(children(process.pid)) >= 3)  # nursery, two workers
    assert eventually(lambda: prompt == "loop" or bool(marked("score-daemon")))
    tree = [child.pid for child in children(process.pid)]
    process.kill()
    process.wait()
    process.stdout.close()
    assert eventually(lambda: not any(map(running, tree)))
    assert eventually(lambda: not marked("score-daemon"))


@pytest.mark.parametrize("when", ["started", "importing"])
def test_a_file_that_hangs_on_import_ends_with_its_owner(tmp_path, when):
    mark = f"open({str(tmp_path / 'importing')!r}, 'w')\n"
    (tmp_path / "hangs.py").write_text(f"{mark}while True: pass\n")
    check = "from roll.rewards.pool import check_reward_fn; check_reward_fn"
    program = f"{check}('{tmp_path}/hangs.py:score')"
    process = subprocess.Popen([sys.executable, "-c", program])
    assert eventually(lambda: len(children(process.pid)) == 1)
    assert eventually(lambda: when == "started" or (tmp_path / "importing").exists())
    nursery = children(process.pid)[0]
    process.kill()
    process.wait()
    assert eventually(lambda: not running(nursery.pid))
