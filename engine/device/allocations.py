"""Memory that a descriptor holds, so that it outlives the process that fills it: a GPU's, or the host's.

One process allocates (the keeper, `procs/weight_keeper.py`), others map what it allocated (`kept_memory.py`). There is
no torch here, so that the keeper starts in a moment.

On a GPU this is CUDA's virtual memory management. An allocation is freed when its last descriptor and its last mapping
are gone. With CUDA's older IPC handles, a process that still used memory of a dead exporter would have undefined
behaviour, and the exporter would need a context, which takes some hundred megabytes of the device.
"""

import ctypes
import mmap
import os
from typing import NamedTuple, Protocol

HOST = "host"
"""The kind of the host's memory. That of a GPU is `cuda:` and its number in this process's order."""

_ATTRIBUTES = {102: "virtual memory management", 103: "memory behind file descriptors"}  # CUdevice_attribute
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_PINNED, _ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000  # of mmap(2), which Python does not name


class AllocationError(Exception):
    """The system or the driver refused something; the text says what."""


class Allocation(NamedTuple):
    fd: int
    num_bytes: int  # a multiple of the device's granularity
    handle: int = 0  # the driver's


class DescribedMemory(Protocol):
    """All calls raise AllocationError. An address is one of this process."""

    def allocate(self, num_bytes: int) -> Allocation:
        """At least so many bytes."""

    def free(self, allocation: Allocation) -> None:
        """Gives up this process's part in it."""

    def reserve(self, num_bytes: int) -> int:
        """Addresses without memory. num_bytes: of an allocation."""

    def release(self, address: int, num_bytes: int) -> None:
        """Gives reserved addresses back, to which nothing is mapped."""

    def map(self, address: int, num_bytes: int, fd: int) -> None:
        """Maps a whole allocation to reserved addresses. Does not take the descriptor."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """The addresses stay reserved."""


def memory_of(kind: str) -> DescribedMemory:
    """Raises AllocationError."""
    if kind == HOST:
        return HostMemory()
    return CudaMemory(int(kind.removeprefix("cuda:")))


class HostMemory:
    """Memfds. For machines without a GPU: the same processes do the same as with one."""

    def __init__(self) -> None:
        self._mmap = ctypes.CDLL(None, use_errno=True).mmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
        )  # fmt: skip
        self._munmap = ctypes.CDLL(None, use_errno=True).munmap
        self._munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def allocate(self, num_bytes: int) -> Allocation:
        num_bytes = _rounded(num_bytes, mmap.PAGESIZE)
        try:
            fd = os.memfd_create("pagewire-kept-weights")
            os.ftruncate(fd, num_bytes)
        except (OSError, OverflowError) as error:
            raise AllocationError(f"memfd_create: {error}") from error
        return Allocation(fd, num_bytes)

    def free(self, allocation: Allocation) -> None:
        os.close(allocation.fd)

    def reserve(self, num_bytes: int) -> int:
        return self._mapped(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def release(self, address: int, num_bytes: int) -> None:
        self._munmap(address, num_bytes)

    def map(self, address: int, num_bytes: int, fd: int) -> None:
        if os.fstat(fd).st_size != num_bytes:
            raise AllocationError(f"a memfd of {os.fstat(fd).st_size} bytes instead of {num_bytes}")
        self._mapped(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)

    def unmap(self, address: int, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        self._mapped(address, num_bytes, _PROT_NONE, flags, -1)

    def _mapped(self, address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
        found = self._mmap(address, num_bytes, protection, flags | _MAP_NORESERVE, fd, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise AllocationError(f"mmap: {os.strerror(ctypes.get_errno())}")
        return int(found)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaMemory:
    """Of one GPU. `allocate`, `free` and the constructor need no context of CUDA; `map` needs the worker's."""

    def __init__(self, number: int) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise AllocationError("there is no libcuda.so.1") from error
        self._call("cuInit", ctypes.c_uint(0))
        device, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        for attribute, what in _ATTRIBUTES.items():
            self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
            if not value.value:
                raise AllocationError(f"this device or driver has no {what}")
        self._location = _Location(_ON_DEVICE, device.value)
        self._properties = _Properties(_PINNED, _FILE_DESCRIPTOR, self._location)
        granularity = ctypes.c_size_t()
        minimum = ctypes.c_int(0)
        properties = ctypes.byref(self._properties)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), properties, minimum)
        self._granularity = granularity.value

    def allocate(self, num_bytes: int) -> Allocation:
        num_bytes = _rounded(num_bytes, self._granularity)
        handle, fd = ctypes.c_ulonglong(), ctypes.c_int(-1)
        size, flags = ctypes.c_size_t(num_bytes), ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), flags)
        try:
            kind = ctypes.c_int(_FILE_DESCRIPTOR)
            self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, kind, flags)
        except AllocationError:
            self._call("cuMemRelease", handle)
            raise
        return Allocation(fd.value, num_bytes, handle.value)

    def free(self, allocation: Allocation) -> None:
        os.close(allocation.fd)
        self._call("cuMemRelease", ctypes.c_ulonglong(allocation.handle))

    def reserve(self, num_bytes: int) -> int:
        address, none = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        size, alignment = ctypes.c_size_t(num_bytes), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, alignment, none, none)
        return address.value

    def release(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def map(self, address: int, num_bytes: int, fd: int) -> None:
        handle, kind = ctypes.c_ulonglong(), ctypes.c_int(_FILE_DESCRIPTOR)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), kind)
        at, size = ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes)
        try:
            self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        finally:
            self._call("cuMemRelease", handle)  # the mapping holds the memory
        access = _Access(self._location, _READ_AND_WRITE)
        try:
            self._call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        except AllocationError:
            self._call("cuMemUnmap", at, size)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._driver, name, None)
        if function is None:
            raise AllocationError(f"the driver has no {name}")
        if code := function(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise AllocationError(f"{name}: {(text.value or b'error %d' % code).decode()}")


def _rounded(num_bytes: int, to: int) -> int:
    return -(-max(1, num_bytes) // to) * to
