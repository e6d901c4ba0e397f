"""How one launch watches the actors of other launches: mailboxes that open and close on loopback."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pagewire.ipc.messages import Leave
from pagewire.ipc.zmq_channel import ZmqContext, ZmqInbox
from pagewire.procs.elsewhere import Elsewhere
from pagewire.procs.topology import ACTORS, RENDEZVOUS, names, receivers
from pagewire.tools.servers import free_port


class Site:
    """A launch of the actors `here`, and the mailboxes of all others."""

    def __init__(self, *here: str) -> None:
        self.context = ZmqContext()
        first = free_port(len(ACTORS))
        self.addresses = {name: f"tcp://127.0.0.1:{first + i}" for i, name in enumerate(ACTORS)}
        self.inboxes: dict[str, ZmqInbox[object]] = {
            name: self.context.inbox(self.addresses[name], ACTORS[name]) for name in ACTORS if name not in here
        }
        self.addresses[RENDEZVOUS] = "tcp://127.0.0.1:1"
        self.elsewhere = Elsewhere(here, self.addresses, hang_timeout_s=10.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await self.woken.wait()
                self.woken.clear()
                self.elsewhere.look()

    def run(self, scenario: Callable[["Site"], Awaitable[None]]) -> None:
        async def work() -> None:
            self.woken = asyncio.Event()
            self.elsewhere.watch(self.context, asyncio.get_running_loop(), self.woken.set)
            await self.until(lambda: all(watch.is_up for watch in self.elsewhere._watches.values()))
            await scenario(self)
            self.elsewhere.close()

        try:
            asyncio.run(work())
        finally:
            self.context.close()


def test_a_complaint_names_the_lost_actor_and_its_address() -> None:
    async def scenario(site: Site) -> None:
        assert site.elsewhere.complaint() is None
        site.inboxes["core"].close()
        await site.until(lambda: site.elsewhere.complaint() is not None)
        complaint = str(site.elsewhere.complaint())
        assert complaint.startswith(f"core ({site.addresses['core']}) of another launch has ended, ")
        assert "not answered for 10 s" in complaint and "--hang-timeout-s" in complaint

    Site("worker").run(scenario)


def test_actors_nearer_to_the_network_end_first_without_a_complaint() -> None:
    async def scenario(site: Site) -> None:
        for name in ("api", "detokenizer", "tokenizer"):
            assert site.elsewhere.is_awaited
            site.inboxes[name].close()
            await site.until(lambda name=name: site.elsewhere._watches[name].is_lost)  # type: ignore[misc]
            assert site.elsewhere.complaint(in_order=True) is None
        assert not site.elsewhere.is_awaited
        site.inboxes["worker"].close()
        await site.until(lambda: site.elsewhere.complaint(in_order=True) is not None)
        assert str(site.elsewhere.complaint(in_order=True)).startswith("worker (")

    Site("core", "grammar").run(scenario)


def test_the_launch_with_the_api_awaits_no_other_and_complains_of_every_loss() -> None:
    async def scenario(site: Site) -> None:
        assert not site.elsewhere.is_awaited
        site.inboxes["tokenizer"].close()
        await site.until(lambda: site.elsewhere.complaint(in_order=True) is not None)

    Site("worker", "api").run(scenario)


def test_a_launch_that_leaves_tells_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(site: Site) -> None:
        site.elsewhere.leave()
        for inbox in site.inboxes.values():
            assert inbox.wait(30) and inbox.drain() == [Leave(("core", "worker"))]
        assert not site.elsewhere.is_leaving
        site.elsewhere.heard(Leave(("api", "tokenizer")), is_news=True)
        site.elsewhere.heard(Leave(("grammar",)), is_news=False)
        assert site.elsewhere.is_leaving

    Site("core", "worker").run(scenario)
    assert capsys.readouterr().err == "pagewire: the launch of api, tokenizer ends, and with it the engine.\n"


def test_a_single_launch_watches_no_actors_elsewhere() -> None:
    assert not Elsewhere(ACTORS, {RENDEZVOUS: "tcp://127.0.0.1:1", "core": "ipc:///x"}, hang_timeout_s=10.0)


def test_the_end_of_any_actor_ends_all_others() -> None:
    """An actor watches those that it sends to and ends when one ends; its own end is then noticed in the same way."""
    watches = {name: set(receivers(name, 2, 2)) for name in names(2, 2)}
    for first in watches:
        ended = {first}
        while more := {name for name, watched in watches.items() if watched & ended} - ended:
            ended |= more
        assert ended == set(watches), f"{set(watches) - ended} do not notice the end of {first}"
