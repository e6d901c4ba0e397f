"""Stages of a pipeline in processes of their own give the tokens of one rank, and survive each other's death."""

import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import checkpoints
import family_kinds
import pytest
import vocabulary
from completions import complete, stream
from replaced import until_replaced
from waiting import until

from pagewire import LLM, SamplingParams
from pagewire.commands.metrics import read
from pagewire.tools.servers import Server, free_port

pytestmark = pytest.mark.e2e
PROMPTS = [[5 + i, 9, 40 + 7 * i, 33, 12][: 2 + i % 4] * (1 + 3 * i) for i in range(6)]


def _stream(server: Server, on_first: Callable[[], object] = lambda: None) -> list[int]:
    return stream(server, PROMPTS[4], on_first, max_tokens=300)


def _metrics(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        return str(response.read(), "utf-8")


def _check(folder: Path, server: Server) -> None:
    with LLM(str(folder), dtype="float32", threads=1) as llm:
        greedy, sampled = (
            [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
            for params in (
                SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
                SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
            )
        )
    for _ in range(2):
        assert complete(server, PROMPTS) == greedy
    assert complete(server, PROMPTS[4], temperature=1, seed=3) == [sampled[4]]


def test_two_stages_of_two_ranks_give_the_tokens_of_one_rank_and_heal(
    tmp_path: Path, start: Callable[..., Server]
) -> None:
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path, "qwen3"))
    flags = ("--dtype", "float32", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2")
    server = start(str(folder), *flags, "--max-num-batched-tokens", "32").wait_ready()
    assert len(server.of_kind("worker")) == 4
    log = server.log.read_text()
    assert "stage 0, each of its 2 ranks:" in log and "with the embedding of 3" in log and "with the head of 3" in log
    for worker in server.of_kind("worker"):
        assert "/memfd:pagewire-stages" in Path(f"/proc/{worker.pid}/maps").read_text()
    _check(folder, server)
    expected, before = _stream(server), server.children()
    assert _stream(server, before["worker-3"].kill) == expected  # of the last stage
    workers = [name for name in before if name.startswith("worker")]
    after = until_replaced(server, before, workers)
    assert after["core"].pid == before["core"].pid
    assert {before[name].pid for name in workers}.isdisjoint(child.pid for child in after.values())
    assert "worker-3 was killed by SIGKILL. Replacing worker, worker-1, worker-2, worker-3." in server.log.read_text()
    until(lambda: "_bubble_ratio{" in _metrics(server), "the core reports", 60)
    for stage in (0, 1):
        seconds = read(_metrics(server), 0.0).stages[str(stage)]
        assert seconds.keys() == {"busy", "plan", "input", "ids", "output"} and seconds["busy"] > 0
    assert server.stop() == 0, server.log.read_text()


def _make(folder: Path, kind: str) -> Path:
    if kind in checkpoints.KINDS:
        checkpoints.make_checkpoint(folder, kind)
    else:
        family_kinds.make_kind(folder, *next(each for each in family_kinds.EXPERTS if each[0] == kind))
    return vocabulary.add_tokenizer(folder)


@pytest.mark.parametrize(
    ("kind", "stages", "ranks", "flags"),
    [
        ("DeepseekV3Config", 2, 2, ("--enable-expert-parallel",)),  # latents, which all ranks of a stage hold
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("DeepseekV3Config", 2, 2, ()),
                ("jamba", 2, 2, ()),
                ("qwen3_moe", 3, 1, ()),
                ("qwen3_moe", 2, 2, ("--enable-expert-parallel",)),
                ("minimax", 2, 2, ()),
            )
        ),
    ],
)
def test_stages_of_other_families(
    kind: str, stages: int, ranks: int, flags: tuple[str, ...], tmp_path: Path, start: Callable[..., Server]
) -> None:
    folder = _make(tmp_path, kind)
    sizes = ("--pipeline-parallel-size", str(stages), "--tensor-parallel-size", str(ranks))
    server = start(str(folder), "--dtype", "float32", *sizes, *flags).wait_ready()
    _check(folder, server)
    assert server.stop() == 0, server.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["worker", "worker-1", "core"])
def test_streams_continue_whoever_dies(victim: str, tmp_path: Path, start: Callable[..., Server]) -> None:
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path, "qwen3"))
    server = start(str(folder), "--dtype", "float32", "--pipeline-parallel-size", "3").wait_ready()
    expected, before = _stream(server), server.children()
    assert _stream(server, before[victim].kill) == expected
    lost = {"worker", "worker-1", "worker-2", victim}
    after = until_replaced(server, before, lost)
    assert {name for name in before if after[name].pid != before[name].pid} == lost
    assert server.stop() == 0, server.log.read_text()


def test_the_ranks_of_a_stage_must_be_in_one_launch(start: Callable[..., Server]) -> None:
    addresses = [f"worker{suffix}=tcp://127.0.0.1:{free_port()}" for suffix in ("", "-1", "-2", "-3")]
    server = start(
        "--actors", "worker,core,grammar,tokenizer,detokenizer,api",
        "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2", "--address", *addresses,
        command=(sys.executable, "-m", "pagewire.procs.launch"),
    )  # fmt: skip
    assert server.process.wait(120) == 2
    assert server.log.read_text() == "pagewire: With several stages, start all workers of a stage in one launch.\n"


@pytest.mark.long
def test_stages_may_run_in_two_launches(start: Callable[..., Server], tmp_path: Path) -> None:
    """What they send each other goes over TCP, with keys."""
    names = ("worker", "worker-1", "core", "grammar", "tokenizer", "detokenizer", "api")
    addresses = [f"{name}=tcp://127.0.0.1:{free_port()}" for name in names]
    launch = (sys.executable, "-m", "pagewire.procs.launch", "--threads", "1")
    common = ["--pipeline-parallel-size", "2", "--key-file", str(tmp_path / "key"), "--address", *addresses]
    first = start("--actors", "worker,core,grammar,tokenizer,detokenizer,api", *common, command=launch)
    until(lambda: (tmp_path / "key").exists(), "the key is made", 60)
    second = start("--actors", "worker-1", *common, command=launch)
    first.wait_ready()
    assert set(second.children()) == {"worker-1"}
    assert len(complete(first, "hello")[0]) == 24
    assert first.stop() == 0 and second.stop() == 0
