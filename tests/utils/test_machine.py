"""What a machine has: its memory with the limits that containers set, and machines by name."""

import os

import pytest

from roll.exceptions import ConfigError
from roll.utils.machine import GIB, Machine, host_memory, parse_machine, this_machine, visible_gpus

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def group(tmp_path, lines, **limits):
    cgroups, root = tmp_path / "cgroup", tmp_path / "fs"
    cgroups.write_text("".join(f"{line}\n" for line in lines))
    root.mkdir()
    for path, text in limits.items():
        file = root / path.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return host_memory(cgroups, root)


def test_without_a_limit_it_is_the_machines(tmp_path):
    assert host_memory(tmp_path / "absent", tmp_path) == PHYSICAL
    assert group(tmp_path, ["0::/job"], job__memory_dot_max="max\n") == PHYSICAL


def test_a_limit_of_the_group_or_of_one_above_it_counts(tmp_path):
    found = group(
        tmp_path, ["0::/a/b"], a__memory_dot_max=f"{GIB}\n", a__b__memory_dot_max=f"{2 * GIB}\n"
    )
    assert found == GIB


def test_inside_a_container_the_root_has_the_limit(tmp_path):
    assert group(tmp_path, ["0::/../elsewhere"], memory_dot_max=str(GIB)) == GIB


def test_the_first_version_of_cgroups(tmp_path):
    lines = ["5:cpu,cpuacct:/x", "4:memory:/docker/1"]
    assert group(tmp_path, lines, memory__docker__1__memory_dot_limit_in_bytes=str(GIB)) == GIB


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


def test_a_machine_without_gpus():
    assert parse_machine("cpu-64GB") == Machine("cpu-64GB", 0, None, 64 * GIB)


def test_an_ambiguous_name_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r'no GPU called "A100" is known; write A100-40GB or A100-80GB'
    ):
        parse_machine("8xA100")


def test_gpus_are_those_of_torch():
    import torch

    assert len(visible_gpus()) == torch.cuda.device_count()
    machine = this_machine(with_gpus=True)
    assert machine.num_gpus == torch.cuda.device_count() and machine.host_bytes == host_memory()
