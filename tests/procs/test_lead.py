"""The lead before its processes start: real sockets, and followers that are played by the test."""

import asyncio
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from waiting import until_async

from pagewire.config.config import Config, EngineOptions, ListenOptions, ServiceOptions
from pagewire.config.flags import make_config
from pagewire.engine.checkpoint.spec import fingerprint
from pagewire.errors import ConfigError
from pagewire.ipc.codec import Decoder
from pagewire.ipc.control_messages import (
    Assign,
    Away,
    Beat,
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
from pagewire.ipc.zmq_channel import ZmqContext, ZmqDealer, read_keys
from pagewire.procs.lead import Lead, make_lead
from pagewire.procs.leases import Machine
from pagewire.procs.machine import versions_here
from pagewire.procs.model_copy import ModelCopy
from pagewire.procs.prepare import prepare_server
from pagewire.procs.reach import Reach, ReachTimes
from pagewire.procs.remote import RemoteProcess
from pagewire.procs.supervisor import Child
from pagewire.tools.servers import free_port

CLOCK = 1_000_000.0  # of followers, seconds since 1970: far from the lead's
HANG_S = 60.0  # the followers of most tests do not beat
START_S = 20.0  # less than the time after which a silent follower is lost


def config(folder: Path, **service: object) -> Config:
    port = free_port(2)
    options = {
        "nnodes": 2,
        "join_address": f"tcp://127.0.0.1:{port}",
        "key_file": str(folder / "key"),
        "hang_timeout_s": HANG_S,
    }
    return Config(
        engine=EngineOptions(tensor_parallel_size=2),
        listen=ListenOptions(port=port + 1),
        service=ServiceOptions(**(options | service)),  # type: ignore[arg-type]
    )


class Clock:
    """Stands in for `time` in the lead."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 1000.0
        self.tick_s = 0.0  # how far each look at the clock moves it

    def monotonic(self) -> float:
        self.now += self.tick_s
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pagewire.procs.lead.time", clock)
    return clock


class Peer:
    """One incarnation of a follower."""

    def __init__(self, lead: Lead, folder: Path, name: bytes) -> None:
        self._context = ZmqContext(read_keys(folder / "key"))
        self._dealer: ZmqDealer = self._context.dealer(lead._join_address, name)
        self._decoder: Decoder[ToFollower] = Decoder(ToFollower)
        self.name = name

    def send(self, message: ToLead) -> None:
        self._dealer.send(message)

    async def receive(self) -> ToFollower:
        data = await until_async(self._dealer.receive, "the lead answers", 30.0)
        assert data is not None
        return self._decoder.decode(data)

    def close(self) -> None:
        self._dealer.close()
        self._context.close()


def join(**changes: object) -> Join:
    return replace(Join(1, "b", versions_here(), 0, CLOCK), **changes)


def run(folder: Path, scenario: Callable[[Lead, Callable[[bytes], Peer]], Awaitable[None]], **service: object) -> int:
    """Runs a lead that waits for its follower, and the scenario. The exit code of the lead."""
    peers: list[Peer] = []

    async def work() -> int:
        lead = make_lead(prepare_server(config(folder, **service)))

        def peer(name: bytes) -> Peer:
            peers.append(Peer(lead, folder, name))
            return peers[-1]

        running = asyncio.ensure_future(lead.run())
        try:
            await scenario(lead, peer)
            lead.on_signal(signal.SIGTERM)
            return await running
        finally:
            running.cancel()

    try:
        return asyncio.run(work())
    finally:
        for one in peers:
            one.close()


def test_a_follower_joins_and_is_told_its_actors_until_it_has_bound_them(tmp_path: Path) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        follower = peer(b"\1a")
        follower.send(join())
        joined = await follower.receive()
        assert isinstance(joined, Joined) and joined.hang_timeout_s == HANG_S and joined.term > 1_700_000_000
        assert await follower.receive() == Assign(("worker-1",))
        follower.send(Beat(2, 0))
        answer = await follower.receive()
        assert isinstance(answer, Beat) and answer.echo == 2
        assert await follower.receive() == Assign(("worker-1",)), "it is repeated, because a connection may lose it"

    assert run(tmp_path, scenario) == 0


def test_another_version_is_refused_in_a_sentence_on_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        other, good = peer(b"\1a"), peer(b"\1b")
        other.send(join(versions=replace(versions_here(), torch="1.0")))
        refused = await other.receive()
        assert isinstance(refused, Refused)
        assert refused.reason.startswith("b cannot join: it has torch 1.0, and the lead has ")
        good.send(join())
        assert isinstance(await good.receive(), Joined)

    assert run(tmp_path, scenario) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum("it has torch 1.0" in line for line in lines) == 1
    assert sum("the clock of b differs by -1" in line for line in lines) == 1


def test_the_lead_gives_the_model_and_waits_for_those_who_copy_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        follower = peer(b"\1a")
        follower.send(join())
        joined = await follower.receive()
        assert isinstance(joined, Joined)
        model = ModelCopy(
            joined.files,
            read_keys(tmp_path / "key"),
            lead._config.model,
            cache=tmp_path / "cache",
            is_over=lambda: False,
            on_progress=lambda done, total: None,
        )
        found = await asyncio.to_thread(model.run)
        assert fingerprint(Path(found.path)) == lead._config.model.fingerprint
        for i in range(1, 5):
            follower.send(Copying(i * 10**8, 10**9))
            follower.send(Beat(i + 1, 0))
            at = lead._copied_at
            await until_async(lambda at=at: lead._copied_at > at, "the lead has heard of it")  # type: ignore[misc]
            assert f"waiting for b, which copies the model ({i}0 % of 1.00 GB)" == lead._copies
        lead._copied_at += 0.5  # as if time had passed
        at = lead._copied_at
        follower.send(Copying(4 * 10**8, 10**9))
        follower.send(Beat(6, 0))
        while not (isinstance(answer := await follower.receive(), Beat) and answer.echo == 6):
            pass
        assert lead._copied_at == at, "no more has come"
        follower.send(Copying(10**9, 10**9))
        await until_async(lambda: not lead._copies, "it has the model")

    assert run(tmp_path, scenario) == 0


def test_a_lead_that_is_stopped_while_it_waits_ends_those_that_have_joined(tmp_path: Path) -> None:
    """Followers of a lead that has failed wait for the next one; those of a lead that was stopped end with it."""

    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        follower = peer(b"\1a")
        follower.send(join())
        assert isinstance(await follower.receive(), Joined) and await follower.receive() == Assign(("worker-1",))
        lead.on_signal(signal.SIGTERM)
        assert await follower.receive() == StopAll("stopped while starting")

    assert run(tmp_path, scenario) == 0


def test_an_unknown_incarnation_is_told_to_join_again(tmp_path: Path) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        stranger = peer(b"\1a")
        stranger.send(Beat(7, 3))
        assert await stranger.receive() == Gone()

    assert run(tmp_path, scenario) == 0


@pytest.mark.parametrize("message", [Leave(("worker-1",)), Away()])
def test_a_spare_takes_the_place_of_a_follower_that_leaves(tmp_path: Path, message: Leave | Away) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        first, spare = peer(b"\1a"), peer(b"\1b")
        first.send(join())
        assert isinstance(await first.receive(), Joined) and await first.receive() == Assign(("worker-1",))
        spare.send(join())
        assert isinstance(await spare.receive(), Joined)
        first.send(message)
        assert await spare.receive() == Assign(("worker-1",))

    assert run(tmp_path, scenario) == 0


def test_a_follower_that_joins_again_takes_the_place_of_its_earlier_incarnation(tmp_path: Path) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        first, again = peer(b"\1a"), peer(b"\1b")
        first.send(join())
        joined = await first.receive()
        assert isinstance(joined, Joined) and await first.receive() == Assign(("worker-1",))
        again.send(join(previous=b"\1a", last_term=joined.term))
        found = await again.receive()
        assert isinstance(found, Joined) and found.term == joined.term + 1, "nothing has begun in the term before"
        assert await first.receive() == Gone() and await again.receive() == Assign(("worker-1",))

    assert run(tmp_path, scenario) == 0


async def one_leaves(lead: Lead, peer: Callable[[bytes], Peer]) -> tuple[Machine, Machine]:
    """(a machine that works and leaves, its heir, which has no mailboxes yet)."""
    for name in (b"\1a", b"\1b"):
        follower = peer(name)
        follower.send(join())
        assert isinstance(await follower.receive(), Joined)
    first, heir = lead._fleet.machines
    await until_async(lambda: first.actors, "it has ranks")
    first.begins_at, first.is_leaving = 1, True
    assert lead._fleet.deal_heirs() == [heir]
    return first, heir


def test_a_death_relieves_a_machine_that_leaves_only_if_its_heir_has_mailboxes(tmp_path: Path) -> None:
    """Else the engine would wait for a machine that still copies the model, while the other one could go on."""

    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        first, heir = await one_leaves(lead, peer)

        async def replace_core() -> None:
            core = lead._children["core"] = Child("core", RemoteProcess(), 1)
            core.process.kill()
            replacing = asyncio.ensure_future(lead._replace([core]))
            await asyncio.sleep(0)
            replacing.cancel()  # it may wait for the process, too
            await asyncio.wait({replacing})
            del lead._children["core"]

        await replace_core()
        assert list(lead._fleet.machines) == [first, heir]
        heir.bound = Bound({"worker-1": "tcp://127.0.0.1:1"}, "")
        await replace_core()
        assert list(lead._fleet.machines) == [heir]

    assert run(tmp_path, scenario) == 0


def test_while_ranks_are_replaced_anyway_a_machine_that_leaves_is_relieved(tmp_path: Path) -> None:
    """It is what the lead waits for: its mailboxes cannot be reached any more."""

    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        first, heir = await one_leaves(lead, peer)
        heir.bound = Bound({"worker-1": "tcp://127.0.0.1:1"}, "")
        first.heard(unreached(lead, 2), first.heard_at)
        waiting = asyncio.ensure_future(lead._complete(30.0, "--outage-wait", drains=True))
        await until_async(lambda: first.peer in lead._fleet._relieved, "it is relieved, and not lost")
        waiting.cancel()
        await asyncio.wait({waiting})

    assert run(tmp_path, scenario) == 0


def test_an_heir_that_cannot_take_part_leaves_the_ranks_of_the_other_machine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        first, heir = peer(b"\1a"), peer(b"\1b")
        first.send(join())
        assert isinstance(await first.receive(), Joined) and await first.receive() == Assign(("worker-1",))
        heir.send(join(name="c"))
        assert isinstance(await heir.receive(), Joined)
        machine = lead._fleet.machines[0]
        machine.begins_at, machine.is_leaving = 1, True
        child = lead._children["worker-1"] = Child("worker-1", RemoteProcess(), 1)
        assert [one.name for one in lead._fleet.deal_heirs()] == ["c"]
        heir.send(Refused("c cannot take part: it has no room."))
        assert await heir.receive() == Gone()
        assert lead._fleet.machines == (machine,)
        assert child.process.returncode is None and not lead._moved

    assert run(tmp_path, scenario) == 0
    said = capsys.readouterr().err
    assert "pagewire: c, which was to run worker-1, cannot take part.\n" in said and "the machine of" not in said


def test_a_follower_with_another_key_is_named_once_in_the_log_and_where_it_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        await until_async(lambda: lead._router is not None, "the lead listens")
        other = ZmqContext(read_keys(tmp_path / "other"))
        other.dealer(lead._join_address)
        waits = "waiting for a follower for worker-1 (127.0.0.1 tried with another key file)"
        await until_async(lambda: lead._waits_for("worker-1") == waits, "the lead names it", 30.0)
        other.dealer(lead._join_address)
        follower = peer(b"\1a")
        follower.send(join())
        assert isinstance(await follower.receive(), Joined)
        other.close()

    assert run(tmp_path, scenario) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "was refused" in line)
    assert line.startswith("pagewire: 127.0.0.1 was refused at tcp://127.0.0.1:")
    assert line.endswith(f"its key file is not the one here. Copy {tmp_path / 'key'} there.")


def test_a_mailbox_that_cannot_be_reached_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    port = free_port()
    problem = f"127.0.0.1:{port}, the mailbox of worker-1, cannot be reached from 127.0.0.1 (Connection refused): "

    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        lead._reach = Reach("127.0.0.1", ReachTimes(patience_s=0.0))
        follower = peer(b"\1a")
        follower.send(join())
        assert isinstance(await follower.receive(), Joined)
        follower.send(Bound({"worker-1": f"tcp://127.0.0.1:{port}"}, f"tcp://127.0.0.1:{port}"))
        await until_async(lambda: lead._reach.problem.startswith(problem), "the lead has tried", 30.0)
        clock.now += START_S + 1.0
        await until_async(lambda: lead.failure, "the start has taken too long", 30.0)

    assert run(tmp_path, scenario, start_timeout_s=START_S) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if problem in line]
    assert len(lines) == 2 and "(20 s; see --start-timeout-s)." in lines[1], lines


def test_what_a_follower_cannot_reach_is_told_by_the_lead_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        follower = peer(b"\1a")
        follower.send(join())
        assert isinstance(await follower.receive(), Joined)
        for number in (2, 3):
            follower.send(unreached(lead, number))
        await until_async(lambda: bool(lead._obstacle), "the lead knows it")
        follower.send(Beat(4, 0))
        await until_async(lambda: not lead._obstacle, "it was reached after all")

    assert run(tmp_path, scenario) == 0
    assert capsys.readouterr().err.count(f"pagewire: {PROBLEM}.\n") == 1


PROBLEM = "10.0.0.1:7, the mailbox of core, cannot be reached"


def unreached(lead: Lead, number: int, address: str = "") -> Beat:
    """A beat of a follower that cannot reach the core. `address`: where it looks for it (default: where it is)."""
    return Beat(number, 0, problem=PROBLEM, unreached={"core": address or lead._given["core"]})


def test_no_epoch_begins_while_a_follower_cannot_reach_a_mailbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        follower = peer(b"\1a")
        follower.send(join())
        assert isinstance(await follower.receive(), Joined)
        with socket.create_server(("127.0.0.1", 0)) as mailbox:
            address = "tcp://{}:{}".format(*mailbox.getsockname())
            follower.send(unreached(lead, 2))
            follower.send(Bound({"worker-1": address}, ""))
            await until_async(lambda: lead._fleet.is_complete and lead._reach.is_complete, "its mailbox is reached")
            (machine,) = lead._fleet.machines
            machine.heard(unreached(lead, 3, "tcp://10.0.0.9:9"), machine.heard_at)
            assert lead._is_complete, "it looks for a mailbox that has moved"
            machine.heard(unreached(lead, 4), machine.heard_at)
            assert not lead._is_complete
            clock.now += START_S + 1.0
            await until_async(lambda: lead.failure, "the start has taken too long", 30.0)

    assert run(tmp_path, scenario, start_timeout_s=START_S) == 1
    assert f"pagewire: {PROBLEM} (20 s; see --start-timeout-s)." in capsys.readouterr().err


def test_the_engine_stands_still_if_no_step_ends_and_a_mailbox_cannot_be_reached(tmp_path: Path) -> None:
    """Neither is enough: a step may be long, and connections that were made before may work on."""

    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        follower = peer(b"\1a")
        follower.send(join())
        assert isinstance(await follower.receive(), Joined)
        lead._epoch = lead._restored = 5
        core = lead._children["core"] = Child("core", RemoteProcess(), 5)
        core.step_age_s = 42.1
        assert not lead._standstill
        follower.send(unreached(lead, 2))
        await until_async(lambda: lead._obstacle, "the lead knows it")
        assert lead._standstill == f"No step has ended for 42 s: {PROBLEM}."
        core.step_age_s = 41.9
        assert not lead._standstill, "a machine is lost after 42 s, too"
        core.step_age_s, lead._epoch, lead._begun_at = 42.1, 6, math.inf
        assert not lead._standstill, "this is what the core has said before it was told of the epoch"
        lead._begun_at = -math.inf
        assert lead._standstill == f"New processes do not get ready for inf s: {PROBLEM}."
        follower.send(Beat(3, 0))
        await until_async(lambda: not lead._standstill, "the mailbox is reached")

    assert run(tmp_path, scenario) == 0


def test_no_follower_ends_the_start_with_the_command_to_run_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    async def start() -> int:
        return await make_lead(prepare_server(config(tmp_path, start_timeout_s=START_S))).run()

    clock.tick_s = 1.0
    assert asyncio.run(start()) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert "waiting for a follower for worker-1; run there: pagewire launch --join tcp://127.0.0.1:" in first
    assert f"--key-file {tmp_path / 'key'}" in first
    assert "No follower has joined" in last and "--start-timeout-s" in last


@pytest.mark.parametrize(
    ("service", "sentence"),
    [
        ({"join_address": None}, "--nnodes 2 needs --join-address"),
        ({"nnodes": 3}, "--nnodes 3 does not divide the 2 ranks"),
        ({"join_address": "tcp://10.0.0.1:7000", "key_file": None}, "--key-file"),
        ({"join_address": "ipc:///x"}, "tcp://HOST:PORT"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    tmp_path: Path, service: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_lead(prepare_server(config(tmp_path, **service)))


@pytest.mark.parametrize(
    ("engine", "service", "sentence"),
    [
        ({"pipeline_parallel_size": 3}, {"nnodes": 2}, "--nnodes 2 does not divide the 3 stages"),
        ({}, {"backend": "ray", "cpu_bind": "0-1"}, "leave it out with --backend ray"),
    ],
)
def test_stages_are_divided_whole(
    tmp_path: Path, engine: dict[str, int], service: dict[str, object], sentence: str
) -> None:
    settings = {"tensor_parallel_size": 2, "join_address": "tcp://127.0.0.1:0", **engine, **service}
    with pytest.raises(ConfigError, match=sentence):
        prepare_server(make_config(**settings))


def test_a_lead_of_stages_gives_each_machine_whole_ones(tmp_path: Path) -> None:
    settings = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}
    service = {"join_address": f"tcp://127.0.0.1:{free_port()}", "key_file": str(tmp_path / "key")}
    server = prepare_server(make_config(**settings, **service))
    assert make_lead(server)._fleet.groups == (("worker-2", "worker-3"),)
    assert Lead(server, keys=None, works=False)._fleet.groups == (("worker", "worker-1"), ("worker-2", "worker-3"))


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async def scenario(lead: Lead, peer: Callable[[bytes], Peer]) -> None:
        await until_async(lambda: lead._router is not None, "the lead listens")
        taken = make_lead(prepare_server(config(tmp_path, join_address=lead._join_address, start_timeout_s=5.0)))
        with pytest.raises(ConfigError, match=f"Cannot listen on {lead._join_address}"):
            await taken.run()

    assert run(tmp_path, scenario) == 0
