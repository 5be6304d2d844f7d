"""`roll doctor` on this machine, and on machines with something wrong, by package metadata."""

import sys
from importlib import metadata

import pytest

from roll.commands import doctor
from roll.commands.doctor import Finding
from roll.exceptions import install_hint


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that packages have other versions, None for one that is not installed."""
    real = metadata.version

    def version(name: str) -> str:
        found = changed.get(name) or real(name)
        if changed.get(name, found) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    changed: dict[str, str | None] = {}
    monkeypatch.setattr(doctor.metadata, "version", version)
    return changed.update


def of(findings, what: str) -> Finding:
    return next(item for item in findings if item.what == what)


def test_this_machine_is_fit_for_the_tests(tmp_path):
    findings = doctor.examine(tmp_path)
    wanted = {"Python", "torch", "transformers", "GPU", "memory", "disk"}
    assert wanted <= {item.what for item in findings}
    assert all(item.fix for item in findings if item.state != "ok")


def test_without_the_package_that_reads_versions(monkeypatch, tmp_path):
    for name in ("packaging", "packaging.requirements", "packaging.specifiers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert of(doctor.examine(tmp_path), "packages").fix == "pip install packaging"


def test_wrong_and_missing_packages_with_the_commands_that_mend_them(pretend):
    pretend({"torch": "1.13.0", "tensordict": None, "ray": None})
    findings = list(doctor.packages_of("roll-rl"))
    torch, tensordict, ray = (of(findings, name) for name in ("torch", "tensordict", "ray"))
    assert torch.state == "problem" and torch.fix.startswith("pip install 'torch")
    assert "1.13.0, but this version of roll needs" in torch.found
    assert (tensordict.state, tensordict.found) == ("problem", "not installed")
    assert ray.state == "optional" and ray.fix == install_hint("ray")


def test_a_runtime_that_omegaconf_cannot_read_is_found(pretend):
    pretend({"antlr4-python3-runtime": "4.13.2"})
    [conflict] = doctor.conflicts(["omegaconf"])
    assert conflict.what == "antlr4-python3-runtime" and conflict.state == "problem"
    assert "4.13.2, but omegaconf needs" in conflict.found


def test_a_torch_that_cannot_be_imported_is_reported_with_its_last_line(monkeypatch):
    monkeypatch.setattr(doctor, "TORCH_PROBE", "raise ImportError('libcudart.so.12: cannot open')")
    finding = doctor.torch_and_gpus()
    assert finding.state == "problem" and "libcudart.so.12" in finding.found


def test_a_companion_built_for_another_torch_is_a_problem(pretend, monkeypatch):
    pretend({"torchvision": "0.24.0"})
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["torch==2.9.0"])
    finding = of(doctor.torch_companions(), "torchvision")
    assert finding.fix == "pip uninstall torchvision"


def test_little_memory_and_a_full_disk_are_warnings(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_GIB", 10**9)
    monkeypatch.setattr(doctor, "MIN_MEMORY_GIB", 10**9)
    memory, disk, *_ = doctor.resources(tmp_path)
    assert memory.state == disk.state == "warning"
    assert "tiny models run" in memory.fix and "max_ckpt_to_keep" in disk.fix
