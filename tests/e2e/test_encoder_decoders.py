"""A model with an encoder over HTTP: completions, their usage, and streams whose worker or core is killed."""

import json
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import vocabulary
from completions import open_streams
from waiting import until

from pagewire.tools.servers import Server

NUM_TOKENS = 300


def _post(server: Server, path: str, body: dict[str, Any]) -> HTTPResponse:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    response: HTTPResponse = urllib.request.urlopen(request, timeout=300)
    return response


def _refusal(server: Server, path: str, body: dict[str, Any]) -> str:
    with pytest.raises(urllib.error.HTTPError) as refused:
        _post(server, path, body)
    assert refused.value.code == 400
    message: str = json.load(refused.value)["error"]["message"]
    return message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", pytest.param("bart", marks=pytest.mark.long)])
def test_completions_and_streams_whose_processes_are_killed(
    kind: str, start: Callable[..., Server], tmp_path: Path
) -> None:
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path / "model", kind))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rng = random.Random(5)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(20 + 40 * i)] for i in range(4)]
    expected = checkpoints.reference_greedy(folder, prompts, NUM_TOKENS)
    server = start(str(folder), "--dtype", "float32", "--max-model-len", "640").wait_ready()

    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 12, "n": 2, "echo": True, "return_token_ids": True}
    with _post(server, "/v1/completions", {"prompt": "translate: a house", **body}) as response:
        answer = json.load(response)
    assert answer["usage"]["prompt_tokens"] == len("translate: a house")
    assert answer["usage"]["completion_tokens"] == 24, "what the decoder begins with is no output"
    first, second = (choice["text"] for choice in answer["choices"])
    assert first == second and first.startswith("translate: a house")
    with _post(server, "/v1/completions", {"prompt": prompts[1], **body, "echo": False, "n": 1}) as response:
        (choice,) = json.load(response)["choices"]
    assert choice["token_ids"] == expected[1][:12]

    messages = [{"role": "user", "content": "hello"}]
    assert "chat template" in _refusal(server, "/v1/chat/completions", {"messages": messages})
    assert "embed" in _refusal(server, "/v1/embeddings", {"input": "a"})
    assert "encoder" in _refusal(server, "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1})
    assert "640" in _refusal(server, "/v1/completions", {"prompt": [5] * 641})

    with ThreadPoolExecutor(len(prompts)) as pool:
        streams, outputs = open_streams(pool, server, prompts, NUM_TOKENS)
        for process in ("worker", "core"):
            (victim,) = server.of_kind(process)
            victim.send_signal(signal.SIGKILL)
            until(lambda: server.answers("/ready"), "the engine is whole again", timeout_s=120)
        for stream in streams:
            stream.result(timeout=300)
    assert outputs == expected
