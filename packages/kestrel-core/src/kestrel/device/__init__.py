"""Facts of the device a model runs on: which one, which dtype, how much memory."""

from kestrel.device.choice import describe, has_streams, resolve_device, resolve_dtype
from kestrel.device.memory import free_memory, total_memory

__all__ = ["describe", "free_memory", "has_streams", "resolve_device", "resolve_dtype", "total_memory"]
