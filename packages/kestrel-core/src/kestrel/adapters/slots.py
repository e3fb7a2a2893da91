"""Which adapter slot a sequence uses. Only slot 0, no adapter, exists: adapters cannot be loaded yet."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.errors import InvalidRequestError

__all__ = ["AdapterSlots"]

NONE = 0


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The slots of one model."""

    def acquire(self, name: str | None) -> int:
        """The slot of adapter ``name``; 0 for None. InvalidRequestError for any other name."""
        if name is None:
            return NONE
        raise InvalidRequestError(
            f"adapter {name!r} was asked for; adapters are not supported yet, leave it out"
        )

    def release(self, slot: int) -> None:
        """Give ``slot`` back. Slot 0 is shared by all and needs no count."""
        assert slot == NONE, f"slot {slot} was never given out"
