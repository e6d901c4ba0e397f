"""The keeper's protocol, with the keeper as a process."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_driver
import pytest
from keepers import RunningKeeper, running_keeper
from waiting import until

from pagewire.engine.device.allocations import HOST, AllocationError
from pagewire.engine.device.keeper import Keeper

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd")
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[RunningKeeper]:
    with running_keeper(tmp_path) as running:
        yield running


def filled(keeper: Keeper, *contents: bytes) -> None:
    """Has an allocation with each of them."""
    for content in contents:
        fd, num_bytes = keeper.allocate(HOST, len(content))
        assert num_bytes >= len(content)
        os.pwrite(fd, content, 0)
        os.close(fd)


def read(keeper: Keeper, token: bytes, number: int, length: int) -> bytes:
    fd, _ = keeper.open(token, number)
    found = os.pread(fd, length, 0)
    os.close(fd)
    return found


def test_what_is_kept_outlives_the_connection(keeper: RunningKeeper) -> None:
    with Keeper(keeper.address) as first:
        assert first.num_kept() == 0
        filled(first, b"one", b"two" * PAGE)
        first.keep(b"token")
    with Keeper(keeper.address) as second:
        assert second.num_kept() == keeper.held() == 4 * PAGE
        assert read(second, b"token", 0, 3) == b"one" and read(second, b"token", 1, 3) == b"two"
        for token, number in ((b"token", 2), (b"token", -1), (b"other", 0), (b"", 0)):
            with pytest.raises(AllocationError, match="does not hold these weights"):
                second.open(token, number)
        filled(second, b"three")
        assert read(second, b"token", 0, 3) == b"one"
        second.keep(b"next")
        assert read(second, b"next", 0, 5) == b"three" and keeper.held() == PAGE, "it takes the place of the others"
        second.drop(kept=True)
        assert second.num_kept() == keeper.held() == 0


def test_what_is_not_kept_ends_with_the_connection(keeper: RunningKeeper) -> None:
    with Keeper(keeper.address) as first, Keeper(keeper.address) as second:
        filled(first, b"kept")
        first.keep(b"token")
        filled(first, b"not kept")
        filled(second, b"of another connection")
        assert keeper.held() == 3 * PAGE
        first.drop(kept=False)
        assert keeper.held() == 2 * PAGE
    until(lambda: keeper.held() == PAGE, "the connections' memory is freed")


def test_what_is_refused_is_an_error_and_the_keeper_goes_on(keeper: RunningKeeper) -> None:
    with Keeper(keeper.address) as connection:
        with pytest.raises(AllocationError, match=r"there is no libcuda\.so\.1"):
            connection.allocate("cuda:0", 1)
        with pytest.raises(AllocationError, match="memfd_create"):
            connection.allocate(HOST, 1 << 63)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(keeper.address)
            stranger.send(b"\xc1 no message")
            assert b"Malformed" in stranger.recv(1000) or keeper.process.poll() is None
        filled(connection, b"works")
        assert keeper.process.poll() is None


def test_a_keeper_that_ends_is_an_error(keeper: RunningKeeper, tmp_path: Path) -> None:
    with Keeper(keeper.address) as connection:
        filled(connection, b"one")
        keeper.kill()
        for _ in range(2):
            with pytest.raises(AllocationError, match="has ended or does not answer"):
                connection.num_kept()
    for address in (keeper.address, f"{tmp_path}/nothing"):
        with pytest.raises(AllocationError, match="the keeper does not answer"):
            Keeper(address)


def test_it_ends_with_the_supervisor(keeper: RunningKeeper) -> None:
    keeper.end_lifeline()
    assert keeper.process.wait(timeout=30) == 0


def test_it_imports_no_torch(keeper: RunningKeeper) -> None:
    with Keeper(keeper.address) as connection:
        filled(connection, b"one")
    assert "libtorch" not in Path(f"/proc/{keeper.process.pid}/maps").read_text()


_WORKER = """
import ctypes, os, sys
from pagewire.engine.device.allocations import memory_of
from pagewire.engine.device.keeper import Keeper
address, kind, role = sys.argv[1:]
memory = memory_of(kind)
with Keeper(address) as keeper:
    fd, size = keeper.allocate(kind, 3 << 20) if role == "first" else keeper.open(b"token", 0)
    at = memory.reserve(size)
    memory.map(at, size, fd)
    if role == "first":
        ctypes.memmove(at + (3 << 20) - 8, b"weights!", 8)
        keeper.keep(b"token")
        os.kill(os.getpid(), 9)
    print(size, ctypes.string_at(at + (3 << 20) - 8, 8).decode())
"""


@cuda_driver.needs_driver
def test_workers_share_a_gpus_memory(tmp_path: Path) -> None:
    """Through CUDA's functions, on a driver without a device. The first worker is killed."""
    environment = cuda_driver.environment()
    with running_keeper(tmp_path, environment) as keeper:
        command = [sys.executable, "-c", _WORKER, keeper.address, cuda_driver.KIND]
        assert subprocess.run([*command, "first"], env=environment, check=False).returncode == -9
        second = subprocess.run([*command, "second"], env=environment, check=True, stdout=subprocess.PIPE)
        assert second.stdout.decode() == f"{4 << 20} weights!\n", "two pages of 2 MiB"
