"""Score functions that misbehave, by the prompt of the row; loaded by file, as a user's are."""

import os
import subprocess
import sys
import threading
import time

hoard = []


def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(
                sys.executable,
                [sys.executable, "-c", "import time; time.sleep(60)", "score-daemon"],
            )
        os._exit(0)
    time.sleep(0.1)


def eat():
    while True:
        hoard.append(bytearray(100_000_000))


def loop():
    while True:
        pass


def ignore_signals():
    import signal

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def crash():
    import ctypes

    ctypes.string_at(0)


def raises():
    raise ValueError("no such answer")


def fork():
    if os.fork():  # the child comes back first
        time.sleep(0.1)
    return 0.5


def fork_and_hang():
    os.fork()
    time.sleep(60)


def bomb():
    for _ in range(9):  # 512 processes
        os.fork()
    time.sleep(60)


def prints():
    sys.stdout.write("x" * 20_000_000)
    sys.stderr.write("y" * 5_000_000)
    return 0.5


def leaves_a_time_bomb():
    threading.Timer(0.15, os._exit, [9]).start()
    return 0.5


def closes_files():
    os.closerange(3, 100)
    return 0.5


BEHAVIOURS = {
    "raise": raises,
    "loop": loop,
    "deaf": ignore_signals,
    "nan": lambda: float("nan"),
    "inf": lambda: {"part": float("-inf")},
    "text": lambda: "0.5",
    "none": lambda: None,
    "allocate": lambda: len(bytearray(10**11)),
    "eat": eat,
    "fork": fork,
    "fork and hang": fork_and_hang,
    "daemon": lambda: daemon() or 0.5,
    "daemon and hang": lambda: daemon() or time.sleep(60),
    "bomb": bomb,
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "crash": crash,
    "print": prints,
    "stdin": lambda: float(input()),
    "kill parent": lambda: os.kill(os.getppid(), 9) or time.sleep(60),
    "close files": closes_files,
    "subprocess": lambda: float(
        subprocess.run(["echo", "0.5"], capture_output=True, text=True).stdout
    ),
    "nap": lambda: time.sleep(0.7) or 0.5,
    "slow": lambda: time.sleep(0.3) or 0.5,
    "time bomb": leaves_a_time_bomb,
    "modules": lambda: float("torch" in sys.modules or "numpy" in sys.modules),
    "pid": os.getpid,
    "parts": lambda: {"format": 0.25, "answer": 1.0},
    "total": lambda: {"format": 0.25, "score": 3.0},
}


def meet(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < 8:
        time.sleep(0.01)
    return 0.5


def score(prompt, response, ground_truth, **row):
    if prompt == "meet":
        return meet(response)
    if prompt in BEHAVIOURS:
        return BEHAVIOURS[prompt]()
    return float(response == ground_truth)


def positional(question, answer, truth):
    return float(answer == truth)


def keyword_only(*, response, tests):
    return float(response in tests)


def option(prompt, response, ground_truth, *, bonus, **row):
    return bonus + row["extra"]


def too_few(prompt, answer):
    return 0.0


not_a_function = 3
