"""Speculation on a real model: the same tokens as without it, in fewer steps."""

import dataclasses

import checkpoints
import pytest
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.engine.core import trace
from pagewire.engine.core.cost import CAUTIOUS, CostModel

# The random model does not repeat itself; it does if a bias leaves it few tokens.
FEW = {token: 100.0 for token in (40, 41, 42)}
KINDS = {
    "greedy": SamplingParams(temperature=0, logit_bias=FEW),
    "sampled": SamplingParams(temperature=6, seed=7, logit_bias=FEW),
    "top-p": SamplingParams(temperature=6, top_p=0.6, seed=8, logit_bias=FEW),
    "top-k": SamplingParams(temperature=6, top_k=2, seed=9, logit_bias=FEW),
    "repeating": SamplingParams(temperature=1, seed=10, frequency_penalty=-0.5, presence_penalty=-2),
    "penalties": SamplingParams(temperature=0, logit_bias=FEW, frequency_penalty=0.4, repetition_penalty=1.05),
}
PROMPTS = [[(i + j) % (3 + i % 5) + 40 for j in range(5 + 9 * i)] for i in range(10)]


@pytest.fixture(autouse=True)
def draft_tokens_are_cheap(monkeypatch):
    """Whether draft tokens pay off depends on the machine; these tests always make them."""
    monkeypatch.setattr(CostModel, "break_even", lambda self, work: CAUTIOUS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculation")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    """Engines by their options, each made once."""
    made = {}

    def get(**options):
        key = repr(options)
        if key not in made:
            made[key] = LLM(str(folder), dtype="float32", threads=1, **{"kv_cache_memory": "32M", **options})
        return made[key]

    yield get
    for llm in made.values():
        llm.close()


def _outputs(llm, params, prompts=PROMPTS):
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def _accepted(llm):
    return llm._engine.scheduler.counters.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_as_without_speculation(kind, depth, engine):
    params = dataclasses.replace(KINDS[kind], max_tokens=90, ignore_eos=True)
    ours = engine(speculative="ngram,tokens=5", pipeline_depth=depth)
    before = _accepted(ours)
    assert _outputs(ours, params) == _outputs(engine(), params)
    assert _accepted(ours) > before


def test_repetition_takes_few_steps(engine):
    params = SamplingParams(temperature=0, logit_bias={40: 100.0}, max_tokens=90, ignore_eos=True)
    ours = engine(speculative="ngram,tokens=5", pipeline_depth=1)
    before = ours._engine.scheduler.step
    assert _outputs(ours, params) == _outputs(engine(), params)
    assert ours._engine.scheduler.step - before < 40, "all but the first and last few steps give six tokens"


def test_a_stop_in_the_middle_of_a_step_cuts_the_output_there(engine):
    """Stop tokens, stop strings and lengths that end at every position of a step."""
    plain, ours = engine(), engine(speculative="ngram,tokens=5", pipeline_depth=1)
    before = _accepted(ours)
    for i, length in enumerate(range(1, 40, 3)):
        params = SamplingParams(
            temperature=2, seed=i, logit_bias=FEW | {43: 97.0}, max_tokens=length, stop_token_ids=[43]
        )
        assert _outputs(ours, params) == _outputs(plain, params)
    params = SamplingParams(temperature=0, logit_bias=FEW, max_tokens=60)
    text = _outputs(plain, params)[3][0].text
    params = dataclasses.replace(params, stop=[text[30:34], text[20:23]])
    outputs = _outputs(plain, params)
    assert _outputs(ours, params) == outputs and any(choice.stop_reason in params.stop for (choice,) in outputs)
    assert _accepted(ours) > before + 100


def test_preempted_requests_continue_with_the_same_tokens(folder, engine, tmp_path):
    """The recorded trace of the run also replays without a difference."""
    file = tmp_path / "steps"
    options = {"max_model_len": 192, "kv_cache_memory": 450_000, "pipeline_depth": 2, "speculative": "ngram"}
    llm = LLM(str(folder), dtype="float32", threads=1, record_trace=str(file), **options)
    params = SamplingParams(temperature=1, seed=5, logit_bias=FEW, max_tokens=90, ignore_eos=True)
    try:
        assert _outputs(llm, params) == _outputs(engine(), params)
        counters = llm._engine.scheduler.counters
        assert counters.num_preemptions > 0 and counters.num_accepted_tokens > 20
        num_plans = llm._engine.scheduler.step
    finally:
        llm.close()
    with file.open("rb") as frames:
        assert trace.replay(trace.read(frames)) == (num_plans, None)


def test_rows_with_logprobs_are_unchanged_beside_rows_that_speculate(engine):
    params = [dataclasses.replace(KINDS["greedy"], max_tokens=40, logprobs=i % 2 or None) for i in range(len(PROMPTS))]
    ours = engine(speculative="ngram,tokens=5", pipeline_depth=1)
    before = _accepted(ours)
    expected = _outputs(engine(), params)
    for (choice,), (other,) in zip(_outputs(ours, params), expected, strict=True):
        assert choice.token_ids == other.token_ids
        assert (choice.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(choice.logprobs or [], other.logprobs or [], strict=True):
            assert {k: round(v.logprob, 3) for k, v in mine.items()} == {
                k: round(v.logprob, 3) for k, v in theirs.items()
            }
    assert _accepted(ours) > before


def test_logits_that_exceed_the_workspace_are_computed_in_parts(engine):
    params = dataclasses.replace(KINDS["greedy"], max_tokens=60, ignore_eos=True)
    ours = engine(speculative="ngram,tokens=7", pipeline_depth=2, max_num_seqs=3)
    assert _outputs(ours, params) == _outputs(engine(), params) and _accepted(ours) > 100
