"""What is said of a process that is gone, from what it left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roll.distributed.executor import postmortem
from roll.distributed.executor.postmortem import (
    ProcessRecord,
    explain_death,
    oom_kill_count,
    stack_of,
)

CONNECTION_LOST = "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: ..."

SEGFAULT = """
*** SIGSEGV received at time=1794730076 on cpu 1 ***
PC: @     0x7ff4ceb85ad8  (unknown)  (unknown)
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "/home/me/workers.py", line 16 in train_step
  File "/site/roll/distributed/executor/ray_backend.py", line 193 in call
  File "/site/ray/_private/worker.py", line 1069 in main_loop
"""


def record(tmp_path: Path, stderr: str = "", oom_kills: int | None = None) -> ProcessRecord:
    path = tmp_path / "worker.err"
    path.write_text(stderr)
    return ProcessRecord(123, str(path), oom_kill_count() if oom_kills is None else oom_kills)


def test_sigkill(tmp_path: Path) -> None:
    reason = explain_death(record(tmp_path), CONNECTION_LOST)
    assert reason == "it was killed with SIGKILL (kill -9), or ended without a word"


def test_exit_code_that_ray_reports(tmp_path: Path) -> None:
    assert (
        explain_death(record(tmp_path), "Worker exits with an exit code 4.")
        == "it exited with exit code 4"
    )


def test_exit_code_in_the_last_words(tmp_path: Path) -> None:
    left = record(tmp_path, "some output\nroll: the process ends through os._exit(-3)\n")
    assert explain_death(left, CONNECTION_LOST) == "it exited with exit code -3"


def test_a_fatal_signal_with_the_frames_of_the_method(tmp_path: Path) -> None:
    assert explain_death(record(tmp_path, SEGFAULT), CONNECTION_LOST) == (
        "it crashed with SIGSEGV in\n"
        '  File "/lib/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/home/me/workers.py", line 16 in train_step'
    )


def test_of_several_threads_the_one_that_runs_the_method_counts(tmp_path: Path) -> None:
    other_thread = (
        'Thread 0x1 (most recent call first):\n  File "/lib/threading.py", line 5 in wait\n\n'
    )
    dump = SEGFAULT.replace("Stack (most", other_thread + "Current thread 0x2 (most")
    assert explain_death(record(tmp_path, dump), CONNECTION_LOST) == explain_death(
        record(tmp_path, SEGFAULT), CONNECTION_LOST
    )


def test_out_of_memory_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postmortem, "oom_kill_count", lambda: 7)
    reason = explain_death(record(tmp_path, oom_kills=6), CONNECTION_LOST)
    assert reason.startswith("most likely out of memory: it was killed with SIGKILL")
    assert "ended 1 process(es)" in reason


def test_out_of_memory_by_ray(tmp_path: Path) -> None:
    report = (
        "1 worker(s) were killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.1, ID: 02df) was 7.09GB used / 23.54GB limit (0.301138)\n"
        "Selected to kill: (Actor(e121): job ID=01, pid=123, actual memory used=4.62GB, worker ID=393e)\n"
        "(Actor(8fa8): job ID=01, pid=124, actual memory used=0.25GB, worker ID=2936)"
    )
    assert explain_death(record(tmp_path), report) == (
        "out of memory: Ray's memory monitor ended it when 7.09GB of 23.54GB were in use on that machine, "
        "4.62GB of it by this worker"
    )
    assert explain_death(record(tmp_path), "killed due to memory pressure") == (
        "out of memory: Ray's memory monitor ended it: killed due to memory pressure"
    )


def test_anything_else_is_what_ray_says(tmp_path: Path) -> None:
    assert explain_death(record(tmp_path), "The node\n  died.") == "The node died."


def test_a_record_without_files() -> None:
    gone = ProcessRecord(123, "/no/such/folder/worker.err", oom_kill_count())
    assert "SIGKILL" in explain_death(gone, CONNECTION_LOST)
    assert stack_of(gone) == ""
    assert stack_of(ProcessRecord(123, "", 0)) == ""


PROGRAM = """
import os, sys, time
from roll.distributed.executor.postmortem import prepare_this_process
record = prepare_this_process()
print(record.pid, record.stderr_path, flush=True)
if os.fork() == 0:
    os._exit(0)  # a child that leaves this way is no news
os.wait()
def work_in_vain():
    print("at work", flush=True)
    time.sleep(600)
code = compile("def call(): work_in_vain()", "/site/roll/distributed/executor/ray_backend.py", "exec")
exec(code, globals())
call() if sys.argv[1] == "hang" else os._exit(5)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("what", ["hang", "exit"])
def test_a_real_process(tmp_path: Path, what: str) -> None:
    stderr_path = tmp_path / "worker.err"
    with stderr_path.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, what], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdout is not None
    pid, path = process.stdout.readline().split()
    assert (int(pid), path) == (process.pid, str(stderr_path))
    about = ProcessRecord(process.pid, str(stderr_path), oom_kill_count())
    try:
        if what == "hang":
            assert process.stdout.readline() == "at work\n"
            assert [line.rsplit(" ", 1)[1] for line in stack_of(about).splitlines()] == [
                "work_in_vain"
            ]
            assert process.poll() is None  # looking does not disturb it
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        expected = "it exited with exit code 5" if what == "exit" else "it was killed with SIGKILL"
        assert explain_death(about, CONNECTION_LOST).startswith(expected)
        assert stderr_path.read_text().count("os._exit") == (1 if what == "exit" else 0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
