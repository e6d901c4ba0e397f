"""What NVML says of a GPU: how busy it is, memory, power, temperature, clocks, errors.

Read once a second by a thread, because a call into the driver can take milliseconds and releases Python's lock
meanwhile: steps wait for none of it. The package nvidia-ml-py (`pynvml`) is optional. What it, the driver or the device
does not know is left out, and an error is never one of the worker's.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_SLOWED = (
    "nvmlClocksEventReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)

# Any: pynvml has no type stubs, and its handles no class.
Nvml = Any
_Handle = Any
_Read = Callable[[Nvml, _Handle], float]

GAUGES: Mapping[str, _Read] = {
    "gpu_utilization_ratio": lambda n, gpu: n.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "gpu_memory_utilization_ratio": lambda n, gpu: n.nvmlDeviceGetUtilizationRates(gpu).memory / 100,
    "gpu_memory_used_bytes": lambda n, gpu: n.nvmlDeviceGetMemoryInfo(gpu).used,
    "gpu_memory_total_bytes": lambda n, gpu: n.nvmlDeviceGetMemoryInfo(gpu).total,
    "gpu_power_watts": lambda n, gpu: n.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "gpu_power_limit_watts": lambda n, gpu: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "gpu_temperature_celsius": lambda n, gpu: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
    "gpu_sm_clock_hertz": lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM) * 1e6,
    "gpu_memory_clock_hertz": lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_MEM) * 1e6,
    "gpu_is_slowed": lambda n, gpu: _is_slowed(n, n.nvmlDeviceGetCurrentClocksEventReasons(gpu)),
}
COUNTERS: Mapping[str, _Read] = {
    "gpu_energy_joules_total": lambda n, gpu: n.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
    "gpu_ecc_corrected_errors_total": lambda n, gpu: _ecc_errors(n, gpu, n.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "gpu_ecc_uncorrected_errors_total": lambda n, gpu: _ecc_errors(n, gpu, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
}
XID_ERRORS = "gpu_xid_errors_total"


def _is_slowed(nvml: Nvml, reasons: int) -> float:
    return float(any(reasons & getattr(nvml, name, 0) for name in _SLOWED))


def _ecc_errors(nvml: Nvml, gpu: _Handle, kind: int) -> float:
    return float(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC))


def _installed() -> Nvml:
    """The package; None: there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


class GpuMeter:
    """Of one device. Ends with its process, or with `close`."""

    def __init__(self, nvml: Nvml, gpu: _Handle) -> None:
        self.values: dict[str, float] = {}  # the last ones, by their names in /metrics; replaced and never changed
        self.bandwidth = 0.0  # of the memory, by its clock and bus, bytes per second; 0: unknown
        self._nvml, self._gpu = nvml, gpu
        self._num_xid = 0.0
        self._events: Any = None  # in which the driver puts Xid errors; None: it cannot
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    @classmethod
    def start(cls, uuid: str, nvml: Nvml = None) -> "GpuMeter | None":
        """uuid: of the device, as NVML writes it. nvml: the module; None: the installed package. None if there is no
        package, no driver or no such device."""
        if nvml is None:
            nvml = _installed()
            if nvml is None:
                return None
        try:
            nvml.nvmlInit()
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            log.info("NVML says nothing of the device %s: %s", uuid, error)
            return None
        meter = cls(nvml, gpu)
        meter._thread.start()
        return meter

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        with self._guarded():
            self._begin()
        while True:
            self.read()
            if self._is_closed.wait(_INTERVAL_S):
                return

    def _begin(self) -> None:
        nvml, gpu = self._nvml, self._gpu
        with self._guarded():
            # Each wire of the bus carries two bits in a cycle of this clock, for HBM and GDDR alike.
            clock = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1e6
            self.bandwidth = 2 * clock * nvml.nvmlDeviceGetMemoryBusWidth(gpu) / 8
        with self._guarded():
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read(self) -> None:
        """Replaces the values. The thread calls it."""
        found = {}
        for name, read in (*GAUGES.items(), *COUNTERS.items()):
            with self._guarded():
                found[name] = float(read(self._nvml, self._gpu))
        if self._events is not None:
            self._count_xid()
            found[XID_ERRORS] = self._num_xid
        self.values = found

    def _count_xid(self) -> None:
        with self._guarded():
            while True:  # until there is none, which is an error as well
                self._nvml.nvmlEventSetWait_v2(self._events, 0)
                self._num_xid += 1

    def _guarded(self) -> contextlib.AbstractContextManager[None]:
        """A device, a driver or a package that does not know something: that is left out."""
        return contextlib.suppress(self._nvml.NVMLError, AttributeError, TypeError, ValueError)
