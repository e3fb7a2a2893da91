"""Adapter slots. Slot 0 means no adapter; leases and batches carry a slot."""

from kestrel.adapters.slots import AdapterSlots

__all__ = ["AdapterSlots"]
