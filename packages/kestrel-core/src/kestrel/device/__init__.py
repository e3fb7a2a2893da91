"""Facts of the device a model runs on: which one, which dtype, how much memory; and the way of host arrays to it."""

from kestrel.device.choice import describe, has_streams, resolve_device, resolve_dtype, use_device
from kestrel.device.memory import (
    allocated_memory,
    counts_peaks,
    free_memory,
    peak_memory,
    reset_peak,
    total_memory,
)
from kestrel.device.staging import RowTable, Staging, shares_host

__all__ = [
    "RowTable",
    "Staging",
    "allocated_memory",
    "counts_peaks",
    "describe",
    "free_memory",
    "has_streams",
    "peak_memory",
    "reset_peak",
    "resolve_device",
    "resolve_dtype",
    "shares_host",
    "total_memory",
    "use_device",
]
