"""Memory that other instances read by NIXL (`transport=nixl`), and what this instance reads from theirs.

NIXL moves bytes between registered memory by whatever UCX finds: RDMA, shared memory, TCP. Only instances with the same
key file learn where the memory is, but what travels is neither encrypted nor authenticated. A read that was given up
may still write: its chunk is not used again unless NIXL says that it is over. So reads go into chunks of their own, and
only verified bytes are copied from there.

The package `nixl` is imported when an `Agent` is made. An agent belongs to one thread once it is made.
"""

import contextlib
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ConfigError
from .p2p_wire import PIECE_BYTES

if TYPE_CHECKING:
    from nixl._api import nixl_xfer_handle

_NUM_CHUNKS = 16  # reads at once

Place = tuple[int, int]
"""An address in the memory of an agent's process, and a number of bytes from there."""


class Agent:
    """Registers one piece of memory. Its methods may raise any exception of NIXL."""

    def __init__(self, memory: Tensor) -> None:
        """memory: contiguous, in host memory. Raises ConfigError if NIXL cannot work here."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent = nixl_agent(secrets.token_hex(16), nixl_agent_config(backends=["UCX"]))
            self._registered = self._agent.register_memory([memory])
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise ConfigError(
                f"--kv-connector p2p: transport=nixl does not work here ({error}); leave it out."
            ) from error

    def add(self, metadata: bytes) -> str:
        """Makes another agent known. Returns its name."""
        name: bytes | str = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def forget(self, name: str) -> None:
        """Disconnects from another agent."""
        with contextlib.suppress(Exception):  # it may have died
            self._agent.remove_remote_agent(name)

    def begin(self, name: str, places: Sequence[Place], address: int) -> "nixl_xfer_handle":
        """Begins to read these places of another agent into the registered memory from `address` on."""
        ours, theirs = [], []
        for place, size in places:
            theirs.append((place, size, 0))
            ours.append((address, size, 0))
            address += size
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "DRAM"), name
        )
        agent.transfer(handle)
        return handle

    def is_over(self, handle: "nixl_xfer_handle") -> bool:
        """Raises OSError if it has failed."""
        state = self._agent.check_xfer_state(handle)
        if state not in ("DONE", "PROC"):
            raise OSError("the peer's memory could not be read")
        return bool(state == "DONE")

    def end(self, handle: "nixl_xfer_handle") -> bool:
        """Gives up what has not been read. False: it may still be written."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._agent.deregister_memory(self._registered)


class Read:
    """One piece on its way into a chunk."""

    def __init__(self, chunk: Tensor, size: int, handle: "nixl_xfer_handle") -> None:
        self.chunk = chunk
        self.size = size
        self.handle = handle


class Reader:
    """Reads pieces from other instances, a bounded number at once."""

    def __init__(self) -> None:
        """Raises ConfigError if NIXL cannot work here."""
        memory = torch.empty((_NUM_CHUNKS, PIECE_BYTES), dtype=torch.uint8)
        self._agent = Agent(memory)
        self._free = list(memory)
        self._num_chunks = _NUM_CHUNKS  # that may be used

    @property
    def can_read(self) -> bool:
        """False: too many reads were given up that might still write."""
        return self._num_chunks > 0

    def know(self, metadata: bytes) -> str:
        return self._agent.add(metadata)

    def forget(self, name: str) -> None:
        self._agent.forget(name)

    def begin(self, name: str, places: Sequence[Place]) -> Read | None:
        """None: all chunks are in use. places: at most PIECE_BYTES."""
        if not self._free:
            return None
        chunk = self._free.pop()
        try:
            handle = self._agent.begin(name, places, chunk.data_ptr())
        except BaseException:
            self._free.append(chunk)
            raise
        return Read(chunk, sum(size for _, size in places), handle)

    def take(self, read: Read) -> bytes | None:
        """The bytes, once they are there; the read is over then. Raises OSError if it failed, which `drop` ends."""
        if not self._agent.is_over(read.handle):
            return None
        content = read.chunk[: read.size].numpy().tobytes()
        self.drop(read)
        return content

    def drop(self, read: Read) -> None:
        """Ends a read, wherever it is."""
        if self._agent.end(read.handle):
            self._free.append(read.chunk)
        else:
            self._num_chunks -= 1

    def close(self) -> None:
        self._agent.close()
