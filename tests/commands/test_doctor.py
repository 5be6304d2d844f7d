"""`roll doctor` on this machine, and on machines with something wrong, described through package metadata."""

import json
from importlib import metadata

import pytest

from roll.commands import doctor
from roll.commands.doctor import Finding
from roll.exceptions import install_hint


@pytest.fixture
def versions(monkeypatch):
    """Pretend that packages have other versions; None is not installed."""

    def pretend(**changed: str | None) -> None:
        real = metadata.version

        def version(name: str) -> str:
            if name not in changed:
                return real(name)
            if changed[name] is None:
                raise metadata.PackageNotFoundError(name)
            return changed[name]

        monkeypatch.setattr(doctor.metadata, "version", version)

    return pretend


def of(findings: list[Finding], what: str) -> Finding:
    return next(item for item in findings if item.what == what)


def test_this_machine_is_fit_for_the_tests(tmp_path):
    findings = doctor.examine(tmp_path)
    assert {"Python", "torch", "transformers", "GPU", "memory", "disk"} <= {
        item.what for item in findings
    }
    assert all(item.fix for item in findings if item.state != "ok")
    answer = json.loads(doctor.as_json(findings))
    assert answer["healthy"] == doctor.is_healthy(findings)


def test_a_version_outside_the_range_is_a_problem_with_the_command_that_mends_it(versions):
    versions(torch="1.13.0")
    torch = of(doctor._packages(), "torch")
    assert torch.state == "problem"
    assert "1.13.0, but this version of roll needs" in torch.found
    assert torch.fix.startswith("pip install 'torch")


def test_a_missing_requirement_is_a_problem_and_a_missing_extra_is_not(versions):
    versions(tensordict=None, ray=None)
    findings = doctor._packages()
    assert of(findings, "tensordict") == Finding(
        "tensordict", "problem", "not installed", of(findings, "tensordict").fix
    )
    ray = of(findings, "ray")
    assert ray.state == "optional" and ray.fix == install_hint("ray")
    assert not doctor.is_healthy(findings)


def test_a_runtime_that_omegaconf_cannot_read_is_found(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(
        doctor.metadata,
        "version",
        lambda name: "4.13.2" if name == "antlr4-python3-runtime" else real(name),
    )
    [conflict] = doctor._conflicts(["omegaconf"])
    assert conflict.what == "antlr4-python3-runtime"
    assert "4.13.2, but omegaconf needs" in conflict.found


def test_a_torch_that_cannot_be_imported_is_reported_with_its_last_line(monkeypatch):
    monkeypatch.setattr(doctor, "TORCH_PROBE", "raise ImportError('libcudart.so.12: cannot open')")
    [finding] = doctor._torch()
    assert finding.state == "problem" and "libcudart.so.12" in finding.found


def test_a_companion_built_for_another_torch_is_a_problem(monkeypatch):
    real_requires, real_version = metadata.requires, metadata.version
    monkeypatch.setattr(
        doctor.metadata,
        "requires",
        lambda name: ["torch==2.9.0"] if name == "torchvision" else real_requires(name),
    )
    monkeypatch.setattr(
        doctor.metadata,
        "version",
        lambda name: "0.24.0" if name == "torchvision" else real_version(name),
    )
    finding = of(doctor._torch_companions(), "torchvision")
    assert finding.fix == "pip uninstall torchvision"


def test_a_full_disk_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_GIB", 10**9)
    [finding] = doctor._disk(tmp_path)
    assert finding.state == "warning" and "max_ckpt_to_keep" in finding.fix
