"""What plugins registered, by name, and who owns each name. A plugin enters whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kestrel.errors import PluginError
from kestrel.spi import KernelBackend, ModelFamily, Skill, Source

__all__ = ["Contribution", "Registry"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one plugin (or the engine itself) registers."""

    families: Sequence[ModelFamily] = ()
    backends: Sequence[KernelBackend] = ()
    skills: Sequence[Skill] = ()
    sources: Sequence[Source] = ()
    adapter_sources: Sequence[Source] = ()

    def claims(self) -> Iterator[tuple[str, str]]:
        """Every name that this takes, with what it names."""
        for family in self.families:
            yield "model family", family.name
            for entry in family.catalog():
                yield "model name", entry.name
        for backend in self.backends:
            yield "kernel backend", backend.name
        for skill in self.skills:
            yield "skill", skill.name
        for source in self.sources:
            yield "model source", source.scheme
        for source in self.adapter_sources:
            yield "adapter source", source.scheme


@dataclass(slots=True)
class Registry:
    """Registered descriptors by name. ``owners`` maps a claim to the label of the plugin that holds it."""

    families: dict[str, ModelFamily] = field(default_factory=dict)
    backends: dict[str, KernelBackend] = field(default_factory=dict)
    skills: dict[str, Skill] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    adapter_sources: dict[str, Source] = field(default_factory=dict)
    owners: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, contribution: Contribution, owner: str) -> None:
        """Register all of ``contribution``, or nothing and raise PluginError naming both owners of a taken name."""
        claimed: dict[tuple[str, str], str] = {}
        for claim in contribution.claims():
            if holder := self.owners.get(claim) or claimed.get(claim):
                kind, name = claim
                raise PluginError(
                    f"plugin {owner} registers the {kind} {name!r}, which plugin {holder} already holds. "
                    "Uninstall one of them, or choose with KESTREL_PLUGINS"
                )
            claimed[claim] = owner
        self.owners |= claimed
        self.families |= _by(contribution.families, lambda family: family.name)
        self.backends |= _by(contribution.backends, lambda backend: backend.name)
        self.skills |= _by(contribution.skills, lambda skill: skill.name)
        self.sources |= _by(contribution.sources, lambda source: source.scheme)
        self.adapter_sources |= _by(contribution.adapter_sources, lambda source: source.scheme)


def _by(items: Sequence[T], key: Callable[[T], str]) -> dict[str, T]:
    return {key(item): item for item in items}
