"""KV leaves a step with a long prompt while the GPU computes it. What orders it is in `test_order.py`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from p2p_prompt import PAGES, followed_prompt, prompt_plan, socket_address
from runner_driver import Driver

from pagewire.engine.gpu import shapes


@pytest.mark.parametrize("is_recorded", [False, True])
def test_layers_of_a_prompt_leave_a_step_that_is_launched_kernel_by_kernel(
    is_recorded: bool, driver: Callable[..., Driver], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a step that may be recorded leave behind it."""
    monkeypatch.setattr(shapes, "MAX_RECORDED", 4 if not is_recorded else shapes.MAX_RECORDED)
    flags = {"max_num_seqs": 2, "max_num_batched_tokens": 160}  # blocks of a GPU have 64 positions
    alone = driver(checkpoint("llama"), **flags).runner
    alone.launch(prompt_plan(2, alone))
    with socket_address() as address:
        engine = driver(checkpoint("llama"), kv_connector=(f"p2p,serve={address},size=1M",), **flags).runner
        assert followed_prompt(engine, address) == [not is_recorded] * 2
        first, followed, last = (engine.collect() for _ in range(3))
        assert (first.ids, followed.ids, last.ids) == (b"", alone.collect().ids, b"")
        ours, theirs = engine._cache, alone._cache
        assert (
            ours is not None and theirs is not None and torch.equal(ours.storage[PAGES[:2]], theirs.storage[PAGES[:2]])
        )
        engine.close()
