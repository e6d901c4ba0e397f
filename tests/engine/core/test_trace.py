"""`pagewire replay` reproduces every plan of a recorded trace exactly, and reports a trace that was changed."""

from io import BytesIO
from pathlib import Path

import checkpoints
import msgspec
import pytest
import vocabulary

from pagewire import LLM, SamplingParams
from pagewire.cli import main
from pagewire.engine.core import trace
from pagewire.errors import RequestError


@pytest.fixture(scope="module", params=[(), ("host,size=300000",), ("host,size=100000", "disk,path={},size=1M")])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a small engine that preempted, refused and hit stop strings, without and with KV tiers."""
    folder = tmp_path_factory.mktemp("trace")
    tiers = [spec.format(folder / "kv") for spec in request.param]
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    llm = LLM(str(folder), dtype="float32", threads=1, max_model_len=128, kv_cache_memory=140_000, pipeline_depth=2,
              record_trace=str(folder / "steps"), kv_connector=tiers, api_key=["a-secret-of-the-server"])  # fmt: skip
    prompts = [[(7 * i + j) % 300 + 3 for j in range(5 + 5 * i)] for i in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, seed=1), use_tqdm=False)
    llm.generate(["hello"] * 3, SamplingParams(max_tokens=30, seed=2, stop=["a", "e", "b", "c"]), use_tqdm=False)
    with pytest.raises(RequestError):
        llm.generate(["x", "y" * 200], use_tqdm=False)
    assert llm._engine.scheduler.counters.num_preemptions > 0
    connector = llm._engine.scheduler.connector
    assert not tiers or (connector is not None and sum(tier.num_hit_tokens for tier in connector.tiers()) > 0)
    llm.close()
    return folder / "steps"


def test_every_plan_is_reproduced(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded)]) == 0
    assert int(capsys.readouterr().out.split()[0]) > 40


def test_a_trace_holds_no_api_keys_and_only_its_owner_can_read_it(recorded: Path) -> None:
    assert recorded.stat().st_mode & 0o077 == 0
    assert b"a-secret-of-the-server" not in recorded.read_bytes()


def test_replay_reports_the_difference_of_a_changed_trace(recorded: Path) -> None:
    with recorded.open("rb") as file:
        events = list(trace.read(file))
    arrivals = [i for i, event in enumerate(events) if isinstance(event, trace.Arrived)]
    del events[arrivals[2]]
    num_plans, difference = trace.replay(events)
    assert num_plans == 0 and difference is not None and "differs" in difference


def test_a_truncated_trace_replays_to_its_last_complete_frame(recorded: Path) -> None:
    data = recorded.read_bytes()
    num_plans, difference = trace.replay(trace.read(BytesIO(data[: len(data) // 2])))
    assert num_plans > 5 and difference is None


def test_a_trace_of_an_older_version_replays() -> None:
    """Its configuration is flat: the model's facts, the network's settings and those of the engine in one map."""
    data = (Path(__file__).parent / "version_0_2.trace").read_bytes()
    assert b"admin_keys" in data and b"eos_token_ids" in data
    assert trace.replay(trace.read(BytesIO(data))) == (59, None)


def test_a_file_that_is_not_a_trace_gives_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(b"\x05\0\0\0hello")
    assert main(["replay", str(tmp_path / "x")]) == 2
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("pagewire: ") == 2
    with pytest.raises(msgspec.ValidationError):
        list(trace.read(BytesIO(b"\x01\0\0\0\x01")))
