"""A server whose ranks are KV domains gives the tokens of one rank, whatever the domains do, and heals."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import httpx
import pytest
from completions import complete, stream
from waiting import until

from pagewire import LLM, SamplingParams
from pagewire.engine.core import trace
from pagewire.tools.servers import Server

pytestmark = pytest.mark.e2e
PROMPTS = [[5 + i, 9, 40 + 7 * i, 33, 12][: 2 + i % 4] * (1 + 3 * i) for i in range(6)]
ADMIN = {"Authorization": "Bearer of-the-administrator"}
DOMAINS = ("--tensor-parallel-size", "2", "--kv-domains", "2")


def test_domains_of_a_server(tmp_path: Path, start: Callable[..., Server]) -> None:
    """Latent attention, with whole experts on each rank. Each domain has tiers of its own, and one that is common."""
    folder = families.make_family(tmp_path, "deepseek_v3")
    llm = LLM(str(folder), dtype="float32", threads=1)

    def expected(prompts: list[list[int]], **params: Any) -> list[list[int]]:
        found = llm.generate(prompts, SamplingParams(ignore_eos=True, **params), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]

    greedy = expected(PROMPTS, temperature=0, max_tokens=24)
    seeded = expected(PROMPTS, temperature=1, seed=3, max_tokens=24)
    (long,) = expected(PROMPTS[3:4], temperature=0, max_tokens=200)
    tiers = [f"{name},{where}size=4M" for name, where in (
        ("host", ""), ("disk", f"path={tmp_path}/disk,"), ("shared", f"path={tmp_path}/shared,"))]  # fmt: skip
    events = f"ipc://{tmp_path}/events"
    steps = tmp_path / "steps"
    flags = ("--kv-connector", *tiers, "--kv-events", events, "--kv-cache-memory", "128K", "--record-trace", str(steps),
             "--enable-sleep-mode", "--admin-api-key", "of-the-administrator")  # fmt: skip
    server = start(str(folder), "--dtype", "float32", *DOMAINS, "--enable-expert-parallel", *flags).wait_ready()
    assert complete(server, PROMPTS) == greedy
    assert complete(server, PROMPTS) == greedy, "with what the domains have cached"
    assert complete(server, PROMPTS[5]) == greedy[5:], "one domain is idle all the time"
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        found = [clients.submit(complete, server, prompt, temperature=1, seed=3) for prompt in PROMPTS]
        assert [ids for each in found for ids in each.result()] == seeded
    for name in ("disk", "shared"):
        until(lambda name=name: list((tmp_path / name).rglob("*.0")), f"{name} has blocks", 120)  # type: ignore[misc]
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {f"domain-{i}-of-2" for i in range(2)}
    for what in ("sleep", "wake_up"):
        assert httpx.post(f"{server.url}/{what}", headers=ADMIN, timeout=60).status_code == 200
    assert complete(server, PROMPTS) == greedy, "the devices have lost all KV"
    until(lambda: server.metric("pagewire:external_prefix_cache_hits_total") > 0, "the hits of tiers are reported", 60)
    assert server.metric("pagewire:kv_tier_failed_blocks_total") == 0
    tokens = server.metric("pagewire:expert_tokens_total")
    until(lambda: server.metric("pagewire:expert_tokens_total") > 0, f"both ranks report their load, {tokens}", 60)

    workers = server.of_kind("worker")
    core = server.children()["core"].pid
    with ThreadPoolExecutor(1) as clients:  # requests in both domains
        beside = clients.submit(stream, server, PROMPTS[3], max_tokens=200)
        assert stream(server, PROMPTS[3], workers[1].kill, max_tokens=200) == long
        assert beside.result() == long
    before = {worker.pid for worker in workers}

    def are_replaced() -> bool:
        after = {worker.pid for worker in server.of_kind("worker")}
        return len(after) == 2 and after.isdisjoint(before)

    until(are_replaced, "both ranks are replaced", 60)
    assert server.children()["core"].pid == core
    assert complete(server, PROMPTS) == greedy
    assert server.stop() == 0, server.log.read_text()
    with steps.open("rb") as file:
        num_plans, difference = trace.replay(trace.read(file))
    assert num_plans > 100 and difference is None


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--kv-domains", "2"), "each domain has one rank so far, and --tensor-parallel-size is 1; give both the same"),
        (
            (*DOMAINS, "--speculative", "ngram"),
            "is not there with --speculative: only a domain's own rank knows how many",
        ),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], why: str, start: Callable[..., Server]) -> None:
    server = start(*flags)
    assert server.process.wait(60) == 2
    assert why in server.log.read_text()
