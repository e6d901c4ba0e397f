"""The meter of a GPU over a stand-in for NVIDIA's package: what it says, lacks and refuses. The stand-in has only names
that the real package has."""

import inspect
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from pagewire.api.gateway.metrics import GPU_METRICS
from pagewire.engine.device.nvml import COUNTERS, GAUGES, XID_ERRORS, GpuMeter

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
UUID = "GPU-5a1b3c5d-0000-1111-2222-333344445555"


class StandIn:
    """One GPU, as nvidia-ml-py speaks of it; `unknown`: functions that its driver refuses."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *unknown: str) -> None:
        self.xid_errors = deque[int]()
        self.registered: list[int] = []
        self._unknown = unknown

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.startswith("NVML_") or name.startswith(("nvmlClocks", "nvmlEventType")):
            return getattr(pynvml, name)
        assert callable(getattr(pynvml, name)), f"nvidia-ml-py has no {name}"
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        inspect.signature(getattr(pynvml, name)).bind(*arguments)  # as many arguments as it takes
        if name in self._unknown:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        match name, arguments:
            case "nvmlDeviceGetHandleByUUID", (uuid,) if uuid != UUID:
                raise self.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            case "nvmlDeviceRegisterEvents", (_, kind, _):
                self.registered.append(kind)
                return None
            case "nvmlEventSetWait_v2", ("events", 0):
                if not self.xid_errors:
                    raise self.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
                return self.xid_errors.popleft()
        return ANSWERS[name, *arguments]


GPU = 7  # its handle
ANSWERS: dict[tuple[Any, ...], Any] = {
    ("nvmlInit",): None,
    ("nvmlDeviceGetHandleByUUID", UUID): GPU,
    ("nvmlDeviceGetUtilizationRates", GPU): SimpleNamespace(gpu=83, memory=41),
    ("nvmlDeviceGetMemoryInfo", GPU): SimpleNamespace(used=3 << 30, total=8 << 30),
    ("nvmlDeviceGetPowerUsage", GPU): 251_500,
    ("nvmlDeviceGetEnforcedPowerLimit", GPU): 300_000,
    ("nvmlDeviceGetTemperature", GPU, pynvml.NVML_TEMPERATURE_GPU): 64,
    ("nvmlDeviceGetClockInfo", GPU, pynvml.NVML_CLOCK_SM): 1410,
    ("nvmlDeviceGetClockInfo", GPU, pynvml.NVML_CLOCK_MEM): 1215,
    ("nvmlDeviceGetCurrentClocksEventReasons", GPU): (
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
    ),
    ("nvmlDeviceGetTotalEnergyConsumption", GPU): 5_000_250,
    ("nvmlDeviceGetTotalEccErrors", GPU, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC): 12,
    ("nvmlDeviceGetTotalEccErrors", GPU, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC): 1,
    ("nvmlDeviceGetMaxClockInfo", GPU, pynvml.NVML_CLOCK_MEM): 1000,
    ("nvmlDeviceGetMemoryBusWidth", GPU): 4096,
    ("nvmlEventSetCreate",): "events",
}


def test_what_the_device_says_is_in_units_without_prefix() -> None:
    driver = StandIn()
    driver.xid_errors.extend((79, 48))
    meter = GpuMeter.start(UUID, driver)
    assert meter is not None
    until(lambda: bool(meter.values), "the thread has read")
    meter.close()
    assert meter.values == {
        "gpu_utilization_ratio": 0.83, "gpu_memory_utilization_ratio": 0.41,
        "gpu_memory_used_bytes": 3 << 30, "gpu_memory_total_bytes": 8 << 30,
        "gpu_power_watts": 251.5, "gpu_power_limit_watts": 300, "gpu_energy_joules_total": 5000.25,
        "gpu_temperature_celsius": 64, "gpu_sm_clock_hertz": 1.41e9, "gpu_memory_clock_hertz": 1.215e9,
        "gpu_is_slowed": 1, "gpu_ecc_corrected_errors_total": 12, "gpu_ecc_uncorrected_errors_total": 1,
        "gpu_xid_errors_total": 2,
    }  # fmt: skip
    assert meter.values.keys() == GPU_METRICS.keys()
    assert driver.registered == [pynvml.nvmlEventTypeXidCriticalError]
    assert meter.bandwidth == 2 * 1000e6 * 4096 / 8


@pytest.mark.parametrize(
    ("refused", "lacking"),
    [
        ("nvmlDeviceGetTotalEccErrors", {"gpu_ecc_corrected_errors_total", "gpu_ecc_uncorrected_errors_total"}),
        ("nvmlDeviceGetPowerUsage", {"gpu_power_watts"}),
        ("nvmlDeviceGetUtilizationRates", {"gpu_utilization_ratio", "gpu_memory_utilization_ratio"}),
        ("nvmlEventSetCreate", {XID_ERRORS}),
        ("nvmlDeviceRegisterEvents", {XID_ERRORS}),
        ("nvmlDeviceGetMemoryBusWidth", set()),
    ],
)
def test_what_a_driver_does_not_know_is_left_out(refused: str, lacking: set[str]) -> None:
    meter = GpuMeter.start(UUID, StandIn(refused))
    assert meter is not None
    until(lambda: bool(meter.values), "the thread has read")
    meter.close()
    assert {*GAUGES, *COUNTERS, XID_ERRORS} - meter.values.keys() == lacking
    assert (meter.bandwidth > 0) == (refused != "nvmlDeviceGetMemoryBusWidth")


def test_a_package_that_lacks_a_function_leaves_its_value_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")

    class Older(StandIn):
        def __getattr__(self, name: str) -> Any:
            if name == "nvmlDeviceGetCurrentClocksEventReasons":
                raise AttributeError(name)
            return super().__getattr__(name)

    meter = GpuMeter.start(UUID, Older())
    assert meter is not None
    until(lambda: bool(meter.values), "the thread has read")
    meter.close()
    assert {*GAUGES, *COUNTERS, XID_ERRORS} - meter.values.keys() == {"gpu_is_slowed"}


def test_without_a_driver_a_device_or_a_package_there_is_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuMeter.start(UUID, StandIn("nvmlInit")) is None
    assert GpuMeter.start("GPU-another", StandIn()) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    assert GpuMeter.start(UUID) is None


def test_the_real_package_without_this_device() -> None:
    assert GpuMeter.start("GPU-00000000-0000-0000-0000-000000000000") is None
