"""What a machine has: memory and processors with the limits that containers set, names."""

import os

import pytest
import torch

from roll.exceptions import ConfigError
from roll.utils.machine import (
    GIB,
    Machine,
    free_threads,
    given_processors,
    host_memory,
    idle_processors,
    limit_threads,
    parse_machine,
    this_machine,
    visible_gpus,
)

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNIFIED = "0::/user/job\n"
OLD = "5:memory:/m\n4:cpu,cpuacct:/user/job\n1:name=systemd:/\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four processors, made of files by their paths."""
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


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        (None, {}, PHYSICAL),
        ("0::/job\n", {"job/memory.max": "max\n"}, PHYSICAL),
        ("0::/a/b\n", {"a/memory.max": f"{GIB}\n", "a/b/memory.max": f"{2 * GIB}\n"}, GIB),
        ("0::/../elsewhere\n", {"memory.max": str(GIB)}, GIB),  # inside a container
        (
            "5:cpu:/x\n4:memory:/docker/1\n",
            {"memory/docker/1/memory.limit_in_bytes": str(GIB)},
            GIB,
        ),
    ],
)
def test_memory_and_the_limits_of_groups(machine, groups, limits, expected):
    files = {} if groups is None else {"proc/self/cgroup": groups}
    files |= {f"sys/fs/cgroup/{path}": text for path, text in limits.items()}
    assert host_memory(machine(**files)) == expected


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "gib"),
    [
        ("8xH200", 1, 8, 139.8),
        ("2x8xh200", 2, 8, 139.8),
        ("1xA100-80GB", 1, 1, 79.2),
        ("H100", 1, 1, 79.2),
    ],
)
def test_machines_by_name(text, nodes, gpus, gib):
    machine = parse_machine(text)
    assert (machine.num_nodes, machine.num_gpus, machine.host_bytes) == (nodes, gpus, None)
    assert machine.gpu_bytes == int(gib * GIB) and not machine.is_this_one
    assert parse_machine("cpu-64GB") == Machine("cpu-64GB", 0, None, 64 * GIB)


def test_an_ambiguous_name_is_refused_with_the_nearest():
    expected = r'no GPU called "A100" is known; write A100-40GB or A100-80GB'
    with pytest.raises(ConfigError, match=expected):
        parse_machine("8xA100")


def test_gpus_are_those_of_torch():
    assert len(visible_gpus()) == torch.cuda.device_count()
    machine = this_machine(with_gpus=True)
    assert machine.num_gpus == torch.cuda.device_count() and machine.host_bytes == host_memory()


def stat(*idle):
    """Processors that ran for 1000 ticks, so many of them idle or waiting for a disk."""
    lines = [f"cpu{i} {900 - ticks} 30 40 {ticks} 10 5 10 5 77 0\n" for i, ticks in enumerate(idle)]
    return "cpu 1 2 3 4 5 6 7 8 9 10\n" + "".join(lines) + "intr 1 2 3\n"


def later(*idle):
    """100 ticks later."""
    return stat(*idle).replace(" 30 40 ", " 130 40 ")


CPU, CPU_V1 = "sys/fs/cgroup/user/job/cpu.max", "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, 4),
        (UNIFIED, {}, 4),
        (UNIFIED, {CPU: "max 100000\n"}, 4),
        (UNIFIED, {CPU: "200000 100000\n"}, 2),
        (UNIFIED, {CPU: "370000 100000\n"}, 3),
        (UNIFIED, {CPU: "50000 100000\n"}, 1),
        (UNIFIED, {CPU: "6400000 100000\n"}, 4),
        # The group above has less; a container sees its own group at the top.
        (UNIFIED, {CPU: "300000 100000\n", "sys/fs/cgroup/user/cpu.max": "100000 100000\n"}, 1),
        ("0::/../../docker/abc\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (OLD, {}, 4),
        (
            OLD,
            {
                f"{CPU_V1}/user/job/cpu.cfs_quota_us": "-1\n",
                f"{CPU_V1}/user/job/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            OLD,
            {f"{CPU_V1}/cpu.cfs_quota_us": "150000\n", f"{CPU_V1}/cpu.cfs_period_us": "50000\n"},
            3,
        ),
    ],
)
def test_what_a_process_is_given(machine, groups, files, expected):
    files = files if groups is None else {"proc/self/cgroup": groups, **files}
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
