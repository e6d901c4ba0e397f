"""A library of kernels that runs in another process (kernels/cpu/driver.c) on this process's memory: of another
architecture under qemu, or of this one to show that the driver does what ctypes does.

`RemoteLibrary` has the part of `ctypes.CDLL` that `Kernels` uses, so the tests of kernels run on it unchanged.
"""

import ctypes
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import cast

import numpy as np

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.levels import Level

_DRIVER = Path(__file__).parent / "kernels" / "cpu" / "driver.c"
_PAGE_BYTES, _NAME_BYTES = 4096, 64
_CALL, _PAGE, _DONE, _LOST, _FAILED = range(1, 6)
_APART = 64 << 30
"""Bytes between the memory of this process and of the driver's, so that both may grow."""
_TRIES = 50
# The oldest CPU of each level, so that an instruction of a better one is an error.
_CPUS = {"neon": "cortex-a53", "dotprod": "neoverse-n1", "i8mm": "max", "portable": "qemu64", "avx2": "max"}


def cross_compiler(machine: str) -> str | None:
    return build.compiler() if machine == platform.machine() else shutil.which(f"{machine}-linux-gnu-gcc")


def emulator(level: Level) -> list[str] | None:
    """The command that runs a program of the level's architecture; None if it is not installed."""
    if level.machine == platform.machine():
        return []
    qemu = shutil.which(f"qemu-{level.machine}") or shutil.which(f"qemu-{level.machine}-static")
    return None if qemu is None else [qemu, "-cpu", _CPUS[level.name], "-L", f"/usr/{level.machine}-linux-gnu"]


def missing(level: Level) -> str | None:
    """Why the level cannot run; None if it can."""
    if cross_compiler(level.machine) is None:
        return f"no compiler for {level.machine} (Debian's gcc-{level.machine}-linux-gnu)"
    return None if emulator(level) is not None else f"no qemu-{level.machine} (Debian's qemu-user)"


class RemoteLibrary:
    """The functions of a level. Only one thread may call them."""

    def __init__(self, level: Level) -> None:
        cc, emulate = cross_compiler(level.machine), emulator(level)
        assert cc is not None and emulate is not None
        library = build.compile_into_cache(cc, level).path
        self._name = level.name
        with tempfile.TemporaryDirectory() as folder:
            driver = Path(folder) / "driver"
            flags = ("-O2", "-Wall", "-rdynamic", "-ldl", "-lpthread")
            subprocess.run([cc, str(_DRIVER), "-o", str(driver), *flags], check=True)
            self._process = self._start([*emulate, str(driver), str(library)])
        self._functions: dict[str, RemoteFunction] = {}

    def __getattr__(self, name: str) -> "RemoteFunction":
        return self._functions.setdefault(name, RemoteFunction(self, name))

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Starts the driver until its memory happens to lie far from this process's."""
        for _ in range(_TRIES):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            assert process.stdout is not None
            assert process.stdout.read(8) == struct.pack("q", _DONE), f"{command} does not start"
            theirs = _mappings(process.pid)
            if all(
                end + _APART <= a or b + _APART <= start for start, end in _mappings(os.getpid()) for a, b in theirs
            ):
                return process
            process.kill()
            process.communicate()
        raise AssertionError("no place in memory for the driver")

    def as_cdll(self) -> ctypes.CDLL:
        """For `Kernels`, which uses no other part of a CDLL."""
        return cast(ctypes.CDLL, self)

    def call(self, name: str, ints: list[int], floats: list[float], *, has_result: bool) -> int:
        """Calls the function and waits for it. Its memory is this process's."""
        message = struct.pack("4q", _CALL, len(ints), len(floats), has_result) + name.encode().ljust(_NAME_BYTES, b"\0")
        self._write(message + struct.pack(f"{len(ints)}q{len(floats)}f", *ints, *floats))
        mapped, sent = _mappings(os.getpid()), {}
        starts = [start for start, _ in mapped]
        while (kind := self._int()) == _PAGE:
            at = self._int()
            place = bisect_right(starts, at) - 1
            if place >= 0 and at + _PAGE_BYTES <= mapped[place][1]:
                sent[at] = ctypes.string_at(at, _PAGE_BYTES)
                self._write(struct.pack("q", 1) + sent[at])
            else:
                self._write(struct.pack("q", 0))
        if kind == _LOST:
            raise AssertionError(f"{name} of level {self._name} touches memory that is not there: {self._int():#x}")
        if kind == _FAILED:
            raise AttributeError(f"{self._name} has no function {name}")
        assert kind == _DONE
        result = self._int()
        while at := self._int():
            _write_changes(at, sent[at], self._read(_PAGE_BYTES))
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _int(self) -> int:
        value: int = struct.unpack("q", self._read(8))[0]
        return value

    def _read(self, num_bytes: int) -> bytes:
        assert self._process.stdout is not None
        found = b""
        while len(found) < num_bytes:
            piece = self._process.stdout.read(num_bytes - len(found))
            assert piece, f"the driver of level {self._name} ended with {self._process.wait()}"
            found += piece
        return found

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]


class RemoteFunction:
    """Called like a function of `ctypes.CDLL`."""

    def __init__(self, library: RemoteLibrary, name: str) -> None:
        self._library, self._name = library, name
        self.argtypes: tuple[type, ...] = ()
        self.restype: type | None = ctypes.c_int

    def __call__(self, *arguments: object) -> int | None:
        assert len(arguments) == len(self.argtypes), f"{self._name} takes {len(self.argtypes)} arguments"
        ints: list[int] = []
        floats: list[float] = []
        for kind, value in zip(self.argtypes, arguments, strict=True):
            if kind is ctypes.c_float:
                assert isinstance(value, float | int)
                floats.append(value)
            elif value is None or isinstance(value, int):
                ints.append(value or 0)
            else:
                assert isinstance(value, ctypes.Array | ctypes.Structure)
                ints.append(ctypes.addressof(value))
        result = self._library.call(self._name, ints, floats, has_result=self.restype is not None)
        return None if self.restype is None else self.restype(result).value


def _write_changes(at: int, before: bytes, after: bytes) -> None:
    """Only what was changed: the interpreter may have changed the rest of the page meanwhile."""
    is_changed = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
    page = np.ctypeslib.as_array((ctypes.c_uint8 * _PAGE_BYTES).from_address(at))
    page[is_changed] = np.frombuffer(after, np.uint8)[is_changed]


def _mappings(pid: int) -> list[tuple[int, int]]:
    """The readable memory of a process, without its stacks, in ascending order; neighbours as one."""
    found: list[tuple[int, int]] = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        shape = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
        if shape is None or line.endswith(("[stack]", "[vvar]", "[vdso]", "[vsyscall]")):
            continue
        start, end = int(shape[1], 16), int(shape[2], 16)
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found
