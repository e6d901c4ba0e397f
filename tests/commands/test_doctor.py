"""Findings of `doctor` on sound and broken machines and models."""

import os
import shutil
import socket
import struct
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import checkpoints
import pytest
import vocabulary
from keepers import KeptDevice
from msgspec.structs import replace

from pagewire.commands import doctor
from pagewire.config.config import EngineConfig, MachineFacts, NumaNode
from pagewire.engine.checkpoint.source import DEMO_MODEL
from pagewire.engine.runner import kept_weights
from pagewire.engine.runner.forecast import forecast
from pagewire.engine.runner.kernel_checks import Checked
from pagewire.engine.steps.trial import Check

MACHINE = MachineFacts(num_cores=2)


def levels(findings: list[doctor.Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_the_triton_version_that_torch_requires() -> None:
    lines = ["filelock", 'triton==3.6.0; platform_system == "Linux"', "sympy>=1.13.3"]
    assert doctor.wanted_triton(lines) == "3.6.0"
    assert doctor.wanted_triton(["triton (==3.1.0) ; x"]) == "3.1.0"
    assert doctor.wanted_triton(["filelock", "pytorch-triton-rocm==3.1"]) is None


def test_a_triton_version_that_torch_does_not_require_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["triton==9.9.9"] if name == "torch" else [])
    (pair,) = [f for f in doctor.check_software() if f.subject == "torch"]
    assert pair.advice == "pip install triton==9.9.9" and pair.level != "ok"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["no-such-thing>=2", "msgspec>=0.2", "absent; extra == 'dev'"])
    (found,) = [f for f in doctor.check_software() if f.subject == "packages"]
    assert found.level == "bad" and found.advice == "pip install no-such-thing"


def cpus(machine: MachineFacts, num_ranks: int = 1, cpu_bind: str = "auto") -> list[tuple[str, str]]:
    return [(finding.level, finding.found) for finding in doctor.check_cpus(machine, num_ranks, cpu_bind)]


def test_the_cpus_and_what_ranks_use_of_them() -> None:
    nodes = (NumaNode(0, ((0, 8), (1, 9))), NumaNode(1, ((4, 12), (5, 13))))
    online = tuple(range(16))
    machine = MachineFacts(num_cores=3, online_cpus=online, numa_nodes=nodes, num_sockets=2, cpu_quota=3)
    *places, ranks = cpus(machine)
    assert places == [
        ("ok", "2 sockets, 2 NUMA nodes; CPUs 0-1,4-5,8-9,12-13 of 0-15 allowed, 4 cores; a quota of 3 CPUs"),
        ("ok", "CPUs 0-1,8-9, 2 cores"),
        ("ok", "CPUs 4-5,12-13, 2 cores"),
    ]
    assert ranks == ("note", "1 rank of 3 threads, not bound to CPUs")
    assert cpus(machine, 2)[-1] == ("ok", "2 ranks of 1 thread, bound to CPUs 0-1,8-9 | 4-5,12-13")
    assert cpus(machine, 2, "0|5,13")[-1] == ("ok", "2 ranks of 1 thread, bound to CPUs 0 | 5,13")
    level, found = cpus(machine, 2, "0|2")[-1]
    assert level == "bad" and "may not use CPU 2" in found
    one = MachineFacts(num_cores=2, online_cpus=(0, 1), numa_nodes=(NumaNode(0, ((0,), (1,))),))
    assert cpus(one) == [
        ("ok", "1 socket, 1 NUMA node; CPUs 0-1 of 0-1 allowed, 2 cores; no quota"),
        ("ok", "1 rank of 2 threads, not bound to CPUs"),
    ]
    assert cpus(MachineFacts(num_cores=4)) == [("ok", "4 cores; this system does not show NUMA nodes")]


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        (found,) = doctor.check_port("127.0.0.1", taken.getsockname()[1])
        assert found.level == "bad" and "choose another --port" in found.advice
    assert levels(list(doctor.check_port("127.0.0.1", 0))) == ["ok"]
    (found,) = doctor.check_port("192.0.2.1", 0)  # an address reserved for documentation
    assert found.level == "bad"


def cut_weights(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return "is truncated; download it again"


def cut_header(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1000) + b'{"a":')
    return "is truncated, or not a safetensors file"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "has no safetensors files"


def missing_shard(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    return "lacks model-00002-of-00002.safetensors"


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "has no config.json"


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text("{}")
    return "tokenizer.json"


@pytest.mark.parametrize("damage", [cut_weights, cut_header, no_weights, missing_shard, no_config, no_tokenizer])
def test_a_broken_model_is_reported(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    assert set(levels(list(doctor.check_model(str(folder), MACHINE)))) == {"ok"}
    sentence = damage(folder)
    *_, last = doctor.check_model(str(folder), MACHINE)
    assert last.level == "bad" and sentence in last.found, last


def test_the_ranks_of_serve_are_asked_for(tmp_path: Path) -> None:
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path, "qwen3_moe", num_experts=7))
    ask = partial(doctor.check_model, str(folder), MACHINE, num_ranks=2)
    assert any("4 of 7 experts of a layer on this rank" in each.found for each in ask(deals_experts=True))
    assert not any("experts of a layer" in each.found for each in ask())
    *_, last = doctor.check_model("", MACHINE, num_ranks=2, deals_experts=True)
    assert last.level == "bad" and "this one has none" in last.found


def test_a_model_that_is_too_large_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 1000)
    *_, last = doctor.check_model("", MACHINE)
    assert last.level == "bad" and "of weights, but" in last.found
    found = list(doctor.check_model("", MachineFacts(num_cores=2, has_gpu=True)))
    assert not any("of weights, but" in finding.found for finding in found), "a GPU has memory of its own"


def test_a_model_that_is_not_downloaded_is_only_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (found,) = doctor.check_model("somebody/some-model", MACHINE)
    assert found.level == "note" and "serve downloads it" in found.advice


def test_a_model_without_a_chat_template_still_completes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    for file in folder.glob("*.jinja"):
        file.unlink()
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"chat_template"', '"no_template"'))
    findings = list(doctor.check_model(str(folder), MACHINE))
    assert [f.advice for f in findings if f.level == "note"] == ["use completions; chat does not work"]


def test_what_triton_needs_to_build_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include"
    include.mkdir()
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(include)})
    monkeypatch.setenv("CC", "no-such-compiler")
    finding = doctor.check_triton_build(tmp_path)
    assert finding.level == "bad"
    assert f"CC=no-such-compiler and {include / 'Python.h'}" in finding.found
    (include / "Python.h").touch()
    monkeypatch.setenv("CC", "sh")  # any program on the path
    assert doctor.check_triton_build(tmp_path).level == "ok"
    monkeypatch.setenv("CC", "no-such-compiler")
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    assert doctor.check_triton_build(tmp_path).level == "ok", "an earlier start has built it"


def test_gpu_kernels_without_a_gpu() -> None:
    (found,) = doctor.check_gpu_kernels("", MACHINE)
    assert (found.level, found.found) == ("note", "not checked, because torch sees no GPU on this machine")


def test_each_gpu_kernel_has_a_line() -> None:
    """What the checks find is tested with the kernels (tests/engine/gpu/test_trial.py)."""

    def try_all(config: EngineConfig) -> Checked:
        served = forecast(config).served
        checks = (Check("rms_norm", "", 0.0021, 31.2), Check("moe", "it differs", 0.5, 2.0))
        return Checked(served, config, checks=checks)

    good, bad = doctor.check_gpu_kernels("", MACHINE, try_all)
    assert (good.level, good.subject) == ("ok", "GPU kernel rms_norm")
    assert good.found == "gives what torch gives, up to 0.002, in 31 ms"
    assert (bad.level, bad.subject, bad.found) == ("bad", "GPU kernel moe", "it differs") and "report it" in bad.advice


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd")
def test_the_weight_keeper_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real one. The device is a CPU that takes the place of a GPU."""
    assert not list(doctor.check_weight_keeper("", MACHINE))
    machine = replace(MACHINE, has_gpu=True)
    device = KeptDevice()
    monkeypatch.setattr(kept_weights, "choose_device", lambda *_, **__: device)
    (found,) = doctor.check_weight_keeper("", machine)
    assert (found.level, found.found) == ("ok", "a worker that is replaced finds the weights on the GPU")
    assert device.kept_memory is not None
    device.kept_memory.kind = "cuda:0"
    (found,) = doctor.check_weight_keeper("", machine)
    assert found.level == "note" and "there is no libcuda.so.1" in found.found
    device.kept_memory = None
    (found,) = doctor.check_weight_keeper("", machine)
    assert "this device has no memory that outlives a process" in found.found
