"""Which running sequence gives its pages back when the pool is dry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Candidate", "choose_victim"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence as the choice sees it. ``arrival`` grows with the order of submission."""

    key: int
    priority: int
    arrival: int


def choose_victim(running: Iterable[Candidate]) -> int:
    """The key of the sequence to preempt: the lowest priority, then the youngest. ValueError when none runs."""
    return min(running, key=lambda c: (c.priority, -c.arrival)).key
