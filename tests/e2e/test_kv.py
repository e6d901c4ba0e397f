"""The KV cache of a real server: tiers in /metrics, events for routers, a trace, a restart with the disk tier."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import openai
import pytest
import zmq
from defaults import TORCH
from openai.types import CompletionUsage
from waiting import until

from pagewire.cli import main
from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e

FIRST, SECOND = "All work and no play. " * 60, "Quick brown foxes jump. " * 60


def usage(server: Server, prompt: str) -> CompletionUsage:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.completions.create(model="pagewire-demo", prompt=prompt, max_tokens=4, temperature=0)
    assert answer.usage is not None
    return answer.usage


def cached_tokens(used: CompletionUsage) -> int:
    details = used.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def test_evicted_blocks_are_loaded_from_the_tiers_and_reported(
    on_default: str, start: Callable[..., Server], tmp_path: Path
) -> None:
    memory = "4M" if on_default == TORCH else "2M"  # too little for both prompts
    flags = ["--kv-cache-memory", memory, "--kv-connector", "host,size=64M", f"disk,path={tmp_path}/kv,size=64M"]
    trace = tmp_path / "steps"
    server = start(*flags, "--record-trace", str(trace), "--kv-events", f"ipc://{tmp_path}/e").wait_ready()
    context = zmq.Context()
    router = context.socket(zmq.SUB)
    router.subscribe(b"")
    router.connect(f"ipc://{tmp_path}/e")
    try:
        first, second = usage(server, FIRST), usage(server, SECOND)
        assert cached_tokens(first) == cached_tokens(second) == 0
        assert cached_tokens(usage(server, FIRST)) > 400, "there is too little memory for both"
        until(lambda: server.metric("pagewire:external_prefix_cache_hits_total") > 400, "the hits are in /metrics")
        names: set[str] = set()

        def has_both() -> bool:
            while router.poll(0):
                names.update(event[0] for event in msgspec.msgpack.decode(router.recv_multipart()[2])[1])
            return {"BlockStored", "BlockRemoved"} <= names

        until(has_both, "the router has received both kinds of events", 60)
    finally:
        context.destroy(linger=0)
    num_blocks = first.prompt_tokens // 16 + second.prompt_tokens // 16

    def num_files() -> int:
        return len(list((tmp_path / "kv").glob("*/*/[!.]*.*")))

    # A tier writes only for a few seconds after a SIGTERM.
    until(lambda: num_files() >= num_blocks, lambda: f"{num_blocks} blocks are on the disk: {num_files()}", 120)
    assert server.stop() == 0, server.log.read_text()
    assert main(["replay", str(trace)]) == 0

    again = start(*flags).wait_ready()
    assert cached_tokens(usage(again, SECOND)) > 400, "the disk tier must keep blocks over a restart"
    assert again.stop() == 0, again.log.read_text()


def test_choices_share_the_blocks_of_their_prompt(start: Callable[..., Server]) -> None:
    server = start().wait_ready()  # not shared: the engine reports hits late, even those of an earlier test
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "Count from 1 to 7"}]
        answer = client.chat.completions.create(model="pagewire-demo", messages=messages, n=4, temperature=0)  # type: ignore[arg-type]
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert answer.usage is not None
    shared = 3 * (answer.usage.prompt_tokens - 1)
    until(
        lambda: server.metric("pagewire:prefix_cache_hits_total") == shared, "three choices compute one position each"
    )


def test_a_request_that_exceeds_the_queue_limit_alone_is_a_bad_request(start: Callable[..., Server]) -> None:
    server = start("--max-queued-tokens", "2000").wait_ready()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="smaller n or max_tokens"):
            client.completions.create(model="pagewire-demo", prompt="hello", max_tokens=600, n=4)
        assert client.completions.create(model="pagewire-demo", prompt="hello", max_tokens=5, n=4).choices
