"""Which media items one encoder launch takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["EncodeItem", "plan_encode"]

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class EncodeItem(Generic[K]):
    """A media item that waits for the encoder, with its cost in encoder units."""

    key: K
    kind: str
    cost: int


def plan_encode(items: Sequence[EncodeItem[K]], max_cost: Mapping[str, int]) -> tuple[EncodeItem[K], ...]:
    """The items of one launch: those of the first item's kind, in order, while their cost fits ``max_cost[kind]``.

    The first always runs, even when it alone costs more; a later one that does not fit ends the launch, so that
    order is kept.
    """
    if not items:
        return ()
    kind, left = items[0].kind, max_cost[items[0].kind]
    taken: list[EncodeItem[K]] = []
    for item in items:
        if item.kind != kind:
            continue
        if taken and item.cost > left:
            break
        taken.append(item)
        left -= item.cost
    return tuple(taken)
