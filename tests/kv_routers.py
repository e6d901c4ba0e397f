"""How the routers around an engine read KV events: their rules in our words, for tests.

Sources, read in 2026-11: llm-d/llm-d-router of 2026-08-21 (ebab687: `pkg/kvevents/{zmq_subscriber,pool}.go`,
`engineadapter/{common,vllm_adapter}.go`, `event_dedup_filter.go`), vllm-project/aibrix of 2026-08-23 (e3e10f9:
`pkg/cache/kvcache/{msgpack_decoder,zmq_client}.go`), ai-dynamo/dynamo (0cda21d: `lib/kv-router/src/zmq_wire.rs`).
`RECORDED` are events of their own test files.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

FULL_KINDS = ("full_attention", "mla_attention", "sink_full_attention")

RECORDED: dict[str, list[list[Any]]] = {
    "llm-d vllm_adapter_test.go": [
        ["BlockStored", [100, 101], 99, [1, 2, 3], 16, None, "gpu", None, None],
        ["BlockStored", [200, 201], 199, [4, 5, 6], 32, 42, "gpu", "test-lora", [["uuid-A", "salt"], None]],
        ["BlockStored", [700, 701], 699, [1, 2, 3, 4], 16, None, "gpu", None, None, 1, "sliding_window", 128],
        ["BlockRemoved", [500], "cpu", 1, "future-field-1"],
        ["BlockRemoved", [600]],
    ],
    "aibrix msgpack_decoder_test.go": [
        ["BlockStored", [101, 102, 103], 100, [1, 2, 3, 4, 5, 6], 2],
        ["AllBlocksCleared"],
    ],
    "dynamo zmq_wire.rs": [
        ["BlockStored", [11], None, [10, 11], 2, None, None, None, None, 0, "full_attention"],
        ["BlockStored", [11], None, [10, 11], 2, None, None, None],
        ["BlockRemoved", [11], None, None, "full_attention"],
    ],
}


class Malformed(Exception):
    """What a router drops a batch, a connection or a pod for."""


def _need(is_so: bool, what: str) -> None:
    if not is_so:
        raise Malformed(what)


def _is_hash(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


class LlmD:
    """llm-d's subscriber and pool, of one pod: (tier, group, hash) → how often it was stored and not removed."""

    def __init__(self, ask: Callable[[int], list[list[bytes]]]) -> None:
        """`ask(start)`: the frames of a replay, as a DEALER gets them."""
        self.blocks: Counter[tuple[str, int, int]] = Counter()
        self.tokens: dict[int, tuple[int, ...]] = {}  # hash → all tokens up to its block's end
        self.salts: dict[int, list[Any]] = {}
        self.model = ""
        self.last: int | None = None
        self.num_resets = 0
        self._ask = ask
        self._kinds: dict[int, str] = {}
        self._in_cooldown = False

    def connected(self) -> None:
        """It replays from 0 before it reads anything live."""
        self._replay(0)

    def live(self, frames: list[bytes]) -> None:
        """One message of its SUB socket."""
        topic, number, payload = self._frame(frames)
        if self.last is not None and number <= self.last:
            return
        if (self.last is not None and number > self.last + 1) or (self.last is None and number > 0):
            if self._in_cooldown or not self._replay(0 if self.last is None else self.last + 1):
                return
            if self.last is not None and number != self.last + 1:
                return
        self._take(topic, payload)
        self.last = number

    def cooled_down(self) -> None:
        """30 seconds have passed."""
        self._in_cooldown = False

    def _frame(self, frames: list[bytes]) -> tuple[str, int, bytes]:
        _need(len(frames) == 3 and len(frames[1]) >= 8, f"{len(frames)} frames")
        return frames[0].decode(), int.from_bytes(frames[1][:8], "big"), frames[2]

    def _replay(self, start: int) -> bool:
        expected = start
        for raw in self._ask(start):
            frames = raw[1:] if raw and not raw[0] else raw
            if len(frames) == 3 and not frames[2]:
                if expected == start and start > 0:
                    return self._reset()
                return True
            topic, number, payload = self._frame(frames)
            if number != expected:
                return self._reset()
            self._take(topic, payload)
            self.last = number
            expected += 1
        return self._reset()

    def _reset(self) -> bool:
        self.blocks.clear()
        self.tokens.clear()
        self.last = None
        self.num_resets += 1
        self._in_cooldown = True
        return False

    def _take(self, topic: str, payload: bytes) -> None:
        parts = topic.split("@")
        _need(len(parts) == 3 and parts[0] == "kv", f"topic {topic}")
        self.model = parts[2]
        batch = msgspec.msgpack.decode(payload)
        _need(isinstance(batch, list) and isinstance(batch[0], float), "a batch")
        for event in batch[1]:
            self.apply(event)

    def apply(self, event: list[Any]) -> None:
        """One event."""
        tag, *fields = event
        fields += [None] * (11 - len(fields))
        if tag == "AllBlocksCleared":
            self.blocks.clear()
            self.tokens.clear()
        elif tag == "BlockRemoved":
            hashes, medium, group = fields[:3]
            _need(all(map(_is_hash, hashes)), "a hash")
            if group is not None and self._kinds.get(group) not in FULL_KINDS:
                return
            for one in hashes:
                name = ((medium or "gpu").lower(), -1 if group is None else group, one)
                if self.blocks[name] > 1:
                    self.blocks[name] -= 1
                else:
                    del self.blocks[name]
        else:
            _need(tag == "BlockStored" and len(event) >= 5, f"tag {tag}")
            hashes, parent, ids, size, lora, medium, lora_name, extra, group, kind, window = fields[:11]
            _need(all(map(_is_hash, hashes)) and (parent is None or _is_hash(parent)), "a hash")
            _need(all(isinstance(i, int) for i in ids) and isinstance(size, int), "token ids or size")
            _need(medium is None or isinstance(medium, str), "medium")
            _need(extra is None or all(one is None or isinstance(one, list) for one in extra), "extra_keys")
            _need(lora is None or isinstance(lora, int), "lora_id")
            _need(lora_name is None or isinstance(lora_name, str), "lora_name")
            _need(window is None or isinstance(window, int), "window")
            if group is not None:
                _need(isinstance(group, int) and group >= 0, "group_idx")
                self._kinds[group] = kind or self._kinds.get(group, "")
                if self._kinds[group] not in FULL_KINDS:
                    return
            if ids and (parent is None or parent in self.tokens):
                before = () if parent is None else self.tokens[parent]
                for i, one in enumerate(hashes):
                    before += tuple(ids[i * size : (i + 1) * size])
                    self.tokens[one] = before
                    if extra is not None and extra[i] is not None:
                        self.salts[one] = extra[i]
            elif ids or not any(one in self.tokens for one in hashes):
                return  # a parent or a device block that it does not know
            for one in hashes:
                self.blocks[(medium or "gpu").lower(), -1 if group is None else group, one] += 1


def read_aibrix(payload: bytes) -> Iterator[tuple[str, list[int]]]:
    """(event, hashes) of a batch as AIBrix decodes it."""
    batch = msgspec.msgpack.decode(payload)
    _need(isinstance(batch, list) and len(batch) in (2, 3), "a batch of other length")
    _need(isinstance(batch[0], float), "timestamp")
    _need(len(batch) == 2 or isinstance(batch[2], int), "data_parallel_rank")
    for event in batch[1]:
        _need(isinstance(event, list) and isinstance(event[0], str), "an event that is no array")
        if event[0] == "AllBlocksCleared":
            yield event[0], []
            continue
        _need(event[0] in ("BlockStored", "BlockRemoved") and len(event) > 1, "tag")
        _need(all(map(_is_hash, event[1])), "hash")
        if event[0] == "BlockStored":
            _need(len(event) >= 5, "fields")
            _, _, parent, ids, size, *rest = event
            _need(parent is None or _is_hash(parent), "parent")
            _need(all(isinstance(i, int) and 0 <= i < 2**32 for i in ids), "token_ids")
            _need(not ids or (size > 0 and len(ids) % size == 0), "token_ids of whole blocks")
            rest += [None] * (5 - len(rest))
            _need(rest[0] is None or isinstance(rest[0], int), "lora_id")
            _need(rest[1] is None or isinstance(rest[1], str), "medium")
            _need(rest[2] is None or isinstance(rest[2], str), "lora_name")
            _need(rest[4] is None or isinstance(rest[4], int), "group_idx")
        yield event[0], event[1]


_DYNAMO_TIERS = ("GPU", "CPU", "DISK", "SHARED", "EXTERNAL")


def read_dynamo(payload: bytes) -> Iterator[tuple[str, list[int]]]:
    """(event, hashes) of a batch as Dynamo decodes it; events about other groups than the main attention are left
    out."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    _need(isinstance(ts, float) and (rank is None or isinstance(rank, int)), "a batch")
    for tag, *fields in events:
        if tag == "AllBlocksCleared":
            yield tag, []
            continue
        _need(tag in ("BlockStored", "BlockRemoved"), "tag")
        _need(all(map(_is_hash, fields[0])), "hash")
        if tag == "BlockStored":
            _need(len(fields) >= 4, "fields")
            parent, ids, size = fields[1:4]
            _need(parent is None or _is_hash(parent), "parent")
            _need(len(set(fields[0]) | {parent}) == len(fields[0]) + 1, "a block that is its own parent")
            _need(all(isinstance(i, int) and 0 <= i < 2**32 for i in ids) and size > 0, "token_ids")
            trailing, medium = fields[8:11], fields[5] if len(fields) > 5 else None
            for extra in fields[7] or () if len(fields) > 7 else ():
                _need(extra is None or all(isinstance(key, str | int | list) for key in extra), "extra_keys")
        else:
            trailing, medium = fields[2:4], fields[1] if len(fields) > 1 else None
        _need(medium is None or medium.upper() in _DYNAMO_TIERS, f"tier {medium} counts as the device")
        group = next((one for one in trailing if isinstance(one, int)), None)
        kind = next((one for one in trailing if isinstance(one, str)), None)
        if (kind is not None and kind in FULL_KINDS) or (kind is None and group in (None, 0)):
            yield tag, fields[0]
