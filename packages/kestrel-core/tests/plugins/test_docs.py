"""docs/plugins.md lists every hook with its arguments, and nothing that is not there."""

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kestrel import spi, testing
from kestrel.plugins import PluginHost, hookspecs

PAGE = Path(__file__).parents[4] / "docs/plugins.md"


@pytest.fixture(scope="module")
def page() -> str:
    if not PAGE.is_file():
        pytest.skip("the documentation is not part of this distribution")
    return PAGE.read_text(encoding="utf-8")


def test_page_lists_every_hook_with_its_arguments(page: str):
    listed = dict(re.findall(r"^\| `(kestrel_\w+)\((.*?)\)`", page, flags=re.MULTILINE))
    specified = {
        name: ", ".join(inspect.signature(vars(hookspecs)[name]).parameters) for name in hookspecs.__all__
    }
    assert listed == specified


def test_every_hook_specification_is_exported():
    written = {name for name in vars(hookspecs) if name.startswith("kestrel_")}
    assert written == set(hookspecs.__all__)


def test_page_names_every_public_name_of_the_spi(page: str):
    missing = [name for name in spi.__all__ if not re.search(rf"\b{name}\b", page)]
    assert not missing


def test_page_names_everything_in_the_test_kit(page: str):
    _, section = page.split("## Testing a plugin")
    assert [name for name in testing.__all__ if f"`{name}`" not in section] == []
    assert all(vars(testing)[name] for name in testing.__all__)


def test_page_states_the_current_spi_version(page: str):
    assert f"KESTREL_SPI_VERSION = {spi.VERSION}" in page


def test_example_of_the_page_is_a_plugin(page: str):
    source, *_ = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    module = types.ModuleType("kestrel_acme")
    exec(source, vars(module))
    host = PluginHost.from_modules({"acme": module})
    assert not host.failed
    assert [entry.name for entry in host.catalog()] == ["acme/one"]


def test_backend_of_the_page_agrees_with_the_references(page: str, monkeypatch: pytest.MonkeyPatch):
    _, section = page.split("## Adding a kernel backend")
    plugin, norms, check, *_ = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    module = types.ModuleType("kestrel_acme.norms")
    exec(norms, vars(module))
    monkeypatch.setitem(sys.modules, "kestrel_acme", types.ModuleType("kestrel_acme"))
    monkeypatch.setitem(sys.modules, "kestrel_acme.norms", module)
    names: dict[str, Any] = {}
    exec(plugin + check, names)
    names["test_the_backend_agrees_with_the_references"]()
