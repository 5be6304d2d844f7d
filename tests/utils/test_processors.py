"""Counting processors, on machines made of files."""

import os

import pytest
import torch

from roll.utils.processors import free_threads, given_processors, idle_processors, limit_threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four processors: `files` by path, and its /proc/stat before and after a pause."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def make(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def stat(*idle):
    """Processors that have been running for 1000 ticks, so many of them idle or waiting for a disk."""
    lines = [f"cpu{i} {900 - ticks} 30 40 {ticks} 10 5 10 5 77 0\n" for i, ticks in enumerate(idle)]
    return "cpu 1 2 3 4 5 6 7 8 9 10\n" + "".join(lines) + "intr 1 2 3\n"


def later(*idle):
    """100 ticks later."""
    return stat(*idle).replace(" 30 40 ", " 130 40 ")


UNIFIED = "0::/user/job\n"
OLD = "5:memory:/m\n4:cpu,cpuacct:/user/job\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4),
        ({"proc/self/cgroup": UNIFIED}, 4),
        ({"proc/self/cgroup": UNIFIED, "sys/fs/cgroup/user/job/cpu.max": "max 100000\n"}, 4),
        ({"proc/self/cgroup": UNIFIED, "sys/fs/cgroup/user/job/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": UNIFIED, "sys/fs/cgroup/user/job/cpu.max": "370000 100000\n"}, 3),
        ({"proc/self/cgroup": UNIFIED, "sys/fs/cgroup/user/job/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": UNIFIED, "sys/fs/cgroup/user/job/cpu.max": "6400000 100000\n"}, 4),
        # The group above has less; a container sees its own group at the top, under a path of its host.
        (
            {
                "proc/self/cgroup": UNIFIED,
                "sys/fs/cgroup/user/job/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/user/cpu.max": "100000 100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "0::/../../docker/abc\n",
                "sys/fs/cgroup/cpu.max": "200000 100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": OLD}, 4),
        (
            {
                "proc/self/cgroup": OLD,
                "sys/fs/cgroup/cpu,cpuacct/user/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/user/job/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": OLD,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
            },
            3,
        ),
    ],
)
def test_what_a_process_is_given(machine, files, expected):
    assert given_processors(machine(**files)) == expected


def test_affinity_counts(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2})
    assert given_processors(machine()) == 1


def test_idle_processors_are_those_of_this_process(machine, monkeypatch):
    root = machine(**{"proc/stat": stat(100, 200, 300, 400)})

    def look():
        return idle_processors(root, lambda: machine(**{"proc/stat": later(200, 200, 350, 410)}))

    assert look() == pytest.approx(1.0 + 0.0 + 0.5 + 0.1)
    machine(**{"proc/stat": stat(100, 200, 300, 400)})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    assert look() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("idle", "files", "said"),
    [
        ((98, 97, 99, 98), {}, "4 of 4 processors"),
        ((98, 97, 2, 98), {}, "3 of 4 processors: the others are busy"),
        ((1, 2, 0, 3), {}, "1 of 4 processors: the others are busy"),
        (
            (98, 97, 2, 98),
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            "2 of 4 processors: this process is given no more",
        ),
        (
            (1, 2, 98, 0),
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            "1 of 4 processors: the others are busy",
        ),
    ],
)
def test_free_threads_and_why(machine, idle, files, said):
    root = machine(**{"proc/stat": stat(0, 0, 0, 0)}, **files)
    assert str(free_threads(root, lambda: machine(**{"proc/stat": later(*idle)}))) == said


def test_where_there_is_no_proc(machine):
    assert str(free_threads(machine())) == "4 of 4 processors"


def test_the_user_decides(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert str(free_threads(machine())) == "3 of 4 processors: OMP_NUM_THREADS=3"
    before = torch.get_num_threads()
    limit_threads(before + 1)
    limit_threads(1)
    assert torch.get_num_threads() == before


def test_torch_gets_no_more_than_that(machine):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        limit_threads(8)
        assert torch.get_num_threads() == 3
        limit_threads(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
