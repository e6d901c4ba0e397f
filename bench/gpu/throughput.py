"""Output tokens per second without HTTP: 256 requests of 100 to 1,024 tokens in and out, as nano-vllm's benchmark."""

import random
import time
from collections.abc import Iterator, Sequence

from ...offline.llm import LLM
from ...offline.sampling_params import SamplingParams
from ...tools.make_checkpoint import SHAPES
from ..peers.base import Request
from .figures import Figure
from .setting import Setting

_LEAST = {"qwen3-0.6b": 26_000, "llama-3.1-8b": 10_000}


def requests(setting: Setting, num: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> list[Request]:
    """The requests, the same in each call."""
    rng = random.Random(0)
    vocab_size = SHAPES[setting.choose(setting.model, "qwen3-tiny")]["vocab_size"]
    assert isinstance(vocab_size, int)
    lengths = [(rng.randint(*inputs), rng.randint(*outputs)) for _ in range(num)]
    return [Request([rng.randrange(300, vocab_size) for _ in range(n)], out) for n, out in lengths]


def offline_rate(setting: Setting, batch: Sequence[Request], *, max_len: int, max_seqs: int) -> float:
    """Output tokens per second of a second run; the first one compiles kernels and records steps."""
    llm = LLM(
        max_model_len=max_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=setting.choose(8192, 64),
        pipeline_depth=2,
        enable_prefix_caching=False,
        **setting.flags(),  # type: ignore[arg-type]  # the model is a str, the rest is for `Config` to check
    )
    params = [SamplingParams(temperature=0, max_tokens=request.num_tokens, ignore_eos=True) for request in batch]
    taken = 0.0
    for _ in range(2):
        started = time.perf_counter()
        done = llm.generate([request.prompt for request in batch], params, use_tqdm=False)
        taken = time.perf_counter() - started
        num = sum(len(request.outputs[0].token_ids) for request in done)
        assert num == sum(request.num_tokens for request in batch), num
    llm.close()
    return num / taken


def measure(setting: Setting) -> Iterator[Figure]:
    num, lengths = setting.choose((256, (100, 1024)), (4, (8, 24)))
    batch = requests(setting, num, lengths, lengths)
    rate = offline_rate(setting, batch, max_len=setting.choose(2048, 64), max_seqs=num)
    name = f"{num} requests of {lengths[0]}–{lengths[1]} in and out"
    yield Figure(name=name, value=rate, unit="output tokens/s", least=_LEAST.get(setting.model))
