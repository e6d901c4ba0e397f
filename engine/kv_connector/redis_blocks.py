"""The items of one model and rank in a Redis or Valkey server: a `Storage`.

    NAMESPACE:<model key, 64 hex digits>:<rank>-of-<ranks>:<label>          string: header and bytes of an item
    NAMESPACE:<model key, 64 hex digits>:<rank>-of-<ranks>:index            sorted set: label → Unix time of its end
    NAMESPACE:<model key, 64 hex digits>:<rank>-of-<ranks>:behind:<key>     set: labels of the states behind a block

A salt, like everything else that KV depends on, is in the keys of blocks, from which labels are made. Every item
expires `ttl_s` after its last use. The index is a hint: what it lists may be gone, and what is there but not listed
expires. So no command has to be atomic with another one, and commands of one call travel together in a pipeline.

A server that did not answer is not asked for a while; until then every call fails at once.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.kv_connector import Item
from .base import ConnectorFacts
from .block_storage import HEADER_BYTES, Filled, Found, header_of, item_of, label_of
from .pause import Pause

if TYPE_CHECKING:
    import redis

_SCAN_AT_ONCE = 2000  # labels
_MAX_CONNECTIONS = 16


class RefusedError(OSError):
    """The server has answered that it does not do what was asked."""


class RedisBlocks:
    batch_bytes = 8 << 20

    def __init__(
        self, *, url: str, password: str | None, namespace: str, ttl_s: int, timeout_s: float, facts: ConnectorFacts
    ) -> None:
        """Connects with the first command. timeout_s: for each piece of an answer."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        assert len(facts.model_key) == 32, facts.model_key
        self.facts = facts
        self._prefix = f"{namespace}:{facts.model_key.hex()}:{facts.rank}-of-{facts.num_ranks}:"
        self._index = f"{self._prefix}index"
        self._ttl_s = ttl_s
        self._pause = Pause()
        self._is_closed = False
        self._client = redis.Redis.from_url(
            url, password=password, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, protocol=2,
            retry=Retry(NoBackoff(), 0), max_connections=_MAX_CONNECTIONS,
        )  # fmt: skip
        self._errors = (redis.ConnectionError, redis.TimeoutError)
        self._refusals = redis.RedisError

    def file_bytes(self, group: int = 0) -> int:
        """The size of a value of this group."""
        return HEADER_BYTES + self.facts.bytes_of(group)

    def count(self) -> int:
        """How many items the index has. Raises RefusedError if the server does not let this engine in."""
        (num,) = self._run(lambda pipe: pipe.zcard(self._index))
        return int(num)

    def has_all(self, items: Sequence[Item]) -> list[bool]:
        return self.look_up(items, [])[0]

    def look_up(self, items: Sequence[Item], behind: Sequence[bytes]) -> tuple[list[bool], list[Mapping[bytes, int]]]:
        """(which of these items are there, for each of these keys the states behind it: key → positions between)."""
        if not items and not behind:
            return [], []

        def ask(pipe: "redis.client.Pipeline") -> None:
            for item in items:
                pipe.strlen(self._key(item))
            for key in behind:
                pipe.smembers(self._behind(key))

        answers = self._run(ask)
        sizes, members = answers[: len(items)], answers[len(items) :]
        has = [size == self.file_bytes(item.group) for item, size in zip(items, sizes, strict=True)]
        return has, [self._states(key, labels) for key, labels in zip(behind, members, strict=True)]

    def read_all(self, wanted: Sequence[Filled]) -> list[str]:
        if not wanted:
            return []
        (values,) = self._run(lambda pipe: pipe.mget([self._key(item) for item, _ in wanted]))
        problems = [self._take(item, into, value) for (item, into), value in zip(wanted, values, strict=True)]
        damaged = [
            self._label(item)
            for (item, _), value, problem in zip(wanted, values, problems, strict=True)
            if problem and value is not None
        ]
        self.remove_all(damaged)
        return problems

    def write_all(self, items: Sequence[Filled]) -> None:
        def write(pipe: "redis.client.Pipeline") -> None:
            for item, data in items:
                assert len(data) == self.facts.bytes_of(item.group), (len(data), item)
                value = b"".join((header_of(self.facts.model_key, item, data), data))
                pipe.set(self._key(item), value, ex=self._ttl_s)
                if item.group == self.facts.state and item.parent is not None:
                    pipe.sadd(self._behind(item.parent), self._label(item))
                    pipe.expire(self._behind(item.parent), self._ttl_s)
            pipe.zadd(self._index, {self._label(item): self._end(time.time()) for item, _ in items})
            pipe.expire(self._index, self._ttl_s)

        self._run(write)

    def touch_all(self, items: Sequence[Item], used_ns: int) -> None:
        def touch(pipe: "redis.client.Pipeline") -> None:
            for item in items:
                pipe.expire(self._key(item), self._ttl_s)
                if item.group == self.facts.state and item.parent is not None:
                    pipe.expire(self._behind(item.parent), self._ttl_s)
            pipe.zadd(self._index, {self._label(item): self._end(used_ns / 1e9) for item in items}, xx=True)
            pipe.expire(self._index, self._ttl_s)

        self._run(touch)

    def remove_all(self, names: Sequence[str]) -> None:
        if not names:
            return

        def remove(pipe: "redis.client.Pipeline") -> None:
            pipe.unlink(*(self._prefix + name for name in names))
            pipe.zrem(self._index, *names)
            for name in names:
                item = item_of(name)
                if item is not None and item.group == self.facts.state and item.parent is not None:
                    pipe.srem(self._behind(item.parent), name)

        self._run(remove)

    def scan(self) -> Iterator[Found]:
        """What the index lists of this model and rank, without what has expired."""
        self._run(lambda pipe: pipe.zremrangebyscore(self._index, "-inf", time.time()))
        seen: set[str] = set()
        cursor = -1
        while cursor != 0:
            start = max(0, cursor)
            ((cursor, part),) = self._run(lambda pipe, start=start: pipe.zscan(self._index, start, count=_SCAN_AT_ONCE))  # type: ignore[misc]
            for label, end in part:
                name = label.decode(errors="replace")
                item = item_of(name)
                if name not in seen and item is not None and item.group < self.facts.num_groups:
                    seen.add(name)
                    yield Found(name, self.file_bytes(item.group), int((end - self._ttl_s) * 1e9), item)

    def close(self) -> None:
        self._is_closed = True
        self._client.connection_pool.disconnect()

    def pause(self) -> None:
        """The server takes too long: it is not asked for a while."""
        self._pause.fail(time.monotonic())

    def is_paused(self) -> bool:
        """Whether the next call would fail at once."""
        return time.monotonic() < self._pause.until

    def _run(self, add: Callable[["redis.client.Pipeline"], object]) -> list[Any]:
        """Sends what `add` puts into a pipeline; returns the answers. Raises OSError."""
        if self._is_closed:
            raise OSError("the connection is closed")
        if self.is_paused():
            raise OSError("the server has failed a moment ago")
        try:
            with self._client.pipeline(transaction=False) as pipe:
                add(pipe)
                answers: list[Any] = pipe.execute()
        except self._errors as error:
            is_refused = type(error).__name__ in ("AuthenticationError", "AuthenticationWrongNumberOfArgsError")
            self.pause()
            raise (RefusedError if is_refused else OSError)(str(error)) from error
        except self._refusals as error:
            raise RefusedError(str(error)) from error
        self._pause.succeed()
        return answers

    def _take(self, item: Item, into: memoryview, value: bytes | None) -> str:
        """Fills `into` with a value's bytes. Returns what is wrong with it; empty: nothing."""
        if value is None:
            return "it is no longer there"
        if len(value) != HEADER_BYTES + len(into):
            return f"{len(value)} bytes instead of {HEADER_BYTES + len(into)}"
        into[:] = memoryview(value)[HEADER_BYTES:]
        is_right = value[:HEADER_BYTES] == header_of(self.facts.model_key, item, into)
        return "" if is_right else "header or checksum differ"

    def _states(self, behind: bytes, labels: set[bytes]) -> Mapping[bytes, int]:
        items = [item_of(label.decode(errors="replace")) for label in labels]
        return {
            item.key: item.num
            for item in items
            if item is not None and item.group == self.facts.state and item.parent == behind
        }

    def _label(self, item: Item) -> str:
        return label_of(item, self.facts.state)

    def _key(self, item: Item) -> str:
        return self._prefix + self._label(item)

    def _behind(self, key: bytes) -> str:
        return f"{self._prefix}behind:{key.hex()}"

    def _end(self, used_s: float) -> float:
        return used_s + self._ttl_s
