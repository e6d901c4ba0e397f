"""A model that says what a file tells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire import LLM, SamplingParams
from pagewire.engine.runner.scripted import Script, ScriptedSteps
from pagewire.engine.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.errors import ConfigError
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, bytes_to_ids, ids_to_bytes
from pagewire.offline.sampling_params import StructuredOutputsParams
from pagewire.tools.servers import ROOT

END = 1
ENTRIES = [
    {"when": "what files", "say": "ls"},
    {"when": "README", "say": "There is a README."},
    {"when": "what f.les", "say": "never"},
    {"say": "I do not know."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "demo_model")


def script(folder: Path, tokenizer: Tokenizer, entries: Any) -> Script:
    path = folder / "script.json"
    path.write_text(json.dumps(entries))
    return Script(path, tokenizer, END)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("what files are there?", "ls"),
        ("what files are there? README.md", "There is a README."),
        ("README.md what files?", "ls"),  # what comes last decides; of equals the first entry
        ("why?", "I do not know."),
    ],
)
def test_what_happened_last_decides(prompt: str, said: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = script(tmp_path, tokenizer, ENTRIES).answer(tokenizer.encode(prompt, add_special_tokens=False))
    assert tokenizer.decode(answer[:-1]) == said and answer[-1] == END


def test_a_prompt_that_no_entry_fits_ends_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert script(tmp_path, tokenizer, ENTRIES[:1]).answer([5, 6]) == (END,)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read"),
        ("[]", "must be a JSON list of at least one entry"),
        ('{"say": "a"}', "must be a JSON list"),
        ('[{"say": "a"}, {"when": "a"}]', "entry 2 must be an object"),
        ('[{"say": 3}]', "entry 1 must be an object"),
        ('[{"say": "a", "wen": "b"}]', "entry 1 must be an object"),
        ('[{"say": "a", "when": "("}]', '"when" is no regular expression'),
        ('[{"say": "a", "when": 3}]', '"when" is no regular expression'),
    ],
)
def test_a_bad_file_is_refused(content: str, problem: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "script.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        Script(path, tokenizer, END)


def plan(step: int, *opened: RowOpen, rows: list[int], **more: Any) -> StepPlan:
    return StepPlan(
        step, opened, b"", b"", ids_to_bytes(rows), ids_to_bytes([1] * len(rows)), bytes([1] * len(rows)), **more
    )


def opened(tokenizer: Tokenizer, prompt: str, output: list[int], **more: Any) -> RowOpen:
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return RowOpen(0, ids_to_bytes(ids + output), len(ids), 0, b"", Sampling(), **more)


def sampled(steps: ScriptedSteps) -> list[int]:
    return list(bytes_to_ids(steps.collect().ids))


def test_a_row_that_is_opened_again_goes_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode("ls", add_special_tokens=False)
    steps = ScriptedSteps(script(tmp_path, tokenizer, ENTRIES))
    steps.launch(plan(0, opened(tokenizer, "what files", answer[:1]), rows=[0]))
    steps.launch(plan(1, rows=[0]))
    assert sampled(steps) + sampled(steps) == [*answer[1:], END, END][:2]


def test_an_end_that_comes_too_early_begins_the_answer_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode("ls", add_special_tokens=False)
    row = opened(tokenizer, "what files", [])
    row = opened(tokenizer, "what files", [], ends=ids_to_bytes([END]), min_len=row.num_prompt + len(answer) + 1)
    steps = ScriptedSteps(script(tmp_path, tokenizer, ENTRIES))
    steps.launch(plan(0, row, rows=[0]))
    for step in range(1, len(answer) + 2):
        steps.launch(plan(step, rows=[0]))
    found = [token for _ in range(len(answer) + 2) for token in sampled(steps)]
    assert found == [*answer, answer[0], END]


def test_masks_decide_before_the_script(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Masks that come with the plan, and those that come after it."""
    first = tokenizer.encode("ls", add_special_tokens=False)[0]
    words = -(-tokenizer.vocab_size // 32)

    def only(token: int) -> bytes:
        mask = np.zeros(words, np.int32)
        mask[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)
        return mask.tobytes()

    for token in (first, 63, 95):
        steps = ScriptedSteps(script(tmp_path, tokenizer, ENTRIES))
        steps.launch(plan(0, opened(tokenizer, "what", []), rows=[0], masked_rows=ids_to_bytes([0]), masks=only(token)))
        assert sampled(steps) == [token]
        steps.launch(plan(1, opened(tokenizer, "what files", []), rows=[0], late_rows=ids_to_bytes([0])))
        assert steps.num_pending and not steps.is_done()
        steps.sample({0: only(token)})
        assert sampled(steps) == [token] and not steps.num_pending


def test_the_rest_of_the_engine_is_the_real_one(tmp_path: Path) -> None:
    """Chunks, several requests at once, log-probabilities, a length, and a grammar that the script does not know."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps(ENTRIES))
    with LLM(scripted=str(path), max_model_len=20_000, max_num_batched_tokens=256) as llm:
        long = "word " * 4000
        prompts = [f"{long} what files?", "README", "why"]
        answers = llm.generate(prompts, SamplingParams(max_tokens=50, logprobs=0))
        assert [answer.outputs[0].text for answer in answers] == ["ls", "There is a README.", "I do not know."]
        assert all(answer.outputs[0].finish_reason == "stop" for answer in answers)
        (answer,) = llm.generate(["why"], SamplingParams(max_tokens=2))
        assert answer.outputs[0].finish_reason == "length" and len(answer.outputs[0].token_ids) == 2
        (answer,) = llm.generate(
            ["why"], SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
        )
        assert answer.outputs[0].text.isdigit() and len(answer.outputs[0].text) == 3


def test_what_a_script_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative has no meaning beside --scripted"):
        LLM(scripted=str(tmp_path / "none.json"), speculative="ngram")
    with pytest.raises(ConfigError, match="cannot be read"):
        LLM(scripted=str(tmp_path / "none.json"))
