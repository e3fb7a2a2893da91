"""From what a user typed to files on this machine."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kestrel.config import RuntimeConfig
from kestrel.errors import KestrelError, LoadError, UnknownModelError, closest
from kestrel.hub.file import FileSource
from kestrel.hub.hf import HubSource
from kestrel.plugins import PluginHost
from kestrel.spi import CatalogEntry, Source

__all__ = ["Located", "resolve_model"]

Progress = Callable[[str, int, int], None]

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", flags=re.ASCII)
_SCHEME = re.compile(
    r"([a-z][a-z0-9+.-]+):(.+)", flags=re.DOTALL
)  # two letters at least: one is a Windows drive


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A model's files: ``path`` is a directory in Hub layout or a safetensors file. ``note`` is to be shown."""

    path: Path
    model_id: str
    revision: str | None = None
    note: str = ""


def resolve_model(
    config: RuntimeConfig,
    host: PluginHost,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    sources: Mapping[str, Source] | None = None,
) -> Located:
    """Where the model of ``config`` is, downloaded if need be.

    In this order: ``model_path``; no name: the first embedded model; a name that a family registered;
    "scheme:reference"; a path that says it is one ("./x", "/x", "~/x", "x.safetensors"); "owner/name" at the hub.
    ``progress("download FILE", bytes done, bytes in all)``. ``sources`` are the built-in ones, replaced in tests.

    Raises UnknownModelError naming the closest registered names and the plugins that failed, LoadError for a
    download that fails.
    """
    built_in = (
        {source.scheme: source for source in (FileSource(), HubSource())} if sources is None else sources
    )
    finder = _Finder({**built_in, **host.sources}, host, offline or config.offline, progress)
    if config.model_path is not None:
        found = finder.at("file", str(config.model_path), config.revision)
        name = found.resolve().name.removesuffix(".safetensors")
        return Located(path=found, model_id=config.model or name, revision=config.revision)
    entry = _embedded(host) if config.model is None else _registered(config.model, host)
    if entry is not None:
        scheme, reference = _split(entry)
        revision = config.revision or entry.revision
        path = finder.at(scheme, reference, revision)
        return Located(path=path, model_id=entry.name, revision=_exact(path, revision), note=entry.note)
    assert config.model is not None
    scheme, reference = finder.reading(config.model)
    path = finder.at(scheme, reference, config.revision)
    return Located(path=path, model_id=reference, revision=_exact(path, config.revision))


@dataclass(frozen=True, slots=True)
class _Finder:
    sources: Mapping[str, Source]
    host: PluginHost
    offline: bool
    progress: Progress | None

    def reading(self, name: str) -> tuple[str, str]:
        """How an unregistered ``name`` is meant: its scheme and reference."""
        typed = _SCHEME.fullmatch(name)
        if typed is not None and typed[1] in self.sources:
            return typed[1], typed[2]
        if name.startswith((".", "/", "~")) or name.endswith(".safetensors") or Path(name).is_absolute():
            return "file", name
        if _REPOSITORY.fullmatch(name):
            return "hf", name
        known = closest(name, [entry.name for entry in self.host.catalog()])
        schemes = ", ".join(f"{scheme}:" for scheme in sorted(self.sources))
        raise UnknownModelError(
            f"no model is called {name!r}. {_local(name)}{known}. Or give owner/name at the hub, a path, or one of "
            f"{schemes} {self.host.failures()}".rstrip()
        )

    def at(self, scheme: str, reference: str, revision: str | None) -> Path:
        """The files of ``scheme:reference``."""
        source = self.sources.get(scheme)
        if source is None:
            raise UnknownModelError(
                f"no source serves {scheme}:{reference}. {closest(scheme, self.sources)}. "
                f"{self.host.failures()}".rstrip()
            )
        try:
            return source.locate(reference, revision=revision, offline=self.offline, progress=self._report())
        except UnknownModelError as error:
            local = _local(reference) if scheme == "hf" else ""
            raise UnknownModelError(f"{error}. {local}{self.host.failures()}".rstrip(". ")) from error
        except KestrelError:
            raise
        except Exception as error:  # a plugin's source may fail in any way
            raise LoadError(
                f"{scheme}:{reference} cannot be located: {type(error).__name__}: {error}. Check its plugin"
            ) from error

    def _report(self) -> Progress | None:
        progress = self.progress
        if progress is None:
            return None
        return lambda name, done, total: progress(f"download {name}", done, total)


def _local(name: str) -> str:
    """A hint for an unknown ``name`` that a directory here has."""
    return f"There is a directory {name!r} here: write ./{name}. " if os.path.isdir(name) else ""


def _embedded(host: PluginHost) -> CatalogEntry:
    entry = next((entry for entry in host.catalog() if entry.embedded), None)
    if entry is None:
        raise UnknownModelError(
            "no model was named, and no installed family has an embedded one. Name a model, or install the package "
            f"kestrel-moondream, whose README says how. {host.failures()}".rstrip()
        )
    return entry


def _registered(name: str, host: PluginHost) -> CatalogEntry | None:
    return next((entry for entry in host.catalog() if entry.name.casefold() == name.casefold()), None)


def _split(entry: CatalogEntry) -> tuple[str, str]:
    scheme, colon, reference = entry.source.partition(":")
    if not colon:
        raise UnknownModelError(
            f"model {entry.name!r} is registered with the source {entry.source!r}, which has no scheme"
        )
    return scheme, reference


def _exact(path: Path, revision: str | None) -> str | None:
    """The commit, where ``path`` is a snapshot of the hub's cache; else what was asked for."""
    return path.name if path.parent.name == "snapshots" else revision
