"""Settings change while streams run: each has its effect, and no stream is disturbed or has other tokens."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

from pagewire.config.live import LIVE
from pagewire.engine.core import trace
from pagewire.tools.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN = {"Authorization": "Bearer admin"}
LOAD, PROBE = {"Authorization": "Bearer load"}, {"Authorization": "Bearer probe"}
NUM_STREAMS = 4
FOREVER = 100_000_000
HANG_TIMEOUT_S = 1000.0  # at the start: no process of a busy machine counts as hung


def body(number: int) -> dict[str, object]:
    prompt = f"Count from {number} to ninety."
    return {"prompt": prompt, "max_tokens": 150, "ignore_eos": True, "stream": True, "temperature": 0.8, "seed": number}


class Load:
    """Streams that are asked for again and again. A refusal is one of the settings' effects, an error in a stream or
    another text is not."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = False
        self._threads: list[threading.Thread] = []
        self.texts: list[set[str]] = [set() for _ in range(NUM_STREAMS)]
        self.num_ended = 0
        self.open: dict[int, int] = {}  # number of the stream → events that have come
        self.complaints: list[str] = []
        self.may_be_slow = False  # a request may take longer than it may take

    def stream(self, number: int) -> None:
        is_excused, text, events = self.may_be_slow, [], 0
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body(number), headers=LOAD, timeout=120) as got:
            if got.status_code != 200:
                return
            for line in got.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                events += 1
                self.open[number] = events
                event = json.loads(data)
                if "error" in event:
                    if not (is_excused or self.may_be_slow):
                        self.complaints.append(data)
                    break
                text.append(event["choices"][0]["text"])
            else:
                self.texts[number].add("".join(text))
                self.num_ended += 1
        self.open.pop(number, None)

    def _run(self, number: int) -> None:
        while not self._is_over:
            try:
                self.stream(number)
            except httpx.HTTPError as error:
                self.complaints.append(repr(error))
                return

    def __enter__(self) -> "Load":
        for number in range(NUM_STREAMS):
            self._threads.append(threading.Thread(target=self._run, args=(number,)))
            self._threads[-1].start()
        until(lambda: len(self.open) > 0, "streams run", 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()


def patch(server: Server, **changes: object) -> dict[str, Any]:
    answer = httpx.patch(f"{server.url}/admin/settings", json=changes, headers=ADMIN, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def settings(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/admin/settings", headers=ADMIN, timeout=60).json()
    return found


def values(server: Server) -> dict[str, Any]:
    return {one["name"]: one["value"] for one in settings(server)["data"]}


def probe(server: Server, headers: Mapping[str, str] = {}, **more: object) -> httpx.Response:
    ask = {"prompt": "a", "max_tokens": 2, **more}
    return httpx.post(f"{server.url}/v1/completions", json=ask, headers={**PROBE, **headers}, timeout=60)


def log_from(server: Server, place: int) -> str:
    return server.log.read_bytes()[place:].decode()


class Effects:
    """For each setting a change, and what is seen of it. They are undone one after the other."""

    def __init__(self, server: Server, load: Load) -> None:
        self.server = server
        self.load = load

    def metric(self, name: str) -> float:
        url = f"{self.server.url}/metrics"
        lines = httpx.get(url, headers=PROBE, timeout=60).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == f"pagewire:{name}")

    def running(self) -> float:
        return float(httpx.get(f"{self.server.url}/load", headers=PROBE, timeout=60).json()["num_running"])

    def stays_at(self, most: int) -> bool:
        """Whether no more run at once, once all api processes know how many run."""
        return any(max(self._seen()) <= most for _ in range(3))

    def _seen(self) -> list[float]:
        """How many run, again and again while streams end."""
        seen, ended = [], self.load.num_ended

        def have_ended() -> bool:
            seen.append(self.running())
            return self.load.num_ended > ended + 2 * NUM_STREAMS

        until(have_ended, "streams end", 60)
        return seen

    def max_num_seqs(self) -> None:
        until(lambda: self.running() > 2, "more than two run", 60)
        patch(self.server, max_num_seqs=2)
        until(lambda: 0 < self.running() <= 2, "two run", 60)
        assert self.stays_at(2)

    def latency_classes(self) -> None:
        """With the policy that needs them."""
        patch(self.server, latency_classes={"chat": {"ttft_ms": 50}}, scheduling_policy="slo")
        assert probe(self.server, {"X-Latency-Class": "talk"}).status_code == 400
        assert probe(self.server, {"X-Latency-Class": "chat"}).status_code == 200
        assert self.metric("slo_target_seconds") == 0.05
        patch(self.server, latency_classes=None, scheduling_policy="fcfs")

    def scheduling_policy(self) -> None:
        """An urgent request interrupts the stream that has the only row."""
        patch(self.server, max_num_seqs=1)
        until(lambda: self.running() == 1, "one runs", 60)
        before = self.metric("num_preemptions_total")
        assert probe(self.server, priority=-9).status_code == 200
        assert self.metric("num_preemptions_total") == before
        patch(self.server, scheduling_policy="priority")
        until(lambda: self._interrupts(before), "it interrupts", 60)

    def _interrupts(self, before: float) -> bool:
        return probe(self.server, priority=-9).status_code == 200 and self.metric("num_preemptions_total") > before

    def itl_target_ms(self) -> None:
        """Only the plans show it."""
        patch(self.server, itl_target_ms=5.0)

    def max_num_batched_tokens(self) -> None:
        patch(self.server, max_num_batched_tokens=16)
        assert probe(self.server, prompt=[7] * 100).status_code == 200

    def max_queued_requests(self) -> None:
        patch(self.server, max_num_seqs=1, max_queued_requests=1)
        until(lambda: probe(self.server, n=1).status_code == 429, "the queue is full", 60)

    def max_queued_tokens(self) -> None:
        patch(self.server, max_queued_tokens=200)
        assert "at most 200 in" in probe(self.server, max_tokens=300).text

    def speculative(self) -> None:
        until(lambda: self.metric("spec_decode_num_draft_tokens_total") > 0, "draft tokens are computed", 60)
        patch(self.server, speculative=None)

        def are_none() -> bool:
            before, ended = self.metric("spec_decode_num_draft_tokens_total"), self.load.num_ended
            until(lambda: self.load.num_ended > ended + 1, "streams end", 60)
            return self.metric("spec_decode_num_draft_tokens_total") == before

        until(are_none, "no more draft tokens are computed", 60)

    def kv_connector(self) -> None:
        before = self.metric("kv_tier_capacity_blocks")
        patch(self.server, kv_connector=["host,size=1M"])
        until(lambda: 0 < self.metric("kv_tier_capacity_blocks") < before / 3, "the tier is smaller", 60)

    def log_level(self) -> None:
        patch(self.server, log_level="error")
        self._is_silent()

    def access_log(self) -> None:
        patch(self.server, access_log=False)
        self._is_silent()

    def _is_silent(self) -> None:
        httpx.get(f"{self.server.url}/v1/models", headers={**PROBE, "x-request-id": "unlogged"}, timeout=60)
        assert "unlogged" not in self.server.log.read_text()

    def enable_log_requests(self) -> None:
        patch(self.server, enable_log_requests=True)
        place = self.server.log.stat().st_size
        probe(self.server)
        until(lambda: "ended=" in log_from(self.server, place), "the request is logged", 60)

    def requests_per_minute(self) -> None:
        patch(self.server, requests_per_minute=1)
        assert any("limit of 1 requests" in probe(self.server).text for _ in range(4))

    def tokens_per_minute(self) -> None:
        patch(self.server, tokens_per_minute=3)
        assert any("limit of 3 tokens" in probe(self.server).text for _ in range(8))

    def allowed_origins(self) -> None:
        page = {"Origin": "https://a.example"}
        assert probe(self.server, page).status_code == 403
        patch(self.server, allowed_origins=["https://a.example"])
        assert probe(self.server, page).headers["access-control-allow-origin"] == "https://a.example"

    def request_timeout_s(self) -> None:
        self.load.may_be_slow = True
        patch(self.server, request_timeout_s=0.01)
        answer = probe(self.server, max_tokens=1000, ignore_eos=True)
        assert answer.status_code == 504 and "longer than 0.01 s" in answer.text
        patch(self.server, request_timeout_s=None)
        ended = self.load.num_ended
        until(lambda: self.load.num_ended > ended + 2 * NUM_STREAMS, "those streams have ended", 60)
        self.load.may_be_slow = False

    def hang_timeout_s(self) -> None:
        """A grammar process that hangs disturbs nobody who has no grammar."""
        patch(self.server, hang_timeout_s=6.0)
        (process,) = self.server.of_kind("grammar")
        process.suspend()
        until(lambda: "grammar has said nothing for" in self.server.log.read_text(), "it counts as hung", 60)
        patch(self.server, hang_timeout_s=HANG_TIMEOUT_S)
        until(lambda: "grammar is replaced" in self.server.log.read_text(), "it is replaced", 60)

    def start_timeout_s(self) -> None:
        patch(self.server, start_timeout_s=700.0)

    def outage_wait(self) -> None:
        patch(self.server, outage_wait=20.0)

    def drain_timeout(self) -> None:
        """`test_changes_are_kept_and_files_are_read_again` ends a server with it."""
        patch(self.server, drain_timeout=50.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    (folder / "keys").write_text(f"load requests_per_minute={FOREVER} tokens_per_minute={FOREVER}\nprobe\n")
    (folder / "file.toml").write_text("max_queued_requests = 1000\n")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = ["--admin-api-key", "admin", "--api-key-file", str(folder / "keys"), "--config", str(folder / "file.toml")]
    flags += ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--speculative", "ngram,tokens=3"]
    flags += ["--kv-cache-memory", "64M", "--kv-connector", "host,size=8M", "--record-trace", str(folder / "steps")]
    flags += ["--api-processes", "2", "--state", str(folder / "state"), "--hang-timeout-s", str(HANG_TIMEOUT_S)]
    server = Server(folder / "server", *flags)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def test_each_change_has_its_effect_and_no_stream_is_disturbed(server: Server, folder: Path) -> None:
    alone = Load(server.url)
    for number in range(NUM_STREAMS):
        alone.stream(number)
    start = values(server)
    with Load(server.url) as load:
        effects = Effects(server, load)
        for one in LIVE:
            until(lambda: len(load.open) > 0, "a stream runs", 60)
            before = load.num_ended
            getattr(effects, one.name)()
            found = settings(server)
            changed = [past for past in found["history"] if past["name"] == one.name]
            assert changed and changed[-1]["who"] == "key 8c6976e5", one.name
            patch(server, **start)
            assert all(values(server) == start for _ in range(4)), "all api processes say so"
            until(lambda before=before: load.num_ended > before, "streams go on", 60)  # type: ignore[misc]
    assert load.complaints == [] and load.texts == alone.texts
    assert all(len(texts) == 1 for texts in alone.texts)
    with (folder / "steps").open("rb") as file:
        events = list(trace.read(file))
    num_plans, difference = trace.replay(events)
    assert difference is None and num_plans > 1000
    most = sizes = 0
    for event in events:
        if isinstance(event, trace.Changed):
            most = event.config.max_num_batched_tokens
            sizes += most == 16
        elif isinstance(event, trace.Planned) and event.plan is not None and most:
            assert sum(memoryview(event.plan.counts).cast("i")) <= most
    assert sizes == 1, "the trace has the change"


def test_a_change_is_refused_whole_and_needs_the_key_of_an_administrator(server: Server) -> None:
    before = settings(server)
    url = f"{server.url}/admin/settings"
    for changes, status, words in (
        ({"itl_target_ms": 5, "max_num_seqs": 9}, 400, "max_num_seqs 9 is more than the 8"),
        ({"itl_target_ms": 5, "port": 1}, 400, "port cannot change while the server runs: it needs a restart"),
        ({}, 400, "Say what to change"),
        ([], 400, ""),
    ):
        answer = httpx.patch(url, json=changes, headers=ADMIN, timeout=60)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
    for headers in ({}, PROBE):
        assert httpx.patch(url, json={"max_num_seqs": 3}, headers=headers, timeout=60).status_code == 401
        assert httpx.get(url, headers=headers, timeout=60).status_code == 401
    assert settings(server) == before
    assert "port" in before["restart"] and "dtype" in before["reload"]


def test_changes_survive_processes_and_servers_and_files_are_read_again(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    patch(server, max_num_seqs=2, max_queued_requests=900, drain_timeout=0.0)
    (core,) = server.of_kind("core")
    core.kill()
    until(lambda: "core is replaced" in server.log.read_text(), "another core runs", 60)
    with Load(server.url) as load:
        effects = Effects(server, load)
        until(lambda: effects.running() == 2, "two run", 60)
        assert effects.stays_at(2)
    (folder / "file.toml").write_text("max_queued_requests = 800\nmax_head_size = 2048\n")
    (folder / "keys").write_text(f"load tokens_per_minute={FOREVER}\nprobe requests_per_minute=1\nother\n")
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: "SIGHUP: max_head_size needs a restart" in server.log.read_text(), "the file is read again", 60)
    found = settings(server)
    assert [(past["name"], past["new"], past["who"]) for past in found["history"][-2:]] == [
        ("max_queued_requests", 800, "SIGHUP"),
        ("api_keys", "3 keys", "SIGHUP"),
    ]
    assert values(server)["max_num_seqs"] == 2, "the file says nothing new of it"
    assert probe(server, {"Authorization": "Bearer other"}).status_code == 200
    assert any("limit of 1 requests" in probe(server).text for _ in range(4))
    (folder / "file.toml").write_text("max_queued_requests = 'many'\n")
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: "Nothing was changed." in server.log.read_text(), "the file is refused", 60)

    # The drain limit ends a stream that would go on for long. There are two, and each is followed by another one, so
    # that one runs whenever the server stops.
    lines: list[str] = []

    def read() -> None:
        ask = {**body(1), "max_tokens": 7000}
        with suppress(httpx.HTTPError):
            while True:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=ask, headers=LOAD, timeout=120) as got:
                    if got.status_code != 200:
                        return
                    lines.extend(got.iter_lines())

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    until(lambda: _runs(server), "a stream runs", 60)
    assert server.stop() == 0
    for reader in readers:
        reader.join()
    assert any("shutting down" in line for line in lines), lines[-3:]

    (folder / "file.toml").write_text("max_queued_requests = 800\n")
    flags = ["--admin-api-key", "admin", "--api-key", "probe", "--max-num-seqs", "8", "--kv-cache-memory", "64M"]
    later = Server(tmp_path / "later", *flags, "--state", str(folder / "state"), "--drain-timeout", "9")
    try:
        later.wait_ready()
        kept = {one["name"]: one["value"] for one in settings(later)["data"] if one["kept"]}
        assert kept == {"max_num_seqs": 2}
        said = later.log.read_text()
        assert "settings that were changed before hold again: max_num_seqs = 2" in said
        assert "--drain-timeout is another one than when drain_timeout was changed, and holds now" in said
        assert settings(later)["history"] == found["history"]
    finally:
        later.close()


def _runs(server: Server) -> bool:
    return bool(httpx.get(f"{server.url}/load", headers=LOAD, timeout=60).json()["num_running"])


@pytest.mark.long
def test_engines_that_share_the_requests_change_together_and_stay_so_when_they_restart(tmp_path: Path) -> None:
    flags = ["--admin-api-key", "admin", "--data-parallel-size", "2", "--max-num-seqs", "4", "--kv-cache-memory", "64M"]
    flags += ["--enable-model-swap", "--state", str(tmp_path / "state")]
    server = Server(tmp_path / "server", *flags)
    try:
        server.wait_ready()
        alone = Load(server.url)
        for number in range(NUM_STREAMS):
            alone.stream(number)
        with Load(server.url) as load:
            effects = Effects(server, load)
            until(lambda: effects.running() > 2, "both engines run two", 60)
            patch(server, max_num_seqs=1)
            ended = load.num_ended
            until(lambda: load.num_ended > ended + 2 * NUM_STREAMS, "what ran has ended", 60)
            assert effects.stays_at(2)
            os.kill(server.process.pid, signal.SIGHUP)
            until(lambda: "every engine was restarted" in server.log.read_text(), "the engines restart", 300)
            assert effects.stays_at(2) and values(server)["max_num_seqs"] == 1
            # What is loaded in their place has the settings, too, and room for no more.
            swapped = httpx.post(f"{server.url}/admin/models", json={"dtype": "float32"}, headers=ADMIN, timeout=300)
            assert swapped.status_code in (200, 202), swapped.text
        until(lambda: _answers(server), "another engine serves", 300)
        found = {one["name"]: one for one in settings(server)["data"]}["max_num_seqs"]
        assert (found["value"], found["within"], found["kept"]) == (1, 1, True)
        assert [past["new"] for past in settings(server)["history"]] == [1]
        assert load.complaints == []
    finally:
        server.close()


def _answers(server: Server) -> bool:
    try:
        cards = httpx.get(f"{server.url}/admin/models", headers=ADMIN, timeout=60).json()["data"]
    except httpx.HTTPError:
        return False
    return len(cards) == 2 and cards[-1]["state"] == "serving"
