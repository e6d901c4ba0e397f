"""Which engines get shared memory for packed weights."""

import os
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from defaults import COMPILED, TORCH, machine
from msgspec.structs import replace
from runner_driver import engine_config

from pagewire.procs.weight_memory import close_segments, keeps_on_device, new_segments


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd")
def test_a_segment_for_each_rank_where_the_c_kernels_compute(tmp_path: Path) -> None:
    with machine(COMPILED):
        for num_ranks in (1, 2):
            fds = new_segments(
                engine_config(make_checkpoint(tmp_path / "qwen3", "qwen3"), tensor_parallel_size=num_ranks)
            )
            assert len(fds) == num_ranks and len({os.fstat(fd).st_ino for fd in fds}) == num_ranks
            assert not any(os.get_inheritable(fd) for fd in fds), "only workers get them"
            close_segments(fds)
        assert new_segments(engine_config(make_checkpoint(tmp_path / "persimmon", "persimmon"))) == []
    with machine(TORCH):
        assert new_segments(engine_config(make_checkpoint(tmp_path / "qwen3", "qwen3"))) == []


def test_none_where_the_system_has_no_memfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    with machine(COMPILED):
        config = engine_config(make_checkpoint(tmp_path / "qwen3", "qwen3"))
        monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
        assert new_segments(config) == []
        monkeypatch.delattr(os, "memfd_create")
        assert new_segments(config) == []


def test_keepers_where_triton_kernels_may_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(COMPILED):
        on_cpu = engine_config(make_checkpoint(tmp_path / "qwen3", "qwen3"))
        fallback = engine_config(make_checkpoint(tmp_path / "persimmon", "persimmon"))
    assert not keeps_on_device(on_cpu)
    if hasattr(os, "memfd_create"):
        assert keeps_on_device(replace(on_cpu, kernels=None))
    assert not keeps_on_device(replace(fallback, kernels=None)), "transformers' model keeps its weights itself"
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert not keeps_on_device(replace(on_cpu, kernels=None))
