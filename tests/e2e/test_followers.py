"""An engine on two machines, which are addresses of this one: a lead and followers, with a proxy between them that
holds back or cuts what they say. Streams go on over every loss that a spare or a returning follower makes good."""

import json
import os
import re
import shutil
import sys
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import psutil
import pytest
from connections import cut, mailbox_port
from hidden_folder import can_hide, hiding, own_cache
from kv_legs import until_loaded
from open_requests import END_S, OpenRequest, open_stream
from proxy import Proxy
from two_networks import HERE, THERE, can_have_networks, two_networks, unreachable
from waiting import until

from pagewire.commands.metrics import read
from pagewire.engine.checkpoint.source import DEMO_MODEL
from pagewire.tools.servers import Server, free_port

pytestmark = pytest.mark.e2e
Start = Callable[..., Server]
HANG_S = 12.0
TOKENS = 300


class Machines:
    """The launches of one engine."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        proxy: Proxy | None,
        lead_port: int,
        *flags: str,
        host: str = "127.0.0.1",
        sizes: str = "tensor",
        hang_s: float = HANG_S,
    ) -> None:
        """`proxy`: through which followers join; None: there is none. `host`: of the lead. `sizes`: the two ranks are
        tensor-parallel ones, or pipeline's stages; `grid`: four, two in each of two stages."""
        self._start, self._key = start, folder / "key"
        self._address = f"tcp://{host}:{lead_port if proxy is None else proxy.port}"
        parallel = {"tensor": ("tensor",), "pipeline": ("pipeline",), "grid": ("tensor", "pipeline")}[sizes]
        self.lead = start(
            *(flag for size in parallel for flag in (f"--{size}-parallel-size", "2")),
            *("--nnodes", "2", "--join-address", f"tcp://{host}:{lead_port}"),
            *("--key-file", str(self._key), "--hang-timeout-s", str(hang_s), "--outage-wait", "60"),
            *flags,
        )
        until(self._key.exists, "the key is made", END_S)

    def join(self, name: str, host: str, *flags: str, prefix: tuple[str, ...] = ()) -> Server:
        """A follower, which listens on no port for HTTP. `prefix`: what goes before its command."""
        # `Server` adds --port; a follower has no such flag.
        command = (*prefix, sys.executable, "-c", _WITHOUT_PORT)
        options = ("--join", self._address, "--key-file", str(self._key), "--name", name, "--host", host)
        return self._start("launch", *options, *flags, command=command)


_WITHOUT_PORT = "import sys; del sys.argv[1:3]; from pagewire.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(free_port()) as proxy:
        yield proxy


@pytest.fixture
def second_proxy() -> Iterator[Proxy]:
    """Of another engine."""
    with Proxy(free_port()) as proxy:
        yield proxy


@pytest.fixture
def there() -> Iterator[tuple[str, ...]]:
    """What goes before a command that runs on another machine than the test. Ask for it before what the test starts."""
    if not can_have_networks():
        pytest.skip("this user may not make networks")
    with two_networks() as there:
        yield there


@pytest.fixture
def machines(start: Start, tmp_path: Path, proxy: Proxy) -> Machines:
    return Machines(start, tmp_path, proxy, proxy.target)


def long_stream(lead: Server) -> OpenRequest:
    return open_stream(lead, "/v1/completions", max_tokens=TOKENS)


def very_long_stream(lead: Server) -> OpenRequest:
    return open_stream(lead, "/v1/completions", max_tokens=10 * TOKENS)


def text_of(stream: OpenRequest) -> str:
    """The text of a stream, which has ended by its length and without an error."""
    *events, done = stream.events()
    choices = [json.loads(event)["choices"][0] for event in events]
    assert done == "[DONE]" and choices[-1]["finish_reason"] == "length", choices[-1]
    return "".join(choice["text"] for choice in choices)


def assert_whole(stream: OpenRequest, lead: Server) -> None:
    """It has the text of a stream that nothing disturbs."""
    assert text_of(stream) == text_of(long_stream(lead))


def problem_of(server: Server) -> str:
    """What /health says; empty: it is healthy."""
    try:
        server.get("/health")
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    return ""


def says(server: Server, text: str) -> None:
    until(lambda: text in server.log.read_text(), f"the log says {text}", END_S)


def test_an_engine_of_two_machines_heals_and_drains(machines: Machines) -> None:
    """A late follower; a rank of each machine is killed under a stream; SIGTERM at the follower ends all in order."""
    says(machines.lead, "waiting for a follower for worker-1; run there: pagewire launch --join")
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    assert set(follower.children()) == {"worker-1"} and "worker-1" not in machines.lead.children()
    expected = text_of(long_stream(machines.lead))
    stream = long_stream(machines.lead)
    follower.children()["worker-1"].kill()
    says(follower, "worker-1 was killed by SIGKILL.")
    says(machines.lead, "worker-1 is replaced")
    follower.process.terminate()
    assert text_of(stream) == expected
    assert follower.process.wait(END_S) == 0 and machines.lead.process.wait(END_S) == 0
    assert "the launch of worker-1 ends, and with it the engine" in machines.lead.log.read_text()


@pytest.mark.long
def test_a_machine_is_lost_while_the_lead_replaces_its_rank(start: Start, tmp_path: Path, proxy: Proxy) -> None:
    """Nothing runs when it dies, so the lead finds that a mailbox cannot be reached before it notices the death. The
    rank goes to another address, which the core must get to know."""
    machines = Machines(start, tmp_path, proxy, proxy.target, hang_s=20.0)
    first = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    spare = machines.join("c", "127.0.0.3")
    says(spare, "c has joined")
    expected = text_of(long_stream(machines.lead))
    first.kill()
    says(machines.lead, "the mailbox of worker-1, cannot be reached from")
    stream = long_stream(machines.lead)
    says(machines.lead, "b, the machine of worker-1, has not answered for")
    assert text_of(stream) == expected
    assert "core is replaced" in machines.lead.log.read_text()


@pytest.mark.parametrize("is_sparse", [False, pytest.param(True, marks=pytest.mark.long)])
def test_domains_on_two_machines(start: Start, tmp_path: Path, proxy: Proxy, is_sparse: bool) -> None:
    """Each has room for one stream. The domain of the rank that dies and the other one go on, with whole experts on
    each machine, too: tokens go to them through gloo."""
    flags = ["--kv-domains", "2", "--max-num-seqs", "1"]
    if is_sparse:
        flags += [
            "--enable-expert-parallel",
            "--dtype",
            "float32",
            str(families.make_family(tmp_path / "model", "qwen3_moe")),
        ]
    machines = Machines(start, tmp_path, proxy, proxy.target, *flags)
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    expected = text_of(long_stream(machines.lead))

    def both() -> list[OpenRequest]:
        found = [long_stream(machines.lead) for _ in range(2)]
        if not any(stream.has_ended for stream in found):
            return found
        assert [text_of(stream) for stream in found] == [expected] * 2
        return []

    streams = until(both, "both domains serve at once", END_S)
    follower.children()["worker-1"].kill()
    says(machines.lead, "worker-1 is replaced")
    assert [text_of(stream) for stream in streams] == [expected] * 2
    assert machines.lead.stop() == 0 and follower.process.wait(END_S) == 0


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_spare_takes_over_from_a_lost_machine(machines: Machines, how: str) -> None:
    first = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    spare = machines.join("c", "127.0.0.3")
    says(spare, "c has joined")
    stream = long_stream(machines.lead)
    processes = [psutil.Process(first.process.pid), *first.children().values()]
    if how == "killed":
        first.process.kill()
    else:
        for process in processes:
            process.suspend()
    says(machines.lead, "b, the machine of worker-1, has not answered for")
    assert_whole(stream, machines.lead)
    assert set(spare.children()) == {"worker-1"}
    if how == "frozen":
        for process in processes:
            process.resume()
        says(first, "the connection to the lead is lost; its processes here have ended (worker-1)")
        until(lambda: not first.children(), "the processes of the machine that was frozen have ended", END_S)
        until(lambda: first.log.read_text().count("b has joined") == 2, "it joins again, as a spare", END_S)
    assert machines.lead.stop() == 0 and spare.process.wait(END_S) == 0


@pytest.mark.long
def test_a_machine_that_leaves_hands_over_to_a_spare(machines: Machines) -> None:
    """Under a stream, as a planned step and not as a death; then its heir does the same. The last one drains all."""
    first = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    expected = text_of(long_stream(machines.lead))
    for name, host in (("c", "127.0.0.3"), ("d", "127.0.0.4")):
        spare = machines.join(name, host)
        says(spare, f"{name} has joined")
        stream = long_stream(machines.lead)
        first.process.terminate()
        assert first.process.wait(END_S) == 0
        assert "another machine takes over; the processes here end (worker-1)." in first.log.read_text()
        assert text_of(stream) == expected
        assert set(spare.children()) == {"worker-1"}
        first = spare
    said = machines.lead.log.read_text()
    assert "d takes over worker-1 from c, which leaves. Replacing " in said
    assert "has not answered" not in said and "was killed" not in said, said
    assert read(machines.lead.get("/metrics"), 0.0).values["processes_lost_total"] == 0
    first.process.terminate()
    assert first.process.wait(END_S) == 0 and machines.lead.process.wait(END_S) == 0


@pytest.mark.long
@pytest.mark.parametrize(("up", "down"), [(True, True), (True, False), (False, True)])
def test_a_partition_ends_the_ranks_behind_it_before_others_start(
    machines: Machines, proxy: Proxy, up: bool, down: bool
) -> None:
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    stream = long_stream(machines.lead)
    proxy.partition(up=up, down=down)
    says(follower, "the connection to the lead is lost; its processes here have ended (worker-1)")
    until(lambda: not follower.children(), "its ranks have ended", END_S)
    proxy.heal()
    assert_whole(stream, machines.lead)
    assert follower.log.read_text().count("b has joined") == 2
    assert machines.lead.stop() == 0 and follower.process.wait(END_S) == 0


@pytest.mark.long
def test_a_connection_that_breaks_shortly_is_not_noticed(machines: Machines, proxy: Proxy) -> None:
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    rank = follower.children()["worker-1"]
    stream = long_stream(machines.lead)
    proxy.cut()
    proxy.heal()
    assert_whole(stream, machines.lead)
    assert follower.children()["worker-1"] == rank and "Replacing" not in machines.lead.log.read_text()
    assert machines.lead.stop() == 0 and follower.process.wait(END_S) == 0


@pytest.mark.long
def test_a_lead_that_is_killed_ends_the_ranks_and_a_new_one_gets_them(machines: Machines) -> None:
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    machines.lead.kill()
    says(follower, "the connection to the lead is lost; its processes here have ended (worker-1)")
    until(lambda: not follower.children(), "its ranks have ended", END_S)
    machines.lead.start().wait_ready()
    text_of(long_stream(machines.lead))
    assert machines.lead.stop() == 0 and follower.process.wait(END_S) == 0


@pytest.mark.long
def test_without_a_spare_streams_end_with_an_error_after_the_outage_wait(
    start: Start, tmp_path: Path, proxy: Proxy
) -> None:
    machines = Machines(start, tmp_path, proxy, proxy.target, "--outage-wait", "1")
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    stream = very_long_stream(machines.lead)
    follower.kill()
    assert '"code":"engine_failed"' in stream.events()[-1].replace(" ", "")
    assert machines.lead.process.wait(END_S) == 1
    assert "No follower has joined at tcp://127.0.0.1:" in machines.lead.log.read_text()


@pytest.mark.long
@pytest.mark.skipif(not can_hide(), reason="this user may not mount anything")
def test_a_machine_without_the_model_copies_it_and_takes_over(
    start: Start, tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare whose view of the lead's folder is empty: it copies the model while it is a spare, and takes over."""
    model, cache = shutil.copytree(DEMO_MODEL, tmp_path / "model"), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(cache)))
    machines = Machines(start, tmp_path, proxy, proxy.target, "--model", str(model))
    first = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    spare = machines.join("c", "127.0.0.3", prefix=hiding(model))
    says(spare, "config.json cannot be read: No such file or directory; c copies the model from the lead.")
    says(spare, "c has the model in ")
    stream = long_stream(machines.lead)
    first.kill()
    assert_whole(stream, machines.lead)
    assert set(spare.children()) == {"worker-1"}
    (copied,) = (cache / "pagewire" / "models").glob("*/model/model.safetensors")
    assert copied.read_bytes() == (model / "model.safetensors").read_bytes()
    assert machines.lead.stop() == 0 and spare.process.wait(END_S) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "victim", "last_stage"),
    [
        ("pipeline", "worker", {"worker-1"}),
        ("pipeline", "worker-1", {"worker-1"}),
        ("grid", "worker-3", {"worker-2", "worker-3"}),
    ],
)
def test_stages_on_two_machines_heal(
    start: Start, tmp_path: Path, proxy: Proxy, sizes: str, victim: str, last_stage: set[str]
) -> None:
    """What a stage sends the next one goes from machine to machine; either may lose its rank, and then a machine."""
    alone = start().wait_ready()
    expected = text_of(long_stream(alone))
    assert alone.stop() == 0
    machines = Machines(start, tmp_path, proxy, proxy.target, sizes=sizes)
    first = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    assert set(first.children()) == last_stage
    stream = long_stream(machines.lead)
    {**machines.lead.children(), **first.children()}[victim].kill()
    assert text_of(stream) == expected
    spare = machines.join("c", "127.0.0.3")
    says(spare, "c has joined")
    stream = long_stream(machines.lead)
    first.kill()
    assert text_of(stream) == expected
    until(lambda: set(spare.children()) == last_stage, "the other machine has its ranks", END_S)
    assert machines.lead.stop() == 0 and spare.process.wait(END_S) == 0


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["tensor", "pipeline"])
def test_kv_travels_between_two_engines_of_two_machines_each(
    start: Start, tmp_path: Path, proxy: Proxy, second_proxy: Proxy, sizes: str
) -> None:
    """Each rank loads from the same rank of the other engine, also after that one has moved to another machine."""
    # A first rank to which a stage sends has a mailbox on the network, so both kinds of mailboxes are used.
    port, keys = free_port(3), tmp_path / "kv.key"
    common = ("--max-model-len", "2048", "--kv-cache-memory", "64M", "--no-access-log")
    options: dict[str, Any] = {"sizes": sizes, "hang_s": 20.0}  # there are many processes
    patient = "timeout_ms=20000,wait_ms=20000,fetch_timeout_ms=20000"
    serves = f"p2p,serve=tcp://127.0.0.1:{port},size=64M,key-file={keys},role=prefill"
    asks = f"p2p,peer=named,key-file={keys},role=decode,{patient}"
    folders = [tmp_path / "prefill", tmp_path / "decode"]
    for folder in folders:
        folder.mkdir()
    prefill = Machines(start, folders[0], proxy, proxy.target, *common, "--kv-connector", serves, **options)
    first = prefill.join("b", "127.0.0.2")
    prefill.lead.wait_ready()
    flags = (*common, "--kv-connector", asks, "--kv-peers", "127.*")
    decode = Machines(start, folders[1], second_proxy, second_proxy.target, *flags, **options)
    beside = decode.join("c", "127.0.0.3")
    decode.lead.wait_ready()

    until_loaded(prefill.lead, decode.lead, "KV is loaded")
    spare = prefill.join("d", "127.0.0.4")
    says(spare, "d has joined")
    first.process.terminate()
    until(lambda: "worker-1" in spare.children(), "the rank is on another machine", END_S)
    prefill.lead.wait_ready()
    until_loaded(prefill.lead, decode.lead, "KV is loaded from where the rank is now")
    for lead, follower in ((prefill.lead, spare), (decode.lead, beside)):
        assert lead.stop() == 0 and follower.process.wait(END_S) == 0


def cut_until(lead: Server, sentence: re.Pattern[str], process: psutil.Process, port: int) -> None:
    """Breaks this connection again and again, until one has lost a message."""

    def is_noticed() -> bool:
        if sentence.search(lead.log.read_text()):
            return True
        cut(process, port)
        return False

    until(is_noticed, f"the log says {sentence.pattern}", END_S)


@pytest.mark.long
def test_a_connection_between_stages_that_loses_messages_begins_an_epoch(
    start: Start, tmp_path: Path, proxy: Proxy
) -> None:
    """Each of the three that a token takes is cut under a stream until it loses one, and in an idle engine. Without
    numbers only a hang would be noticed, which lasts longer than the test."""
    machines = Machines(start, tmp_path, proxy, proxy.target, "--hang-timeout-s", "60", sizes="pipeline")
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()

    def actors() -> dict[str, psutil.Process]:
        return {**machines.lead.children(), **follower.children()}

    links = [("worker-1", "worker"), ("worker-1", "core"), ("core", "worker-1")]
    for sender, receiver in links:  # an idle engine
        if receiver != "core":  # it is told about memory all the time
            assert cut(actors()[sender], mailbox_port(actors()[receiver])) > 0
    expected = text_of(very_long_stream(machines.lead))
    assert "lost messages" not in machines.lead.log.read_text()
    for sender, receiver in links:
        sentence = re.compile(rf"The connection of {sender} to {receiver} \(tcp://.*\) broke and has lost messages\.")
        stream = very_long_stream(machines.lead)
        before = actors()
        cut_until(machines.lead, sentence, before[sender], mailbox_port(before[receiver]))
        assert text_of(stream) == expected
        assert len(sentence.findall(machines.lead.log.read_text())) == 1
        assert not before["worker"].is_running() and not before["worker-1"].is_running(), "all ranks are replaced"
        assert actors()["core"] == before["core"]
    said = machines.lead.log.read_text()
    assert said.count("Replacing worker, worker-1.") == 3 and "Error" not in said, said
    assert read(machines.lead.get("/metrics"), 0.0).values["processes_lost_total"] == 0
    assert machines.lead.stop() == 0 and follower.process.wait(END_S) == 0


@pytest.mark.long
def test_a_connection_that_breaks_again_and_again_ends_the_engine(
    start: Start, tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ten minutes instead of one, because each time new ranks have to start."""
    (tmp_path / "site").mkdir()
    longer = "import pagewire.procs.liveness\npagewire.procs.liveness.STORM_S = 600.0\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(longer)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), os.pathsep)
    machines = Machines(start, tmp_path, proxy, proxy.target, "--hang-timeout-s", "60", sizes="pipeline")
    follower = machines.join("b", "127.0.0.2")
    machines.lead.wait_ready()
    port = mailbox_port(machines.lead.children()["worker"])
    streams = [very_long_stream(machines.lead)]

    def ends() -> bool:
        if streams[-1].has_ended and streams[-1].events()[-1] == "[DONE]":  # an idle engine loses no message
            streams.append(very_long_stream(machines.lead))
        if (rank := follower.children().get("worker-1")) is not None:
            cut(rank, port)
        return machines.lead.process.poll() is not None

    until(ends, "the engine ends", 5 * END_S)
    assert machines.lead.process.returncode == 1
    said = machines.lead.log.read_text()
    assert "broke and has lost messages, 2 times within 600 s. Replacing worker, worker-1." in said
    assert "6 processes or connections have died within 600 s:" in said
    assert said.count("the connection of worker-1 to worker (tcp://127.0.0.1:") == 6
    assert '"code":"engine_failed"' in streams[-1].events()[-1].replace(" ", "")
    follower.kill()


@pytest.mark.long
@pytest.mark.parametrize("cut_off", ["worker-1", "core", "all"])
def test_mailboxes_that_cannot_be_reached_for_long_pause_streams_without_a_death(
    there: tuple[str, ...], start: Start, tmp_path: Path, cut_off: str
) -> None:
    """The machines still answer each other. An engine without work, in which no message is lost, only tells it. Else
    ranks are replaced when nothing gets further, and begin when the network is back."""
    machines = Machines(start, tmp_path, None, free_port(), host=HERE, sizes="pipeline", hang_s=15.0)
    follower = machines.join("b", THERE, prefix=there)
    machines.lead.wait_ready()
    expected = text_of(long_stream(machines.lead))
    ranks = {**machines.lead.children(), **follower.children()}
    names = ["core", "worker", "worker-1"] if cut_off == "all" else [cut_off]
    ports = [mailbox_port(ranks[name]) for name in names]
    host = THERE if names[-1] == "worker-1" else HERE
    told = f"{host}:{ports[-1]}, the mailbox of {names[-1]}, cannot be reached from "
    if cut_off == "worker-1":  # which sends the core what it takes of its machine all the time
        with unreachable(ports):
            says(machines.lead, told)
        until(lambda: "waits_for" not in machines.lead.get("/health"), "all are reached again", END_S)
        assert text_of(long_stream(machines.lead)) == expected
        assert ranks == {**machines.lead.children(), **follower.children()}

    stream = long_stream(machines.lead)
    with unreachable(ports):
        says(machines.lead, "No step has ended for ")
        until(lambda: not ranks["worker"].is_running(), "the ranks are replaced", END_S)
        until(
            lambda: f"requests wait until it is replaced. It is {told}" in problem_of(machines.lead), "it waits", END_S
        )
    assert text_of(stream) == expected
    said = machines.lead.log.read_text()
    assert "Replacing worker, worker-1." in said and "has not answered" not in said and "was killed" not in said, said
    assert read(machines.lead.get("/metrics"), 0.0).values["processes_lost_total"] == 0, (
        said + "FOLLOWER" + follower.log.read_text()
    )
    assert machines.lead.stop() == 0 and follower.process.wait(END_S) == 0


@pytest.mark.long
def test_a_core_that_a_follower_cannot_reach_any_more_ends_the_engine(
    there: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    """The lead itself reaches all mailboxes, and the ranks complete their steps."""
    machines = Machines(start, tmp_path, None, free_port(), "--outage-wait", "1", host=HERE, sizes="pipeline")
    follower = machines.join("b", THERE, prefix=there)
    machines.lead.wait_ready()
    stream = very_long_stream(machines.lead)
    port = mailbox_port(machines.lead.children()["core"])
    with unreachable([port]):
        assert '"code":"engine_failed"' in stream.events()[-1].replace(" ", "")
        assert machines.lead.process.wait(END_S) == 1
    said = machines.lead.log.read_text()
    problem = f"{HERE}:{port}, the mailbox of core, cannot be reached from {THERE} "
    assert re.search(rf"No step has ended for \d+ s: {problem}", said), said
    assert "(1 s; see --outage-wait)." in said, said
    follower.kill()
