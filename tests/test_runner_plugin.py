"""Runner plugins in the real engine: one that does nothing changes no token, and the examples do what transformers does
with forward hooks, or without the layers that they skip."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import vocabulary
from safetensors.torch import load_file

from pagewire import LLM, RequestOutput, RequestOutputKind, SamplingParams
from pagewire.config.machine import machine_facts
from pagewire.errors import RequestError

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
NOTHING = "watching_plugin:Watching"
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make_prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in lengths]


PROMPTS = make_prompts(1, 5, 40, 90, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    checkpoints.make_checkpoint(folder, "qwen3")
    return vocabulary.add_tokenizer(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Callable[..., LLM]]:
    """Engines of the checkpoint, which are closed at the end."""
    opened: list[LLM] = []

    def start(**options: Any) -> LLM:
        common = {"dtype": "float32", "max_model_len": 256, "threads": 1, "max_num_batched_tokens": 64}
        opened.append(LLM(str(folder), **common | options))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield start
        for llm in opened:
            llm.close()


@pytest.fixture(scope="module")
def expected(engine: Callable[..., LLM]) -> list[list[int]]:
    return tokens(engine())


def tokens(llm: LLM, params: SamplingParams | Sequence[SamplingParams] = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def asking(args: dict[str, object] | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **more}, extra_args=args)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"cpu_kernels": "torch"}, marks=pytest.mark.long),
        pytest.param({"speculative": "ngram,tokens=3"}, marks=pytest.mark.long),
    ],
)
def test_a_plugin_that_does_nothing_changes_no_token(options: dict[str, Any], engine: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=30, logit_bias={7: 40.0, 8: 40.0}, logprobs=1)
    plain, watched = engine(**options), engine(**options, runner_plugin=NOTHING)
    for asked in (GREEDY, params):
        assert tokens(watched, asked) == tokens(plain, asked)
    from watching_plugin import Watching

    seen = Watching.last.seen
    assert [*Watching.last.tokens.values()][-len(PROMPTS) :] == tokens(plain, params)
    assert seen["before_step"] == seen["after_step"] > 30 and seen["after_layer"] == 3 * seen["before_step"]
    assert seen["on_logits"] >= seen["before_step"] - 5  # a step of a prompt's chunk may sample nothing
    assert Watching.last.weights["model.norm.weight"] == [64]


@pytest.mark.long
@pytest.mark.skipif(not machine_facts().has_compiler, reason="ranks with torch's kernels share no memory")
def test_two_ranks(engine: Callable[..., LLM], expected: list[list[int]], tmp_path: Path) -> None:
    with engine(tensor_parallel_size=2, runner_plugin="skip_layers:SkipLayers") as llm:
        both = tokens(llm, [asking({"skip_layers": [1]}), GREEDY, asking({"skip_layers": [1]}), GREEDY])
        assert both[1::2] == expected[1::2] and both[0] != expected[0]
    with engine(tensor_parallel_size=2, runner_plugin="faulty_plugin:OnOneRank") as llm:
        found, errors = answers(llm, [GREEDY, asking({"fails": "after_layer"}), GREEDY, GREEDY])
        assert tokens(llm) == expected
        assert found == {str(i): expected[i] for i in (0, 2, 3)}
        assert [str(error) for error in errors] == [
            "The runner plugin faulty_plugin:OnOneRank has failed on another rank for this request."
        ]


def answers(llm: LLM, params: Sequence[SamplingParams]) -> tuple[dict[str, list[int]], list[RequestError]]:
    """The tokens of each request by its number, and the errors; the requests run side by side."""
    engine, found, errors = llm.llm_engine, {}, []
    for number, (ids, one) in enumerate(zip(PROMPTS, params, strict=True)):
        one = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(str(number), {"prompt_token_ids": ids}, one)
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                found[output.request_id] = list(output.outputs[0].token_ids)
        except RequestError as error:
            errors.append(error)
    return found, errors


@pytest.mark.parametrize("point", ["before_step", "after_layer", "on_logits", "after_step"])
def test_an_error_costs_only_its_request(
    point: str, engine: Callable[..., LLM], expected: list[list[int]], faulty: LLM
) -> None:
    """Its KV is found by no other request, and nothing is left of it."""
    asked = [GREEDY, asking({"fails": point}), GREEDY, GREEDY]
    found, errors = answers(faulty, asked)
    assert found == {str(i): expected[i] for i in (0, 2, 3)}
    sentence = f"The runner plugin faulty_plugin:Faulty has failed at {point} for this request."
    assert [(error.kind, str(error)) for error in errors] == [("internal", sentence)]
    scheduler = faulty.llm_engine.inline.scheduler
    assert scheduler.counters.num_failed_calls >= 2
    before = scheduler.counters.num_cached_tokens
    with pytest.raises(RequestError, match=point):
        faulty.generate([PROMPTS[1]], asked[1], use_tqdm=False)
    assert scheduler.counters.num_cached_tokens == before
    assert scheduler.pool.num_free == scheduler.pool.num_pages


@pytest.fixture(scope="module")
def faulty(engine: Callable[..., LLM]) -> LLM:
    return engine(runner_plugin="faulty_plugin:Faulty")


def test_logits_rules(engine: Callable[..., LLM], folder: Path, expected: list[list[int]]) -> None:
    """The rules of the example against transformers' own, beside requests without rules, with log-probabilities of the
    model's own logits."""
    llm = engine(runner_plugin="logits_rules:Rules")
    assert tokens(llm) == expected
    loops = {"temperature": 0, "max_tokens": 40, "logit_bias": {token: 60.0 for token in (7, 8, 9)}}
    plain = tokens(llm, asking(None, **loops))
    ruled = tokens(llm, asking({"no_repeat_ngram_size": 3}, **loops))
    assert any(repeats(ids, 3) for ids in plain) and not any(repeats(ids, 3) for ids in ruled)
    first = llm.generate(PROMPTS, asking({"warm_up": [3.0, 10]}, logprobs=2), use_tqdm=False)
    second = llm.generate(PROMPTS, asking(None, logprobs=2), use_tqdm=False)
    assert [output.outputs[0].logprobs for output in first] == [output.outputs[0].logprobs for output in second]
    hot = asking({"warm_up": [3.0, 10**9]}, temperature=0.5, seed=3)
    assert tokens(llm, hot) == tokens(engine(), asking(None, temperature=1.5, seed=3))
    with pytest.raises(RequestError, match="no_repeat_ngram_size must be a positive integer") as error:
        tokens(llm, asking({"no_repeat_ngram_size": "three"}))
    assert error.value.kind == "invalid_request"


def repeats(ids: list[int], size: int) -> bool:
    parts = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return len(set(parts)) < len(parts)


@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.long)])
def test_captured_activations_are_those_of_transformers(
    kernels: str, engine: Callable[..., LLM], folder: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """In chunks of a prompt, beside other requests, and after a request with the same beginning."""
    llm = engine(cpu_kernels=kernels, runner_plugin=f"capture_activations:Capture,folder={tmp_path}")
    tokens(llm)
    one, two = (asking({"capture": name, "layers": layers}) for name, layers in (("one", [0, 2]), ("two", [1])))
    found = tokens(llm, [GREEDY, one, two, GREEDY])
    assert found == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors", "two.safetensors"]
    model = checkpoints.load_reference(folder)
    for name, prompt, layers in (("one", PROMPTS[1], [0, 2]), ("two", PROMPTS[2], [1])):
        states = hooked(model, prompt, layers)
        captured = load_file(tmp_path / f"{name}.safetensors")
        assert captured["token_ids"].tolist() == prompt and len(captured) == 1 + len(layers)
        for layer in layers:
            torch.testing.assert_close(captured[f"layer.{layer}"], states[layer].view(-1, 64), atol=2e-4, rtol=2e-4)
    with pytest.raises(RequestError, match="one was captured before; choose another name"):
        tokens(llm, asking({"capture": "one", "layers": [0]}))


def hooked(model: Any, prompt: list[int], layers: list[int]) -> dict[int, torch.Tensor]:
    """What these layers compute, by forward hooks."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int, _module: object, _ins: object, out: Any) -> None:
        found[layer] = out[0] if isinstance(out, tuple) else out

    hooks = [model.model.layers[layer].register_forward_hook(partial(keep, layer)) for layer in layers]
    with torch.no_grad():
        model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return found


def remove_layers(skipped: list[int], model: Any) -> None:
    left = [layer for i, layer in enumerate(model.model.layers) if i not in skipped]
    for i, layer in enumerate(left):
        layer.self_attn.layer_idx = i
    model.model.layers = torch.nn.ModuleList(left)
    model.config.num_hidden_layers = len(left)


@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.long)])
def test_skipped_layers_are_as_if_the_model_lacked_them(
    kernels: str, engine: Callable[..., LLM], folder: Path, expected: list[list[int]]
) -> None:
    """Side by side with requests that skip other layers or none, alone, and with a cached prefix."""
    without = [
        checkpoints.reference_greedy(folder, PROMPTS, MAX_TOKENS, change=partial(remove_layers, skipped))
        for skipped in ([1], [0, 2])
    ]
    llm = engine(cpu_kernels=kernels, runner_plugin="skip_layers:SkipLayers,layers=1")
    mixed = [asking(None), asking({"skip_layers": []}), asking({"skip_layers": [0, 2]}), asking({"skip_layers": [1]})]
    for _ in range(2):  # the second time with cached KV
        found = tokens(llm, mixed)
        assert found == [without[0][0], expected[1], without[1][2], without[0][3]]
        assert tokens(llm, asking(None)) == without[0]
    assert llm.llm_engine.inline.scheduler.counters.num_cached_tokens > 0
