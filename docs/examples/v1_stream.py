"""A connector with vLLM's names: blocks are streamed to a store in another process, and from it, while steps go on.

    PYTHONPATH=docs/examples python -m v1_stream /tmp/kv.sock
    PYTHONPATH=docs/examples pagewire serve MODEL --kv-connector v1_stream:StreamConnector,store=/tmp/kv.sock

It has the shape of vLLM's asynchronous connectors: an ended request keeps its blocks until they are sent, and a load is
over when `get_finished` names its request. Blocks are named by `Request.block_hashes`. What the store does not have is
computed; the store forgets nothing, so this is an example and no cache.
"""

from __future__ import annotations

import contextlib
import queue
import socketserver
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase
from socket import AF_UNIX, socket
from typing import TYPE_CHECKING, Any

import msgspec

from pagewire.engine.kv_connector.v1 import (
    AttentionMetadata,
    ForwardContext,
    KVCacheBlocks,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    Request,
    SchedulerOutput,
    VllmConfig,
)

if TYPE_CHECKING:
    from torch import Tensor

_TIMEOUT_S = 5.0


class Ask(msgspec.Struct):
    """What the store is asked: how many of the first `names` it has, for their bytes, or to keep `content`."""

    names: list[bytes]
    wants: bool = False
    content: list[bytes] = []


class Answer(msgspec.Struct):
    num: int = 0
    content: list[bytes] = []


def send(file: BufferedIOBase, message: Ask | Answer) -> None:
    data = msgspec.msgpack.encode(message)
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def receive(file: BufferedIOBase) -> bytes:
    """Raises EOFError."""
    size = file.read(8)
    if len(size) < 8:
        raise EOFError("the other side has ended")
    return file.read(int.from_bytes(size, "little"))


class Store(socketserver.ThreadingUnixStreamServer):
    """Keeps blocks by name until it ends."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.blocks: dict[bytes, bytes] = {}


class Handler(socketserver.StreamRequestHandler):
    server: Store

    def handle(self) -> None:
        blocks = self.server.blocks
        with contextlib.suppress(EOFError, OSError):
            while True:
                ask = msgspec.msgpack.decode(receive(self.rfile), type=Ask)
                blocks.update(zip(ask.names, ask.content, strict=False))
                num = next((i for i, name in enumerate(ask.names) if name not in blocks), len(ask.names))
                send(self.wfile, Answer(num, [blocks[name] for name in ask.names[:num]] if ask.wants else []))


class Client:
    """A connection to the store, opened anew after an error."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: Any = None

    def ask(self, ask: Ask) -> Answer:
        """Raises OSError."""
        try:
            if self._file is None:
                with socket(AF_UNIX) as connection:
                    connection.settimeout(_TIMEOUT_S)
                    connection.connect(self._path)
                    self._file = connection.makefile("rwb")
            send(self._file, ask)
            return msgspec.msgpack.decode(receive(self._file), type=Answer)
        except (OSError, EOFError) as error:
            self.close()
            raise OSError(str(error)) from error

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


@dataclass
class Transfer:
    req_id: str
    names: list[bytes]  # of blocks
    block_ids: list[int]


@dataclass
class StreamMetadata(KVConnectorMetadata):
    to_send: list[Transfer] = field(default_factory=list)
    to_receive: list[Transfer] = field(default_factory=list)


class StreamConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: object = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._rank = vllm_config.parallel_config.rank.to_bytes(2, "little")  # each has its own part of a block
        self._client = Client(self._kv_transfer_config.get_from_extra_config("store", ""))
        self._next = StreamMetadata()
        self._jobs: queue.SimpleQueue[tuple[Transfer, bool] | None] = queue.SimpleQueue()  # (…, whether to send)
        self._ended: queue.SimpleQueue[tuple[str, bool, set[int]]] = queue.SimpleQueue()  # id, was sent, failed blocks
        self._failed: set[int] = set()
        self._thread: threading.Thread | None = None

    # ── the scheduler's half ─────────────────────────────────────────────────────────────────────────────────────────

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        first = num_computed_tokens // self._block_size
        names = request.block_hashes[first : (request.num_tokens - 1) // self._block_size]
        try:
            num = self._client.ask(Ask(self._own(names))).num if names else 0
        except OSError:
            num = 0
        return num * self._block_size, num > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        last = (request.num_computed_tokens + num_external_tokens) // self._block_size
        first = last - num_external_tokens // self._block_size
        (block_ids,) = blocks.get_block_ids()
        names = request.block_hashes
        self._next.to_receive.append(Transfer(request.request_id, names[first:last], block_ids[first:last]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StreamMetadata:
        metadata, self._next = self._next, StreamMetadata()
        return metadata

    def _own(self, names: Sequence[bytes]) -> list[bytes]:
        return [name + self._rank for name in names]

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if not block_ids:
            return False, None
        self._next.to_send.append(Transfer(request.request_id, request.block_hashes[: len(block_ids)], block_ids))
        return True, None

    # ── the worker's half ────────────────────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        self._layers = list(kv_caches.values())
        self._thread = threading.Thread(target=self._run, name="kv stream", daemon=True)
        self._thread.start()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StreamMetadata)
        for transfer in metadata.to_send:
            self._jobs.put((transfer, True))
        for transfer in metadata.to_receive:
            self._jobs.put((transfer, False))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request waits for all of its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Does nothing: blocks are sent when their request has ended."""

    def wait_for_save(self) -> None:
        """Does nothing: the blocks stay until `get_finished` names their request."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent: set[str] = set()
        received: set[str] = set()
        while not self._ended.empty():
            req_id, was_sent, failed = self._ended.get()
            (sent if was_sent else received).add(req_id)
            self._failed |= failed
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        """The thread."""
        while (job := self._jobs.get()) is not None:
            transfer, is_send = job
            failed = set() if is_send else set(transfer.block_ids)
            with contextlib.suppress(OSError):
                if is_send:
                    self._send(transfer)
                else:
                    failed -= self._receive(transfer)
            self._ended.put((transfer.req_id, is_send, failed))

    def _send(self, transfer: Transfer) -> None:
        """One block after the other, all layers of each, so that the store has the beginning first."""
        from torch import stack, uint8

        for name, block in zip(transfer.names, transfer.block_ids, strict=True):
            layers = stack([layer[block] for layer in self._layers])
            self._client.ask(Ask(self._own([name]), content=[layers.cpu().flatten().view(uint8).numpy().tobytes()]))

    def _receive(self, transfer: Transfer) -> set[int]:
        """The blocks that were filled."""
        from torch import frombuffer

        answer = self._client.ask(Ask(self._own(transfer.names), wants=True))
        filled = transfer.block_ids[: len(answer.content)]
        for block, content in zip(filled, answer.content, strict=True):
            first = self._layers[0]
            layers = frombuffer(bytearray(content), dtype=first.dtype).view(len(self._layers), *first.shape[1:])
            for layer, kv in zip(self._layers, layers, strict=True):
                layer[block] = kv.to(layer.device)
        return set(filled)


def main(arguments: Sequence[str]) -> None:
    with Store(arguments[0]) as store:
        store.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
