"""Copies of one prompt (``n`` > 1): all but the first wait until its prompt is cached, then hit it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

__all__ = ["Siblings"]


@dataclass(slots=True)
class _Group:
    leader: int
    members: set[int] = field(default_factory=set)
    held: list[int] = field(default_factory=list)
    cached: bool = False


class Siblings:
    """Groups of sequences with one prompt. A group is forgotten when its last member leaves."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}

    def join(self, name: Hashable, member: int) -> bool:
        """True when ``member`` may run: it leads, or the prompt is cached. Else it is held until released."""
        group = self._groups.setdefault(name, _Group(member))
        group.members.add(member)
        if group.cached or group.leader == member:
            return True
        group.held.append(member)
        return False

    def prompt_cached(self, name: Hashable) -> list[int]:
        """The members to release now that the prompt is cached, in order."""
        group = self._groups[name]
        group.cached = True
        released, group.held = group.held, []
        return released

    def leave(self, name: Hashable, member: int) -> list[int]:
        """``member`` ended. When it led and the prompt is not cached, the next held member, which leads from now."""
        group = self._groups[name]
        group.members.discard(member)
        if member in group.held:
            group.held.remove(member)
        if not group.members:
            del self._groups[name]
        if group.leader != member or not group.held:
            return []
        group.leader = group.held.pop(0)
        return [group.leader]

    def __len__(self) -> int:
        """Groups that have members."""
        return len(self._groups)
