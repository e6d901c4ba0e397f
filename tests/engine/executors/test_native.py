"""All layers in one C call give the same bits as the layers op by op."""

import checkpoints
import pytest
import torch

from pagewire.bench.engine.step import opened, plan
from pagewire.config.flags import make_config
from pagewire.engine.models.decoder import Decoder
from pagewire.engine.models.native import NativeDecoder
from pagewire.engine.runner.runner import Runner
from pagewire.procs.prepare import prepare

pytestmark = pytest.mark.usefixtures("c_kernels")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe-sparse", "mixtral"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "bfloat16"}, {"quantization": "int8"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_c_call_gives_the_bits_of_single_ops(kind, options, dtype, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, kind, dtype=dtype)
    config = prepare(
        make_config(model=str(folder), dtype="float32", max_model_len=96, kv_cache_memory=1 << 22, **options)
    )
    hidden_states: dict[bool, list[torch.Tensor]] = {}
    for in_one_call in (True, False):
        runner = Runner.load(config)
        runner.open_cache(runner.offer())
        model = runner._steps._model
        assert isinstance(model, NativeDecoder)
        inner = model if in_one_call else model._decoder
        outputs = hidden_states[in_one_call] = []

        class Recorder:
            kv_shape = model.kv_shape
            logits, greedy = staticmethod(inner.logits), staticmethod(inner.greedy)

            @staticmethod
            def hidden(ids, positions, attention, inner: NativeDecoder | Decoder = inner, to=outputs):
                to.append(inner.hidden(ids, positions, attention))
                return to[-1]

        runner._steps._model = Recorder()
        opens = tuple(opened(row, 40 + row, 96, config.model.vocab_size) for row in range(3))
        steps = [plan(1, [0, 1], [40, 41], opens), plan(2, [0, 2, 1], [1, 42, 1]), plan(3, [2, 1, 0], [1, 1, 1])]
        for step in steps:
            runner.launch(step)
            assert min(torch.tensor(bytearray(runner.collect().ids))) >= 0
    assert len(hidden_states[True]) == 3
    for native, by_ops in zip(hidden_states[True], hidden_states[False], strict=True):
        assert torch.equal(native, by_ops) and native.isfinite().all()
