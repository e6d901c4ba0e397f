"""What a device says of itself."""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class DeviceReport(NamedTuple):
    bandwidth: float = 0.0  # of its memory, bytes per second; 0: unknown
    source: Literal["", "measured", "nominal"] = ""  # of the bandwidth
    gpu: Mapping[str, float] = {}  # what NVML says, by its name in /metrics
