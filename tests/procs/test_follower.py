"""A follower and its connection, with a lead that is played by the test. No process of an engine is started."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from waiting import until_async

from pagewire.config.config import Config, EngineConfig, EngineOptions, ServiceOptions
from pagewire.engine.checkpoint.spec import fingerprint
from pagewire.ipc.codec import Decoder, encode
from pagewire.ipc.control_messages import (
    Assign,
    Beat,
    Begin,
    Bound,
    Copying,
    Gone,
    Join,
    Joined,
    Refused,
    StopAll,
    ToFollower,
    ToLead,
)
from pagewire.ipc.messages import Leave
from pagewire.ipc.zmq_channel import Keys, PeerGone, ZmqContext, read_keys
from pagewire.procs import lead_link, supervisor
from pagewire.procs.follower import Follower, _Host
from pagewire.procs.leases import Lease
from pagewire.procs.model_share import ModelShare
from pagewire.procs.prepare import prepare, prepare_server
from pagewire.procs.reach import Reach, ReachTimes
from pagewire.procs.topology import RENDEZVOUS
from pagewire.tools.servers import free_port

HANG_S = 30.0
TERM = 7


class PlayedLead:
    """The lead's end of the control link."""

    def __init__(self, folder: Path) -> None:
        self._context = ZmqContext(read_keys(folder / "key"))
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._router = self._context.router(self.address)
        self._decoder: Decoder[ToLead] = Decoder(ToLead)
        self.engine: EngineConfig = prepare(Config())
        self.peer = b""  # the incarnation that has joined last
        self._joined: set[bytes] = set()  # incarnations whose `Join` was answered
        self.answers = True  # beats
        self.files = ""  # the address of a `ModelShare`

    async def receive(self, kind: type) -> ToLead:
        """The next message of this kind. Beats are answered meanwhile. What an earlier incarnation has sent is skipped,
        as is a `Join` that was repeated before the answer came."""
        found: list[ToLead] = []

        def take() -> bool:
            while not found and (frames := self._router.receive()) is not None:
                peer, message = frames[0], self._decoder.decode(frames[-1])
                if isinstance(message, Join) and peer not in self._joined:
                    self.peer = peer
                elif isinstance(message, Join) or peer != self.peer:
                    continue
                if isinstance(message, Beat) and self.answers:
                    self.send(Beat(1, message.number))
                if isinstance(message, kind):
                    found.append(message)
            return bool(found)

        await until_async(take, f"a {kind.__name__} arrives", 30.0)
        return found[0]

    def send(self, message: ToFollower) -> None:
        with contextlib.suppress(PeerGone):  # an incarnation that has ended
            self._router.send(self.peer, encode(message))

    async def welcome(self, *, term: int = TERM) -> Join:
        """Lets a follower join."""
        join = await self.receive(Join)
        assert isinstance(join, Join)
        self.join(join.number, term=term)
        return join

    def join(self, number: int, *, term: int = TERM) -> None:
        """Answers the `Join` of this number."""
        self._joined.add(self.peer)
        engine, service = msgspec.json.encode(self.engine), msgspec.json.encode(ServiceOptions())
        self.send(Joined(number, term, HANG_S, 0.0, engine, service, self.files))

    def close(self) -> None:
        self._router.close()
        self._context.close()


class Clock:
    """The clock of leases, which a test can set forward."""

    def __init__(self) -> None:
        self._read = lead_link.sleepless_clock
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return self._read() + self.skipped_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lead_link, "sleepless_clock", clock)
    return clock


Scenario = Callable[[PlayedLead, Follower], Awaitable[None]]


def run(
    folder: Path,
    scenario: Scenario,
    *,
    keys: Keys | None = None,
    model: Path | None = None,
    rejoin_s: float = 60.0,
) -> int:
    """Runs a follower beside the scenario. Its exit code."""
    lead = PlayedLead(folder)

    async def work() -> int:
        follower = Follower(
            lead.address,
            keys or read_keys(folder / "key"),
            host="127.0.0.1",
            name="b",
            model=model,
            rejoin_s=rejoin_s,
            rejoin_flag="--rejoin-timeout",
        )
        running = asyncio.ensure_future(follower.run())
        try:
            await scenario(lead, follower)
            async with asyncio.timeout(30):
                return await running
        finally:
            running.cancel()

    try:
        return asyncio.run(work())
    finally:
        lead.close()


def test_a_follower_joins_binds_its_mailboxes_and_leaves_by_a_signal(tmp_path: Path) -> None:
    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        join = await lead.welcome()
        assert (join.name, join.previous, join.last_term) == ("b", b"", 0)
        await lead.receive(Beat)
        lead.send(Assign(("worker-1",)))
        bound = await lead.receive(Bound)
        assert isinstance(bound, Bound) and list(bound.addresses) == ["worker-1"] and bound.rendezvous == ""
        lead.send(Assign(("worker-1",)))
        assert await lead.receive(Bound) == bound, "the same mailboxes"
        signal.raise_signal(signal.SIGTERM)
        assert await lead.receive(Leave) == Leave(("worker-1",))

    assert run(tmp_path, scenario) == 0


def test_each_group_of_ranks_that_begins_has_a_port_of_its_own_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank is here, so the lead asks this machine where they meet. Another program may take a port."""
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.0)  # the rank waits for a core that does not exist

    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        await lead.welcome()
        await lead.receive(Beat)
        lead.send(Assign(("worker",)))
        bounds = [await lead.receive(Bound)]
        for epoch in (5, 6, 6):
            last = bounds[-1]
            assert isinstance(last, Bound)
            addresses = {"core": f"tcp://127.0.0.1:{free_port()}", RENDEZVOUS: last.rendezvous}
            lead.send(Begin(epoch, epoch, ("worker",), "It died.", addresses))
            if len(bounds) < 3:  # the lead repeats an epoch until a beat confirms it
                bounds.append(await lead.receive(Bound))
        assert len({bound.rendezvous for bound in bounds if isinstance(bound, Bound)}) == 3
        assert len({tuple(bound.addresses.items()) for bound in bounds if isinstance(bound, Bound)}) == 1
        lead.send(Assign(("worker",)))
        assert await lead.receive(Bound) == bounds[-1], "the repeated epoch has changed nothing"
        lead.send(StopAll("The engine ends."))

    assert run(tmp_path, scenario) == 0


@pytest.mark.parametrize("how", ["silence", "gone", "failure"])
def test_a_follower_that_loses_its_lead_joins_again_as_another_incarnation(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        await lead.welcome()
        await lead.receive(Beat)
        before = lead.peer
        if how == "silence":
            lead.answers = False
            clock.skipped_s += HANG_S
        else:
            lead.send(Gone() if how == "gone" else StopAll("why", is_failure=True))
        join = await lead.receive(Join)
        assert isinstance(join, Join) and (join.previous, join.last_term) == (before, TERM) and lead.peer != before
        lead.answers = True
        await lead.welcome(term=TERM + 1)
        await lead.receive(Beat)
        lead.send(StopAll("The engine ends."))

    assert run(tmp_path, scenario) == 0
    said = capsys.readouterr().err
    assert said.count("b has joined the engine") == 2
    assert ("the lead has failed (why)" if how == "failure" else "the connection to the lead is lost") in said


def test_a_lead_that_answers_late_gives_no_lease_that_has_run_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """One that is started later than its follower hears all that the follower has said until then."""
    leases: list[Lease] = []
    begun: list[bool] = []  # what each answer to a `Join` has given

    class Noted(Lease):
        def __init__(self) -> None:
            super().__init__()
            leases.append(self)

        def begin(self, number: int, lease_s: float, now: float) -> bool:
            begun.append(super().begin(number, lease_s, now))
            return begun[-1]

    monkeypatch.setattr(lead_link, "Lease", Noted)

    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        late: list[int] = []
        good: list[int] = []
        while len(good) < 2:
            join = await lead.receive(Join)
            assert isinstance(join, Join)
            age_s = leases[0]._sent[join.number] - leases[0]._sent[1]
            (late if age_s < HANG_S else good).append(join.number)
            clock.skipped_s = HANG_S
        for number in late:
            lead.join(number)
        await until_async(lambda: begun == [False] * len(late), "each of them is too late", 30.0)
        for number in good:
            lead.join(number)
        await until_async(lambda: good[-1] not in leases[0]._sent, "the lease lasts as of the latest answer", 30.0)
        await lead.receive(Beat)
        lead.send(StopAll("The engine ends."))

    assert run(tmp_path, scenario) == 0
    said = capsys.readouterr().err
    assert said.count("b has joined the engine") == 1 and "is lost" not in said, said


def test_an_earlier_lead_is_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        await lead.welcome()
        await lead.receive(Beat)
        lead.send(Gone())
        await lead.welcome(term=TERM - 1)
        await lead.welcome()
        await lead.receive(Beat)
        lead.send(StopAll("The engine ends."))

    assert run(tmp_path, scenario) == 0
    assert f"an earlier lead answers (term {TERM - 1} after {TERM})" in capsys.readouterr().err


def test_missing_and_other_model_files_are_refused_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def missing(lead: PlayedLead, follower: Follower) -> None:
        await lead.welcome()
        refused = await lead.receive(Refused)
        assert isinstance(refused, Refused) and f"{tmp_path / 'none'} does not exist" in refused.reason

    assert run(tmp_path, missing, model=tmp_path / "none") == 2

    async def other(lead: PlayedLead, follower: Follower) -> None:
        lead.engine = replace(lead.engine, model=replace(lead.engine.model, fingerprint="0123456789abcdef"))
        await lead.welcome()
        refused = await lead.receive(Refused)
        assert isinstance(refused, Refused) and "the lead's has 0123456789ab" in refused.reason

    assert run(tmp_path, other) == 2
    assert capsys.readouterr().err.count("b cannot take part") == 2


def test_a_path_of_the_model_that_cannot_be_looked_at_is_refused_with_its_cause(tmp_path: Path) -> None:
    """The system refuses to say whether the path exists, as it does for a folder of another user. The lead offers no
    files to copy."""
    path = "/" + "x" * 300

    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        lead.engine = replace(lead.engine, model=replace(lead.engine.model, path=path))
        await lead.welcome()
        refused = await lead.receive(Refused)
        assert isinstance(refused, Refused)
        assert f"{path} cannot be read: File name too long; copy the lead's there" in refused.reason

    assert run(tmp_path, scenario) == 2


def test_a_machine_without_the_key_file_of_the_kv_is_refused(tmp_path: Path) -> None:
    """It would make one of its own, with which nobody can load what its ranks serve."""
    (tmp_path / "kv").mkdir()
    keys = tmp_path / "kv" / "keys"
    connector = f"p2p,serve=tcp://127.0.0.1:7100,key-file={keys}"

    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        lead.engine = prepare(Config(engine=EngineOptions(kv_connector=(connector,))))
        assert keys.exists(), "the lead has made it"
        keys.unlink()
        await lead.welcome()
        refused = await lead.receive(Refused)
        assert isinstance(refused, Refused) and f"key-file={keys} does not exist there; copy" in refused.reason

    assert run(tmp_path, scenario) == 2
    assert not keys.exists()


@pytest.mark.parametrize(("how", "is_terminal"), [("missing", False), ("missing", True), ("other", False)])
def test_a_machine_without_the_model_copies_it_before_it_takes_actors(
    tmp_path: Path, how: str, is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)

    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        model = lead.engine.model
        copy = shutil.copytree(model.path, tmp_path / "lead")
        here = copy if how == "missing" else Path(model.path)  # other times than those of the copy
        for file in copy.iterdir():
            os.utime(file, (1, 1))
        model = replace(model, path=str(here), fingerprint=fingerprint(copy))
        share = ModelShare("127.0.0.1", read_keys(tmp_path / "key"), replace(model, path=str(copy)))
        if how == "missing":
            model = replace(model, path=str(tmp_path / "none"))
        lead.engine = replace(lead.engine, model=model)
        lead.files = share.address
        try:
            await lead.welcome()
            await lead.receive(Beat)
            lead.send(Assign(("worker-1",)))
            copied = await lead.receive(Copying)
            assert isinstance(copied, Copying) and 0 < copied.done_bytes <= copied.total_bytes
            assert isinstance(await lead.receive(Bound), Bound)
        finally:
            share.close()
        lead.send(StopAll("The engine ends."))

    assert run(tmp_path, scenario) == 0
    said = capsys.readouterr().err
    why = "none does not exist there" if how == "missing" else "are not the lead's (fingerprint "
    assert why in said and "; b copies the model from the lead." in said
    (copied,) = (tmp_path / "cache" / "pagewire" / "models").glob("pagewire-demo-*/model")
    assert ("copying the model: " in said, "b has copied 100 % of " in said) == (is_terminal, not is_terminal)
    assert f"b has the model in {copied}." in said and (copied / "config.json").stat().st_mtime == 1


def test_a_refusal_ends_it_with_the_lead_s_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        await lead.receive(Join)
        lead.send(Refused("b cannot join: it has torch 1.0, and the lead has 2.0."))

    assert run(tmp_path, scenario) == 2
    assert capsys.readouterr().err == "pagewire: b cannot join: it has torch 1.0, and the lead has 2.0.\n"


@pytest.mark.long
def test_another_key_is_a_sentence_after_a_bounded_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(lead: PlayedLead, follower: Follower) -> None:
        pass

    assert run(tmp_path, scenario, keys=read_keys(tmp_path / "other"), rejoin_s=6.5) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert "accepts connections and does not answer: its key file differs from this one" in first
    assert (
        last.startswith("pagewire: no lead for 6.5 s (see --rejoin-timeout): tcp:") and "its key file differs" in last
    )


def test_an_epoch_that_the_lead_repeats_is_carried_out_once() -> None:
    """Also while it is being carried out: the processes that it ends may take a while."""
    begins = [Begin(epoch, epoch, ("worker-1",), "It died.", {}) for epoch in (5, 6, 7)]
    config = prepare_server(Config())
    host = _Host(config, begins[0], ("worker-1",), {}, keys=None, here="b", on_change=lambda *_: None, weight_fds=())
    host.obey(begins[1])
    assert host._begins.pop() == begins[1], "it has begun"
    for begin in (*begins, begins[1], begins[2]):
        host.obey(begin)
    assert host._begins == [begins[2]]


def test_a_mailbox_that_its_processes_cannot_reach_is_told_to_the_lead_until_it_can_be_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario() -> None:
        told: list[tuple[str, dict[str, str]]] = []
        port = free_port()
        addresses = {
            "core": f"tcp://127.0.0.1:{port}",
            "worker": "tcp://127.0.0.1:1",  # no process here sends to it
            "worker-1": "tcp://127.0.0.1:2",  # its own
        }
        config = prepare_server(Config(engine=EngineOptions(tensor_parallel_size=2)))
        host = _Host(
            config,
            Begin(5, 5, (), "", addresses),
            ("worker-1",),
            {},
            keys=None,
            here="10.0.0.2",
            on_change=lambda epoch, states, problem, unreached: told.append((problem, dict(unreached))),
            weight_fds=(),
        )
        host._reach = Reach("10.0.0.2", ReachTimes(patience_s=0.0))
        context = ZmqContext()
        await host._gather(context)
        context.close()

        async def look() -> tuple[str, dict[str, str]]:
            await host._look_elsewhere()
            return told[-1]

        while not (found := await look())[0]:
            await asyncio.sleep(0)
        problem, unreached = found
        assert unreached == {"core": f"tcp://127.0.0.1:{port}"}
        assert problem.startswith(f"127.0.0.1:{port}, the mailbox of core, cannot be reached from 10.0.0.2 (")
        assert "worker" not in problem
        with socket.create_server(("127.0.0.1", port)):
            while await look() != ("", {}):
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert capsys.readouterr().err.count("the mailbox of core, cannot be reached") == 1
