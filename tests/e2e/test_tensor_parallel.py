"""Several ranks, each a process with its part of the weights, give the tokens of one rank."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import vocabulary
from completions import choices_of, stream
from replaced import until_replaced
from waiting import until

from pagewire import LLM, SamplingParams
from pagewire.config.cpu_bind import bind_ranks
from pagewire.config.cpus import show_cpus
from pagewire.config.machine import machine_facts
from pagewire.tools.servers import Server, free_port

pytestmark = pytest.mark.e2e
PROMPTS = [[5 + i, 9, 40 + 7 * i, 33, 12][: 2 + i % 4] * (1 + 3 * i) for i in range(6)]


def _complete(server: Server, prompt: Any, **more: Any) -> tuple[list[list[int]], list[list[float]]]:
    choices = choices_of(server, prompt, logprobs=1, **more)
    return [choice["token_ids"] for choice in choices], [choice["logprobs"]["token_logprobs"] for choice in choices]


@pytest.mark.parametrize(
    ("kind", "size", "changes"),
    [
        ("llama-biased", 2, {"vocab_size": 319}),  # the last rank has one token less
        # Two ranks share each key/value head.
        pytest.param("qwen3", 4, {"tie_word_embeddings": False}, marks=pytest.mark.long),
        pytest.param("qwen3_moe", 2, {}, marks=pytest.mark.long),
        pytest.param("mixtral", 2, {}, marks=pytest.mark.long),
    ],
)
def test_ranks_give_the_tokens_of_one_rank(
    kind: str, size: int, changes: dict[str, Any], tmp_path: Path, start: Callable[..., Server]
) -> None:
    folder = checkpoints.make_checkpoint(tmp_path, kind, **changes)
    vocabulary.add_tokenizer(folder, vocab_size=changes.get("vocab_size", 320))
    llm = LLM(str(folder), dtype="float32", threads=1)
    greedy, sampled = (
        [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        for params in (
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1),
            SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
        )
    )
    flags = ("--dtype", "float32", "--tensor-parallel-size", str(size), "--max-num-batched-tokens", "16")
    server = start(str(folder), *flags).wait_ready()
    ranks = server.of_kind("worker")
    assert len(ranks) == size
    cpu_sets = bind_ranks("auto", size, machine_facts())
    if cpu_sets:  # there are cores enough
        assert [tuple(rank.cpu_affinity()) for rank in ranks] == list(cpu_sets)
        assert f"ranks bound to CPUs {' | '.join(map(show_cpus, cpu_sets))}" in server.log.read_text()
    if machine_facts().has_compiler:
        for rank in ranks:
            assert "/memfd:pagewire-ranks" in Path(f"/proc/{rank.pid}/maps").read_text()
    ids, logprobs = _complete(server, PROMPTS, temperature=0)
    assert ids == [list(one.token_ids) for one in greedy]
    for found, one in zip(logprobs, greedy, strict=True):
        assert found == pytest.approx(
            [step[token].logprob for step, token in zip(one.logprobs or (), one.token_ids, strict=True)], abs=1e-3
        )
    alone, alone_logprobs = _complete(server, PROMPTS[5], temperature=0)
    assert alone == [ids[5]]
    if machine_facts().has_compiler:
        assert alone_logprobs == [logprobs[5]], "log-probabilities differ between alone and in the batch"
    else:  # the last bits of a row depend on the other rows in torch's matrix products
        assert alone_logprobs[0] == pytest.approx(logprobs[5], abs=1e-4)
    ids, _ = _complete(server, PROMPTS[4], temperature=1, seed=3)
    assert ids == [list(sampled[4].token_ids)]
    assert server.stop() == 0, server.log.read_text()


@pytest.mark.long
def test_all_ranks_are_replaced_when_one_dies_and_streams_continue(
    start: Callable[..., Server],
) -> None:
    server = start("--tensor-parallel-size", "2").wait_ready()

    expected = stream(server, "hello", max_tokens=300)
    before = server.children()
    assert stream(server, "hello", before["worker-1"].kill, max_tokens=300) == expected
    after = until_replaced(server, before, ("worker", "worker-1"))
    assert {after[name].pid for name in ("worker", "worker-1")}.isdisjoint(child.pid for child in before.values())
    assert after["core"].pid == before["core"].pid
    assert "worker-1 was killed by SIGKILL" in server.log.read_text()


def test_a_rank_that_dies_while_loading_is_named_and_ends_the_start(start: Callable[..., Server]) -> None:
    def runs(server: Server) -> bool:
        return "worker-1" in server.children()

    def is_decided(server: Server) -> bool:
        return server.process.poll() is not None or "listening on" in server.log.read_text()

    for _ in range(5):  # a rank that is ready already is replaced
        server = start("--tensor-parallel-size", "2")
        until(partial(runs, server), "worker-1 runs", 120)
        children = server.children()
        children["worker-1"].kill()
        until(partial(is_decided, server), "the start ends or succeeds", 120)
        if server.process.poll() is not None:
            break
    assert server.process.poll() == 1
    assert server.log.read_text() == "pagewire: worker-1 was killed by SIGKILL.\n"
    until(lambda: not any(child.is_running() for child in children.values()), "no process is left", 60)


def test_one_rank_may_be_bound_as_well(start: Callable[..., Server]) -> None:
    cpu = machine_facts().numa_nodes[-1].cores[-1][-1]
    server = start("--cpu-bind", str(cpu)).wait_ready()
    children = server.children()
    assert children["worker"].cpu_affinity() == [cpu]
    assert children["core"].cpu_affinity() == server.supervisor.cpu_affinity()
    assert server.stop() == 0
    refused = start("--cpu-bind", "60000")
    assert refused.process.wait(120) == 2
    assert refused.log.read_text().startswith("pagewire: --cpu-bind 60000: there is no CPU 60000; this machine has ")


@pytest.mark.long
def test_an_architecture_of_the_fallback_is_refused_once_for_all_ranks(
    tmp_path: Path, start: Callable[..., Server]
) -> None:
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path, "persimmon"))
    server = start(str(folder), "--tensor-parallel-size", "2")
    assert server.process.wait(120) == 2
    (line,) = server.log.read_text().strip().splitlines()
    assert line.startswith("pagewire: --tensor-parallel-size needs a model that pagewire describes; ")
    assert "PersimmonForCausalLM" in line


@pytest.mark.long
def test_ranks_may_run_in_two_launches(start: Callable[..., Server], tmp_path: Path) -> None:
    names = ("worker", "worker-1", "core", "grammar", "tokenizer", "detokenizer", "api", "ranks")
    addresses = [f"{name}=tcp://127.0.0.1:{free_port()}" for name in names]
    launch = (sys.executable, "-m", "pagewire.procs.launch", "--threads", "1")
    common = ["--tensor-parallel-size", "2", "--key-file", str(tmp_path / "key"), "--address", *addresses]
    first = start("--actors", "worker,core,grammar,tokenizer,detokenizer,api", *common, command=launch)
    until(lambda: (tmp_path / "key").exists(), "the key is made", 60)
    second = start("--actors", "worker-1", *common, command=launch)
    first.wait_ready()
    assert set(second.children()) == {"worker-1"}
    assert len(_complete(first, "hello", temperature=0)[0][0]) == 24
    assert first.stop() == 0 and second.stop() == 0
