"""Which engines get shared memory for packed weights."""

import os
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from defaults import COMPILED, TORCH, machine
from runner_driver import engine_config

from pagewire.procs.weight_memory import close_segments, new_segments


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
