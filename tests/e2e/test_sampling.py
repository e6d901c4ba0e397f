"""Tokens of a request alone and in a batch, from a real server with each default configuration."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from defaults import COMPILED, NARROW, TORCH, machine

from pagewire.tools.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM, TOKENS = 16, 64
WARNINGS = {
    COMPILED: "",
    TORCH: "tokens may depend on what else is served where two are almost equally likely",
    NARROW: "tokens may depend on what else is served: roundings to 16 or 8 bits",
}


@pytest.fixture(scope="module")
def served(default: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with machine(default):
        server = Server(tmp_path_factory.mktemp("server"), "--max-num-batched-tokens", "64")
    with server:
        yield server


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_has_the_same_tokens_alone_and_in_a_batch(default: str, served: Server, temperature: float) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        def ask(i: int) -> tuple[str, int]:
            answer = client.chat.completions.create(
                model="pagewire-demo",
                messages=[{"role": "user", "content": f"Tell me {i} things about the number {i}. " * (1 + i % 5)}],
                temperature=temperature,
                seed=i,
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage is not None
            return str(answer.choices[0].message.content), answer.usage.completion_tokens

        alone = [ask(i) for i in range(NUM)]
        with ThreadPoolExecutor(NUM) as pool:
            in_batch = list(pool.map(ask, range(NUM)))
        promised = client.models.retrieve("pagewire-demo").model_dump()["batch_invariance"]
    assert len({text for text, _ in alone}) > NUM // 2
    assert {num for _, num in (*alone, *in_batch)} == {TOKENS}
    assert promised == {COMPILED: "exact", TORCH: "float32", NARROW: "none"}[default]
    if promised != "none":
        assert in_batch == alone


def test_the_start_warns_where_tokens_may_depend_on_the_batch(default: str, served: Server) -> None:
    log = served.announced()
    assert log.count("tokens may depend on what else is served") == bool(WARNINGS[default])
    assert WARNINGS[default] in log
