"""The sandbox: what code gets back, what it cannot do, and that nothing of it is left.

With namespaces and without.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
from process_checks import children, eventually, marked

from roll.rewards.sandbox import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(params=[True, False], ids=["namespaces", "without"])
def run(request):
    def runner(code: str, **limits):
        before = set(children())  # torch, for one, keeps processes for compiling
        limits = {"wall_s": 200.0, "cpu_s": 60.0, **limits}
        result = run_python(code, namespaces=request.param, **limits)
        assert eventually(lambda: set(children()) <= before)
        return result

    runner.has_namespaces = request.param and namespaces_are_allowed()
    return runner


@cache
def namespaces_are_allowed() -> bool:
    return "namespaces" in run_python("").isolation


def test_a_program_reads_and_writes(run):
    result = run("import sys\nprint(input()[::-1])\nprint('oops', file=sys.stderr)", stdin="abc\n")
    assert (result.stdout, result.stderr) == ("cba\n", "oops\n")
    assert (result.exit_code, result.reason, result.timed_out) == (0, None, False)
    assert result.isolation[0] == ("namespaces" if run.has_namespaces else "seccomp")


def test_it_starts_in_an_empty_folder_of_its_own_that_is_removed(run):
    code = (
        "import os; print(os.getcwd(), sorted(os.listdir()), open('in/data.txt').read(), sep='|')"
    )
    folder, listing, text = run(code, files={"in/data.txt": "hello"}).stdout.split("|")
    assert listing == "['in', 'main.py']" and text == "hello\n"
    assert not Path(folder).exists()
    with pytest.raises(ValueError, match="outside the folder"):
        run("", files={"../x": ""})


@pytest.mark.parametrize(
    ("code", "exit_code", "reason"),
    [
        ("import sys; sys.exit(3)", 3, "exit code 3"),
        ("1/0", 1, "exit code 1"),
        ("import os; os._exit(4)", 4, "exit code 4"),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "signal SIGSEGV"),
        ("def broken(:", 1, "exit code 1"),
    ],
)
def test_how_it_ended(run, code, exit_code, reason):
    result = run(code)
    assert (result.exit_code, result.reason, result.timed_out) == (exit_code, reason, False)


def test_a_traceback_shows_only_the_code(run):
    lines = run("def f():\n    return 1 / 0\nf()").stderr.splitlines()
    assert lines[1] == '  File "main.py", line 3, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"


IGNORE_SIGNAL = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"


def test_time_is_limited(run):
    for code, limits, reason in [
        ("import time; time.sleep(60)", {"wall_s": 0.3}, "timeout"),
        ("while True: pass", {"cpu_s": 1.0}, "cpu time"),
        *([(IGNORE_SIGNAL, {"cpu_s": 1.0}, "cpu time")] if run.has_namespaces else []),
    ]:
        result = run(code, **limits)
        assert (result.reason, result.timed_out, result.exit_code) == (reason, True, None)


def test_memory_is_limited(run):
    assert run("x = bytearray(10 * 2**30)").reason == "memory"
    assert run("x = bytearray(100 * 2**20); print('fits')", memory_mb=400).stdout == "fits\n"


def test_a_caller_with_less_memory_than_the_limit_passes_on_what_it_has():
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))\n"
        "from roll.rewards.sandbox import run_python\n"
        "print(run_python('print(1)').stdout, run_python('x = bytearray(400 << 20)').reason)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n memory\n", done.stderr


def test_a_fault_of_the_sandbox_is_not_one_of_the_code(run):
    result = run("print(1)", files={"main.py/x": "main.py cannot be a folder and a file"})
    assert result.reason == "sandbox: the code did not start" and result.exit_code is None


def test_files_and_output_are_limited(run):
    result = run("open('big', 'wb').write(bytes(40 << 20))", file_mb=8)
    assert result.reason == "exit code 1" and "OSError" in result.stderr
    result = run("while True: print('x' * 10000)", max_output=50_000)
    assert result.reason == "output" and len(result.stdout) == 50_000


SLOW_BOMB = """
import os, time
while True:
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("bomb", [SLOW_BOMB, "import os\nwhile True: os.fork()"])
def test_processes_are_limited(run, bomb):
    # Where the kernel counts for us, fork itself fails; root is not counted, and the run is ended.
    assert run(bomb, max_processes=10, wall_s=20.0).reason in ("processes", "exit code 1")


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{marker}"])
    os._exit(0)
time.sleep(0.1)
"""


@pytest.mark.parametrize(
    "end", ["print('done')", "time.sleep(60)", "while True: print('x' * 10000)", "os._exit(1)"]
)
def test_daemons_die_with_it(run, end):
    marker = f"daemon-{os.getpid()}-{abs(hash(end))}"
    run(DAEMON.format(marker=marker) + end, wall_s=0.5, max_output=10_000)
    assert eventually(lambda: not marked(marker))


def test_everything_dies_with_the_caller(run):
    marker = f"orphan-{os.getpid()}-{run.has_namespaces}"
    inner = DAEMON.format(marker=marker) + "time.sleep(60)"
    call = f"run_python({inner!r}, wall_s=60, namespaces={run.has_namespaces})"
    program = f"from roll.rewards.sandbox import run_python\n{call}"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert eventually(lambda: bool(marked(marker)))
    finally:
        process.kill()
        process.wait()
    assert eventually(lambda: not marked(marker))


def test_the_network_is_out_of_reach(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        accepted = []
        thread = threading.Thread(target=lambda: accepted.append(server.accept()), daemon=True)
        thread.start()
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)")
        assert result.reason == "exit code 1" and "Error" in result.stderr and not accepted
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join(200)
        assert accepted, "the server can be reached from here"


def test_the_environment_is_not_inherited(run, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "token-123")
    code = "import os; print(dict(os.environ), open('/proc/self/environ').read())"
    assert "token-123" not in run(code).stdout


def test_other_processes_cannot_be_killed(run):
    victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    code = f"""
import os
for pid in ({victim.pid}, {os.getpid()}, os.getppid()):
    try:
        os.kill(pid, 9)
    except OSError:
        pass
print("still here")
"""
    assert run(code).stdout == "still here\n"  # process 1 of a namespace ignores the signal
    assert victim.communicate("alive\n")[0] == "alive\n"


def test_nothing_outside_is_read_or_written_where_there_are_namespaces(run, tmp_path):
    if not run.has_namespaces:
        pytest.skip("documented: without namespaces, code can do what its user can")
    assert run(f"print(open('/proc/{os.getpid()}/environ').read())").reason == "exit code 1"
    target = tmp_path / "written"
    assert "Read-only file system" in run(f"open({str(target)!r}, 'w')").stderr
    assert not target.exists()
