"""What one attempt to connect says of a peer, and that it is over then."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from p2p_instance import DEADLINE_S
from proxy import Proxy
from waiting import until

from pagewire.engine.kv_connector.p2p_listener import Listener
from pagewire.engine.kv_connector.p2p_probe import Outcome, Probe
from pagewire.ipc.zmq_channel import Keys, read_keys
from pagewire.tools.servers import free_port


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


def probed(context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: Keys | None) -> Outcome:
    probe = Probe(context, address, keys)
    until(probe.outcome, "the probe is over", DEADLINE_S)
    found = probe.outcome()
    probe.close()
    assert found is not None
    return found


def serve(address: str, keys: Keys | None) -> Listener:
    listener = Listener(address, keys)

    def run() -> None:
        while listener.wait() is not None:
            pass

    listener.start(run, "p2p test")
    return listener


@pytest.mark.parametrize("who", ["a friend", "a stranger", "nobody"])
def test_tcp(who: str, context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    address, keys = f"tcp://127.0.0.1:{free_port()}", read_keys(tmp_path / "keys")
    if who == "nobody":
        assert probed(context, address, keys) == "unreached"
        return
    listener = serve(address, keys if who == "a friend" else read_keys(tmp_path / "others"))
    assert probed(context, address, keys) == ("reached" if who == "a friend" else "broken off")
    listener.close()


def test_a_path(context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
    assert probed(context, f"ipc://{folder}/kv", None) == "unreached"
    listener = serve(f"ipc://{folder}/kv", None)
    assert probed(context, f"ipc://{folder}/kv", None) == "reached"
    listener.close()


def test_it_is_not_tried_again(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    """Else it would have more and more events, which nobody may read."""
    keys = read_keys(tmp_path / "keys")
    with Proxy(1) as tried_once, Proxy(1) as tried_again, context.socket(zmq.DEALER) as lasting:
        tried_once.cut()
        tried_again.cut()
        probe = Probe(context, f"tcp://127.0.0.1:{tried_once.port}", keys)
        lasting.linger = 0
        lasting.connect(f"tcp://127.0.0.1:{tried_again.port}")
        until(lambda: tried_again.num_refused > 4, "a connection that lasts is tried again", DEADLINE_S)
        until(lambda: probe.outcome() is not None and tried_once.num_refused, "the probe is over", DEADLINE_S)
        assert tried_once.num_refused == 1
        probe.close()
