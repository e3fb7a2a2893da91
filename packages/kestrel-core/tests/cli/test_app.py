"""The front of the command line: fast, light, open to commands of plugins."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import typer

from kestrel.cli import session
from kestrel.cli.app import COMMANDS
from kestrel.plugins import PluginHost
from kestrel.spi import VERSION, hookimpl

HEAVY = ("torch", "numpy", "PIL", "tokenizers", "huggingface_hub", "pluggy", "asyncio")


def modules_after(code: str) -> set[str]:
    """Modules that ``code`` leaves loaded in a bare interpreter."""
    probe = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('MODULES', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    return set(out[out.rindex("MODULES") :].split())


@pytest.mark.parametrize(
    "code",
    [
        "import kestrel",
        "from kestrel.cli.app import build_app; build_app()(['--help'])",
        "from kestrel.cli.app import build_app; build_app()(['query', '--help'])",
    ],
)
def test_help_loads_neither_torch_nor_plugins(code: str) -> None:
    assert not modules_after(code).intersection({*HEAVY, "kestrel.plugins", "kestrel.engine"})


def test_help_names_every_command(run: Any) -> None:
    text = run("--help").out
    for name in "query caption point detect segment chat list show pull plugins doctor bench".split():
        assert f" {name} " in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_sums_itself_up_as_its_help_begins(name: str, run: Any) -> None:
    module, function, summary = COMMANDS[name]
    found = import_module(f"kestrel.cli.{module}").__dict__[function]
    assert found.__doc__.splitlines()[0] == summary
    assert run(name, "--help").code == 0


def test_python_m_kestrel_is_the_same_command_and_shows_the_version() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kestrel", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("kestrel ")


def plugin(hook: Any) -> ModuleType:
    module = ModuleType("acme")
    module.__dict__.update(KESTREL_SPI_VERSION=VERSION, kestrel_commands=hookimpl(hook))
    return module


def test_a_plugin_adds_a_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def kestrel_commands(cli: typer.Typer) -> None:
        @cli.command()
        def greet(name: str) -> None:
            typer.echo(f"hello {name}")

    host = PluginHost.from_modules({"acme": plugin(kestrel_commands)})
    monkeypatch.setattr(session, "load_plugins", lambda: host)
    assert run("greet", "you").out == "hello you\n"
    assert run("great").code == 2


def test_a_plugin_whose_hook_fails_breaks_no_other_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def kestrel_commands(cli: typer.Typer) -> None:
        raise RuntimeError("broken")

    host = PluginHost.from_modules({"acme": plugin(kestrel_commands)})
    monkeypatch.setattr(session, "load_plugins", lambda: host)
    assert run("greet").code == 2
    assert "failed: RuntimeError: broken" in run("plugins").out or "acme" in host.failed


def test_a_built_in_command_is_never_replaced(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def kestrel_commands(cli: typer.Typer) -> None:
        @cli.command()
        def plugins() -> None:
            typer.echo("replaced")

    monkeypatch.setattr(
        session, "load_plugins", lambda: PluginHost.from_modules({"acme": plugin(kestrel_commands)})
    )
    assert "acme" in run("plugins").out
    assert "replaced" not in run("plugins").out
