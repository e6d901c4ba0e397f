"""Addresses that refuse, do not answer, answer late, and stop answering."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from waiting import until_async

from pagewire.procs.reach import Reach, ReachTimes, watch_peer
from pagewire.tools.servers import free_port

AT_ONCE = ReachTimes(patience_s=0.0, loss_s=0.0, attempt_s=30.0, pause_s=0.0, recheck_s=0.0)


def test_a_refused_address_is_named_until_it_listens_and_when_it_stops() -> None:
    async def scenario() -> None:
        open_port = free_port(2)
        closed_port = open_port + 1
        with socket.create_server(("127.0.0.1", open_port)):
            reach = Reach("10.0.0.1", AT_ONCE)
            addresses = {"worker": f"tcp://127.0.0.1:{open_port}", "worker-1": f"tcp://127.0.0.1:{closed_port}"}
            reach.seek(addresses)
            assert not reach.is_complete and reach.problem == "", "nothing was tried yet"
            problem = await until_async(lambda: reach.problem, "the closed port is told")
            start = f"127.0.0.1:{closed_port}, the mailbox of worker-1, cannot be reached from 10.0.0.1 "
            assert problem.startswith(start + "(Connection refused): open the ports of that machine to this one")
            assert not reach.is_complete
            with socket.create_server(("127.0.0.1", closed_port)):
                await until_async(lambda: reach.is_complete, "both are reached")
                assert reach.problem == ""
            await until_async(lambda: reach.problem.startswith(start), "it does not listen any more")
            reach.seek({"worker": addresses["worker"]})
            assert reach.is_complete and reach.problem == "", "it need not be reached any more"
            reach.seek({"worker": addresses["worker-1"]})
            assert not reach.is_complete, "it has moved"
            reach.close()
            assert reach.is_complete

    asyncio.run(scenario())


def test_a_mailbox_that_was_reached_is_told_later() -> None:
    async def scenario() -> None:
        port = free_port()
        patient = Reach("b", ReachTimes(patience_s=0.0, loss_s=1000.0, attempt_s=30.0, pause_s=0.0, recheck_s=0.0))
        with socket.create_server(("127.0.0.1", port)):
            patient.seek({"core": f"tcp://127.0.0.1:{port}"})
            await until_async(lambda: patient.is_complete, "it is reached")
        await until_async(lambda: not patient.is_complete, "it does not listen any more")
        assert patient.problem == ""
        patient.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_mailbox_without_a_process_has_one_connection_and_one_with_a_process_others(
    runner: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """Connections that nobody accepts wait in a queue, also when they have been closed, and it has an end."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=4) as mailbox:
            mailbox.setblocking(False)
            reach = Reach("b", ReachTimes(patience_s=0.0, attempt_s=30.0, pause_s=0.0, recheck_s=0.0))
            reach.seek({"core": "tcp://{}:{}".format(*mailbox.getsockname())})
            await until_async(lambda: reach.is_complete, "it is reached")
            for _ in range(2000):  # turns of the loop, of which an attempt takes a few
                await asyncio.sleep(0)
            assert reach.is_complete

            def accept() -> socket.socket | None:
                with contextlib.suppress(BlockingIOError):
                    return mailbox.accept()[0]
                return None

            first = accept()
            assert first is not None and accept() is None
            first.sendall(b"\xff")  # a process greets
            second = await until_async(accept, "it connects again")
            assert second is not None
            second.close()
            third = await until_async(accept, "and when a process that has accepted it ends")
            assert third is not None and reach.is_complete
            for one in (first, third):
                one.close()
            reach.close()

    runner(scenario())


def test_the_system_watches_a_connection_that_nobody_has_accepted() -> None:
    with socket.socket() as connection:
        watch_peer(connection, 5.0)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, interval_s, num = (connection.getsockopt(socket.IPPROTO_TCP, one) for one in options)
        assert idle_s + interval_s * num == 5


def test_an_address_that_does_not_answer_is_named_after_a_while() -> None:
    """A full queue of connections drops them, as a firewall does."""

    async def scenario() -> None:
        with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            for one in (first, second):
                one.setblocking(False)
                one.connect_ex(deaf.getsockname())
            hasty = Reach("b", ReachTimes(patience_s=0.0, attempt_s=0.05))
            patient = Reach("b", ReachTimes(patience_s=1000.0, attempt_s=0.05))
            for reach in (patient, hasty):
                reach.seek({"core": "tcp://{}:{}".format(*deaf.getsockname())})
            problem = await until_async(lambda: hasty.problem, "the address is told")
            assert "the mailbox of core, cannot be reached from b (no answer)" in problem and patient.problem == ""
            patient.close()
            hasty.close()

    asyncio.run(scenario())
