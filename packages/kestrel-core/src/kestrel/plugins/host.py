"""The plugin host: loads what is installed, keeps what failed, and passes events on. An instance each, no globals."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kestrel.config import Environment
from kestrel.errors import PluginError, UnknownModelError
from kestrel.plugins.discovery import Candidate, installed
from kestrel.plugins.registry import Contribution, Registry
from kestrel.plugins.relay import Relay
from kestrel.spi import (
    CatalogEntry,
    KernelBackend,
    Match,
    ModelCard,
    ModelFamily,
    RequestRecord,
    Skill,
    Source,
)

__all__ = ["PluginHost", "PluginInfo"]

CORE = "kestrel-core"
BUILT_IN = (
    ("model source", "file"),  # kestrel.hub's
    ("model source", "hf"),
    ("kernel backend", "reference"),  # kestrel.ops.REFERENCE; importing it would import torch
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """A row of ``kestrel plugins``. ``hooks`` it implements; ``error`` why it does not run; ``is_enabled`` False
    when ``KESTREL_PLUGINS`` leaves it out (it is not imported then)."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    error: Exception | None = None
    is_enabled: bool = True


class PluginHost:
    """Plugins and what they registered, by name.

    ``failed`` maps a plugin's name to why it does not run; everything else runs without it.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        *,
        only: Sequence[str] | None = None,
        skills: Sequence[Skill] = (),
    ) -> None:
        self._registry = Registry()
        self._relays: dict[str, Relay] = {}
        self._failed: dict[str, Exception] = {}
        self._plugins: list[PluginInfo] = []
        self._registry.add(Contribution(skills=skills), CORE)
        self._registry.owners |= dict.fromkeys(BUILT_IN, CORE)
        self._load_all(list(candidates), only)

    @classmethod
    def load(
        cls,
        env: Environment | None = None,
        *,
        skills: Sequence[Skill] = (),
    ) -> PluginHost:
        """The installed plugins, or those of them that ``env`` names; ``skills`` are the built-in ones."""
        only = (Environment.read() if env is None else env).plugins
        return cls(installed(), only=only, skills=skills)

    @classmethod
    def from_modules(
        cls,
        plugins: Mapping[str, object],
        *,
        skills: Sequence[Skill] = (),
    ) -> PluginHost:
        """These modules as plugins, nothing that is installed: for tests and for programs that embed Kestrel."""

        def candidate(name: str, plugin: object) -> Candidate:
            return Candidate(name=name, distribution="given", version="", load=lambda: plugin)

        found = [candidate(name, plugin) for name, plugin in plugins.items()]
        return cls(found, skills=skills)

    @property
    def families(self) -> Mapping[str, ModelFamily]:
        """Model families by name."""
        return MappingProxyType(self._registry.families)

    @property
    def backends(self) -> Mapping[str, KernelBackend]:
        """Kernel backends by name."""
        return MappingProxyType(self._registry.backends)

    @property
    def skills(self) -> Mapping[str, Skill]:
        """Skills by name, the built-in ones included."""
        return MappingProxyType(self._registry.skills)

    @property
    def sources(self) -> Mapping[str, Source]:
        """Model sources of plugins by scheme; ``kestrel.hub`` has the built-in ones."""
        return MappingProxyType(self._registry.sources)

    @property
    def adapter_sources(self) -> Mapping[str, Source]:
        """Adapter sources by scheme."""
        return MappingProxyType(self._registry.adapter_sources)

    @property
    def failed(self) -> Mapping[str, Exception]:
        """Why plugins do not run, by plugin name."""
        return MappingProxyType(self._failed)

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin found, loaded or not, by name."""
        return tuple(self._plugins)

    def catalog(self) -> tuple[CatalogEntry, ...]:
        """Every model name that users may type, family by family."""
        return tuple(entry for family in self.families.values() for entry in family.catalog())

    def failures(self) -> str:
        """A sentence for error messages that names the plugins that do not run and why; empty when all do."""
        if not self._failed:
            return ""
        return f"Failed to load: {_reasons(self._failed)}."

    def match(self, card: ModelCard) -> ModelFamily:
        """The family that recognises ``card`` best. UnknownModelError when none does, PluginError for a tie."""
        scores: dict[str, int] = {}
        broken: dict[str, Exception] = {}
        for name, family in self.families.items():
            try:
                match = family.match(card)
                if match is not None and not isinstance(match, Match):
                    raise TypeError(f"match gave a {type(match).__name__}, not a Match")
            except Exception as error:
                log.warning("family %s failed to look at %s", name, card.model_id, exc_info=error)
                broken[name] = error
                continue
            if match is not None:
                scores[name] = match.score
        best = [name for name, score in scores.items() if score == max(scores.values())]
        if len(best) > 1:
            raise PluginError(
                f"families {' and '.join(best)} both claim {card.model_id!r} with score {scores[best[0]]}. "
                "Uninstall one of them, or choose with KESTREL_PLUGINS"
            )
        if not best:
            raise UnknownModelError(self._no_match(card, broken))
        return self.families[best[0]]

    def server_routes(self, engine: object, config: object) -> list[object]:
        """Routes that plugins add to the server; a plugin whose hook raises adds none and is in ``failed``."""
        routes: list[object] = []
        for name in tuple(self._relays):
            for found in self._ask(name, "kestrel_server_routes", engine=engine, config=config):
                routes += found
        return routes

    def add_commands(self, cli: object) -> None:
        """Let plugins add commands to ``cli``; a plugin whose hook raises is in ``failed``."""
        for name in tuple(self._relays):
            self._ask(name, "kestrel_commands", cli=cli)

    def request_finished(self, record: RequestRecord) -> None:
        """Tell observers. What they raise is logged and goes no further."""
        for name, relay in self._relays.items():
            try:
                relay.call("kestrel_request_finished", record=record)
            except Exception:
                log.exception("plugin %s failed to observe request %s", name, record.request_id)

    def _load_all(self, candidates: list[Candidate], only: Sequence[str] | None) -> None:
        taken: dict[str, Candidate] = {}
        for candidate in candidates:
            if only is not None and candidate.name not in only:
                self._plugins.append(_row(candidate, is_enabled=False))
            elif (first := taken.setdefault(candidate.name, candidate)) is not candidate:
                twice = f"{candidate.label} has the name of plugin {first.label}. Uninstall one of them"
                self._fail(
                    f"{candidate.name} ({candidate.distribution})", candidate, PluginError(f"plugin {twice}")
                )
            else:
                self._load(candidate)
        for name in only or ():
            if name not in taken:
                found = ", ".join(sorted({candidate.name for candidate in candidates})) or "none"
                self._failed[name] = PluginError(
                    f"KESTREL_PLUGINS names {name!r}, which is not installed. Installed: {found}"
                )
                log.warning("%s", self._failed[name])

    def _load(self, candidate: Candidate) -> None:
        try:
            relay = Relay(candidate.name, candidate.load())
            self._registry.add(relay.contribution(), candidate.label)
        except (Exception, SystemExit) as error:  # a plugin may fail in any way; it fails alone
            reason = error if isinstance(error, Exception) else PluginError(f"it called exit({error.code!r})")
            self._fail(candidate.name, candidate, reason)
            return
        self._relays[candidate.name] = relay
        self._plugins.append(_row(candidate, hooks=relay.hooks))

    def _fail(self, name: str, candidate: Candidate, error: Exception) -> None:
        self._failed[name] = error
        self._plugins.append(_row(candidate, error=error))
        log.warning("plugin %s does not run: %s: %s", candidate.label, type(error).__name__, error)

    def _ask(self, name: str, hook: str, **arguments: object) -> list[list[object]]:
        try:
            return self._relays[name].call(hook, **arguments)
        except Exception as error:
            self._failed[name] = error
            log.exception("plugin %s failed in %s", name, hook)
            return []

    def _no_match(self, card: ModelCard, broken: Mapping[str, Exception]) -> str:
        kind = card.config.get("model_type", "none in config.json")
        installed_names = ", ".join(sorted(self.families)) or "none"
        message = f"no installed family matches {card.model_id!r} (model_type: {kind}). Installed: {installed_names}."
        if broken:
            message += f" Failed to look at it: {_reasons(broken)}."
        return f"{message} {self.failures()}".rstrip()


def _reasons(failed: Mapping[str, Exception]) -> str:
    return ", ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failed.items())


def _row(
    candidate: Candidate,
    *,
    hooks: tuple[str, ...] = (),
    error: Exception | None = None,
    is_enabled: bool = True,
) -> PluginInfo:
    return PluginInfo(
        name=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        hooks=hooks,
        error=error,
        is_enabled=is_enabled,
    )
