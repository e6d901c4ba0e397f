"""The redis tier, both halves, on a real server."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from kv_instance import BLOCK_BYTES, FACTS, FILE_BYTES, SIZE, Instance, sequence
from msgspec.structs import replace
from redis_server import RedisServer, needs_redis, redis_server
from waiting import until

from pagewire.engine.core.kv_connector import Item
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.redis import RedisConnector, read_settings
from pagewire.engine.kv_connector.redis_blocks import RedisBlocks
from pagewire.errors import ConfigError
from pagewire.ipc.messages import GroupShape

from .test_tier_histories import history

pytestmark = needs_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def spec(server: RedisServer, num_blocks: int = 64, **options: object) -> str:
    times = {"timeout_ms": 20_000, "fetch_timeout_ms": 20_000, **options}  # waits of tests tolerate load
    return f"redis,url={server.url},size={num_blocks * FILE_BYTES}" + "".join(f",{k}={v}" for k, v in times.items())


def storage(
    server: RedisServer, facts: ConnectorFacts = FACTS, ttl_s: int = 60, timeout_s: float = 20.0
) -> RedisBlocks:
    return RedisBlocks(
        url=server.url, password=None, namespace="pagewire", ttl_s=ttl_s, timeout_s=timeout_s, facts=facts
    )


def test_engines_share_prefixes(server: RedisServer) -> None:
    with closing(Instance(spec(server))) as first, closing(Instance(spec(server))) as second:
        assert first.serve(sequence(1, (1, 10 * SIZE + 2))) == 0
        first.wait_until_written()
        assert len(server.names()) == 10
        assert second.serve(sequence(2, (1, 6 * SIZE), (2, 3 * SIZE))) == 6
        second.wait_until_written()
        assert len(server.names()) == 10 + 3, "what is there is not written again"
        tier = second.core.tiers()[0]
        assert (tier.name, tier.num_hit_tokens, tier.num_stored, tier.num_failed) == ("redis", 6 * SIZE, 3, 0)
    with closing(Instance(spec(server))) as third:
        assert third.core.tiers()[0].num_blocks == 13
        assert third.serve(sequence(3, (1, 10 * SIZE + 2))) == 10


def test_another_model_namespace_or_owner_finds_nothing(server: RedisServer) -> None:
    other = replace(FACTS, model_key=b"another".ljust(32))
    with closing(Instance(spec(server))) as first:
        first.serve(sequence(1, (1, 5 * SIZE + 1)))
        first.wait_until_written()
    with closing(Instance(spec(server), facts=other)) as model:
        assert model.num_matched(sequence(1, (1, 5 * SIZE + 1))) == 0
    with closing(Instance(spec(server, namespace="elsewhere"))) as namespace:
        assert namespace.num_matched(sequence(1, (1, 5 * SIZE + 1))) == 0
    with closing(Instance(spec(server))) as same:
        owner = sequence(1, (1, 5 * SIZE + 1))
        owner.keys = [bytes(reversed(key)) for key in sequence(1, (1, 5 * SIZE + 1)).block_keys(5, SIZE)]
        assert same.num_matched(owner) == 0, "a salt gives other keys"
        assert same.num_matched(sequence(1, (1, 5 * SIZE + 1))) == 5 * SIZE


@pytest.mark.parametrize("damage", ["gone", "flipped", "foreign"])
def test_a_damaged_value_is_computed_and_stored_again(damage: str, server: RedisServer) -> None:
    first = sequence(1, (1, 6 * SIZE + 1))
    with closing(Instance(spec(server))) as engine:
        engine.serve(first)
        engine.wait_until_written()
        (name,) = server.names(f"*{first.keys[2].hex()}.2")
        (other,) = server.names(f"*{first.keys[3].hex()}.3")
        whole = server.call("GET", name)
        assert isinstance(whole, bytes) and len(whole) == FILE_BYTES
        engine.fill_device(2)
        again = sequence(3, (1, 6 * SIZE + 1))
        assert engine.num_matched(again) == 6 * SIZE
        match damage:
            case "gone":
                server.call("DEL", name)
            case "flipped":
                server.call("SET", name, whole[:-1] + bytes([whole[-1] ^ 1]))
            case "foreign":
                server.call("COPY", other, name, "REPLACE")
        assert engine.serve(again) == 5
        assert engine.failed == [first.keys[2]]
        engine.wait_until_written()
        assert server.call("GET", name) == whole


def test_a_server_that_dies_under_a_load_costs_its_blocks(server: RedisServer) -> None:
    with closing(Instance(spec(server))) as engine:
        engine.serve(sequence(1, (1, 8 * SIZE + 1)))
        engine.wait_until_written()
        engine.fill_device(2)
        engine.wait_until_written()
        again = sequence(3, (1, 8 * SIZE + 1))
        assert engine.admit(again) and len(engine.loading) == 1
        server.freeze()
        engine.step()
        assert engine.worker.num_pending == 1, "the load waits for the server"
        server.kill()
        engine.settle()
        assert len(engine.failed) == 8
        engine.step()
        assert again.num_computed == len(again.ids)
        engine.end(again)
        assert engine.serve(sequence(4, (1, 8 * SIZE + 1))) == 0, "nothing is loaded while there is no server"
        engine.step()
        engine.wait_until_written()


def test_a_server_that_comes_back_is_used_again(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine.kv_connector.pause.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("pagewire.engine.kv_connector.pause.LONGEST_PAUSE_S", 0.02)
    server.kill()
    with closing(Instance(spec(server))) as engine:
        engine.serve(sequence(1, (1, 5 * SIZE + 1)))
        engine.wait_until_written()
        server.start()
        with closing(Instance(spec(server))) as other:
            other.serve(sequence(1, (1, 5 * SIZE + 1)))
            other.wait_until_written()
        engine.fill_device(8)
        until(lambda: engine.num_matched(sequence(9, (1, 5 * SIZE + 1))) == 5 * SIZE, "they are found")
        assert engine.serve(sequence(10, (1, 5 * SIZE + 1))) == 5


def test_a_slow_server_costs_its_timeouts(server: RedisServer) -> None:
    with closing(Instance(spec(server))) as first:
        first.serve(sequence(1, (1, 5 * SIZE + 1)))
        first.wait_until_written()
    with closing(Instance(spec(server, timeout_ms=50, fetch_timeout_ms=50))) as engine:
        server.freeze()
        assert engine.num_matched(sequence(2, (1, 5 * SIZE + 1))) == 0, "a look-up ends"
    server.thaw()
    with closing(Instance(spec(server, fetch_timeout_ms=50))) as engine:
        request = sequence(3, (1, 5 * SIZE + 1))
        assert engine.admit(request) and len(engine.loading) == 1
        server.freeze()
        engine.step()
        engine.settle()
        assert len(engine.failed) == 5, "a load ends"
        server.thaw()


def test_a_server_that_answers_byte_by_byte_is_given_up(server: RedisServer) -> None:
    """Every byte is in time, but not the block."""
    with closing(Instance(spec(server))) as first:
        first.serve(sequence(1, (1, 5 * SIZE + 1)))
        first.wait_until_written()
    with closing(Instance(spec(server, fetch_timeout_ms=300))) as engine, socket.socket(socket.AF_UNIX) as listener:
        engine.serve(sequence(2, (2, 2 * SIZE)))
        engine.wait_until_written()  # its connections are made
        request = sequence(3, (1, 5 * SIZE + 1))
        assert engine.admit(request)
        server.kill()
        server.path.unlink(missing_ok=True)
        listener.bind(str(server.path))
        listener.listen()
        listener.setblocking(False)
        engine.step()
        with ExitStack() as stack:
            connections: list[socket.socket] = []

            def drips() -> bool:
                with suppress(BlockingIOError):
                    connections.append(stack.enter_context(listener.accept()[0]))
                for connection in connections:
                    with suppress(OSError):  # it was closed
                        connection.send(b"*")
                engine.take()
                return not engine.worker.num_pending

            until(drips, "the load is given up")
        assert len(engine.failed) == 5


def test_random_histories(server: RedisServer) -> None:
    num_loaded = 0
    for seed in range(4):
        instance = history(seed, [spec(server, 40, namespace=f"seed-{seed}")])
        num_loaded += instance.num_loaded
        (tier,) = instance.core.tiers()
        assert tier.num_hit_tokens == instance.num_loaded * SIZE and tier.num_failed == len(instance.failed)
        assert len(server.names(f"seed-{seed}:*")) <= 40, f"seed {seed}"
    assert num_loaded > 30, num_loaded


def test_the_budget_is_that_of_all_engines(server: RedisServer) -> None:
    with closing(Instance(spec(server, 20))) as first, closing(Instance(spec(server, 20))) as second:
        for i in range(6):
            engine = (first, second)[i % 2]
            engine.serve(sequence(i, (i, 6 * SIZE)))
            engine.wait_until_written()
        assert len(server.names()) <= 20
        kept = sequence(9, (5, 6 * SIZE), (9, 1))
        assert second.num_matched(kept) == 6 * SIZE, "what was stored last is kept"
        assert second.num_matched(sequence(10, (0, 6 * SIZE), (9, 1))) == 0


def test_items_expire_after_their_last_use(server: RedisServer) -> None:
    blocks = storage(server, ttl_s=1000)
    items = [Item(bytes([i]) * 32, i) for i in range(2)]
    blocks.write_all([(item, memoryview(bytes(BLOCK_BYTES))) for item in items])
    names = server.names()
    assert len(names) == 2 and all(server.call("TTL", name) in range(900, 1001) for name in names)
    (index,) = [name for name in _all_names(server) if name.endswith(b":index")]
    assert server.call("TTL", index) in range(900, 1001)
    for name in (*names, index):
        server.call("EXPIRE", name, 100)
    blocks.touch_all(items[:1], 10**18)
    assert [server.call("TTL", name) in range(900, 1001) for name in names] == [True, False]
    assert [found.item for found in blocks.scan()] == items[1:], "what has not been used since is no longer listed"
    blocks.remove_all([f"{items[1].key.hex()}.1"])
    assert server.names() == names[:1] and list(blocks.scan()) == []
    blocks.close()


def _all_names(server: RedisServer) -> list[bytes]:
    names = server.call("KEYS", "*")
    assert isinstance(names, list)
    return names


def test_states_are_found_behind_their_blocks(server: RedisServer) -> None:
    groups = (GroupShape("full", 0, 1), GroupShape("state", 0, 2))
    facts = replace(FACTS, groups=groups)
    blocks = storage(server, facts)
    block = Item(b"b" * 32, 3, b"a" * 32)
    state = Item(b"s" * 32, 4, b"b" * 32, 1, 2)
    blocks.write_all([(one, memoryview(bytes(facts.bytes_of(one.group)))) for one in (block, state)])
    assert blocks.look_up([block, state], [b"b" * 32, b"a" * 32]) == ([True, True], [{b"s" * 32: 2}, {}])
    into = [memoryview(bytearray(facts.bytes_of(one.group))) for one in (block, state)]
    assert blocks.read_all([(block, into[0]), (state, into[1])]) == ["", ""]
    blocks.remove_all([found.name for found in blocks.scan() if found.item == state])
    assert blocks.look_up([block, state], [b"b" * 32]) == ([True, False], [{}])
    blocks.close()


def test_each_rank_has_its_own_items(server: RedisServer) -> None:
    ranks = [replace(FACTS, rank=rank, rank_bytes=(BLOCK_BYTES, BLOCK_BYTES)) for rank in range(2)]
    first, second = (storage(server, facts) for facts in ranks)
    item = Item(b"k" * 32, 0)
    first.write_all([(item, memoryview(b"1" * BLOCK_BYTES))])
    assert (first.has_all([item]), second.has_all([item])) == ([True], [False])
    for blocks in (first, second):
        blocks.close()


def test_a_full_server_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server("--maxmemory", "1", "--maxmemory-policy", "noeviction") as server:
        with closing(Instance(spec(server))) as engine:
            for i in range(3):
                assert engine.serve(sequence(i, (1, 4 * SIZE))) == 0
                engine.wait_until_written()
        assert caplog.text.count("blocks cannot be written") == 1


def test_a_server_that_wants_a_password_is_refused_at_the_start(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    with redis_server("--requirepass", "let me in") as server:
        with pytest.raises(ConfigError, match=r"the server at unix:.* refuses: .*"):
            Instance(spec(server))
        secret.write_text("wrong\n")
        with pytest.raises(ConfigError, match="refuses"):
            Instance(spec(server, **{"password-file": secret}))
        secret.write_text("let me in\n")
        with closing(Instance(spec(server, **{"password-file": secret}))) as engine:
            engine.serve(sequence(1, (1, 5 * SIZE + 1)))
            engine.wait_until_written()
            engine.fill_device(2)
            assert engine.serve(sequence(3, (1, 5 * SIZE + 1))) == 5


def test_a_server_that_is_not_there_at_the_start_is_used_later(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server:
        server.kill()
        with closing(Instance(spec(server))) as engine:
            assert "is not used until it answers" in caplog.text
            assert engine.serve(sequence(1, (1, 4 * SIZE))) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=1G", "needs url="),
        ("url=redis://h", "needs size="),
        ("url=http://h,size=1G", "should be redis://HOST:PORT/DB"),
        ("url=redis://,size=1G", "should be redis://HOST:PORT/DB"),
        ("url=redis://h:x,size=1G", "should be redis://HOST:PORT/DB"),
        ("url=redis://h?db=1,size=1G", "should be redis://HOST:PORT/DB"),
        ("url=redis://me:secret@h:1,size=1G", "url=redis://h:1 has a password, .*; give password-file=FILE"),
        ("url=redis://h,size=0", "must be more than 0"),
        ("url=redis://h,size=1G,ttl_s=0", "ttl_s=0 should be a number of seconds"),
        ("url=redis://h,size=1G,timeout_ms=0", "timeout_ms=0 should be a number of milliseconds"),
        ("url=redis://h,size=1G,namespace=", "namespace= should be"),
        ("url=redis://h,size=1G,password-file=/none", "password-file=/none cannot be read: No such file"),
        ("url=redis://h,size=1G,other=1", "no option 'other'"),
    ],
)
def test_wrong_options_are_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        RedisConnector.check(dict(part.split("=", 1) for part in options.split(",")))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["unix:///tmp/redis.sock", "redis://localhost", "redis://127.0.0.1:6379/0"])
def test_a_local_address_is_refused_if_ranks_are_on_other_machines(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """198.51.100.0/24 is for documents (RFC 5737): no machine is there. The core of a running engine goes on."""
    options = {"url": url, "size": "1M", "timeout_ms": "1"}
    facts = replace(FACTS, rank_bytes=(BLOCK_BYTES, BLOCK_BYTES), hosts=("", "198.51.100.7"))
    with pytest.raises(ConfigError, match=r"another server, or none, on 198\.51\.100\.7, where a rank is; name"):
        RedisConnector.core(options, facts)
    RedisConnector.core(options, replace(facts, may_refuse=False)).close()
    assert "on 198.51.100.7, where a rank is" in caplog.text
    caplog.clear()
    RedisConnector.core(options, replace(facts, hosts=("", "127.0.0.1"))).close()
    assert "where a rank is" not in caplog.text


def test_a_size_below_one_block_is_refused(server: RedisServer) -> None:
    with pytest.raises(ConfigError, match="too small"):
        Instance(f"redis,url={server.url},size=100")


def test_the_defaults() -> None:
    settings = read_settings({"url": "redis://user@h:7/2", "size": "1K"})
    assert (settings.ttl_s, settings.namespace, settings.timeout_s, settings.fetch_timeout_s) == (
        86_400, "pagewire", 0.1, 2.0
    )  # fmt: skip
