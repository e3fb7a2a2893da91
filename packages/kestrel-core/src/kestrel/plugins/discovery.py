"""Finds installed plugins by their entry points. Importing a plugin, and what may go wrong there, is the host's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

__all__ = ["GROUP", "Candidate", "installed"]

GROUP = "kestrel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plugin that could be loaded: its entry-point name, the distribution it came in, and how to import it."""

    name: str
    distribution: str
    version: str
    load: Callable[[], object]

    @property
    def label(self) -> str:
        """How messages name it: the plugin and where it came from."""
        return f"{self.name!r} of {self.distribution} {self.version}".rstrip()


def installed() -> list[Candidate]:
    """Every installed plugin, none imported, in an order that does not depend on the search path."""
    found = [_candidate(entry) for entry in entry_points(group=GROUP)]
    return sorted(found, key=lambda candidate: (candidate.name, candidate.distribution))


def _candidate(entry: EntryPoint) -> Candidate:
    if entry.dist is None:
        return Candidate(name=entry.name, distribution="an unknown distribution", version="", load=entry.load)
    metadata = entry.dist.metadata
    return Candidate(
        name=entry.name, distribution=metadata["Name"], version=metadata["Version"], load=entry.load
    )
