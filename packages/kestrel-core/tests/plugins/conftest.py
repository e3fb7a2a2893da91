"""Plugins that are installed for one test: a module and a dist-info folder each, on the import path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., None]

GOOD = """
from kestrel.spi import Match, ModelFamily, ModelInfo, hookimpl
KESTREL_SPI_VERSION = 1
class Family(ModelFamily):
    name = {family!r}
    def match(self, card): return Match({score}) if card.config.get("model_type") == {family!r} else None
    def describe(self, card): raise NotImplementedError
    def build(self, card, ctx): raise NotImplementedError
@hookimpl
def kestrel_model_families(): return [Family()]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution: ``install("acme", source)`` gives it a module and an entry point of that name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(name: str, source: str, *, entry: str | None = None, version: str = "1.0") -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[kestrel]\n{entry or name} = {module}\n")

    yield install
    for added in set(sys.modules) - before:
        if Path(getattr(sys.modules[added], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[added]


@pytest.fixture
def good() -> Callable[..., str]:
    """The source of a plugin with one model family."""

    def source(family: str, score: int = 1) -> str:
        return GOOD.format(family=family, score=score)

    return source
