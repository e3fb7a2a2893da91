"""The ``kestrel`` command: a table of subcommands, the commands of plugins, and the entry point.

Help shows the table. A command's module is imported, and its options are made, only when it is the one that runs;
plugins are scanned only for a name that is not in the table (a scan takes as long as the rest of the help).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

__all__ = ["COMMANDS", "build_app", "main"]

# Name: (module, function, the first line of the function's docstring).
COMMANDS = {
    "query": ("media_commands", "query", "Answer a question about each picture."),
    "caption": ("media_commands", "caption", "Describe each picture."),
    "point": ("media_commands", "point", "Point at an object in each picture."),
    "detect": ("media_commands", "detect", "Find the boxes around an object in each picture."),
    "segment": ("media_commands", "segment", "Outline an object in each picture."),
    "transcribe": ("speech_command", "transcribe", "Write down what is said in each recording."),
    "chat": ("chat_command", "chat", "Talk with a model, about pictures or anything else."),
    "list": (
        "model_commands",
        "list_",
        "List the models that can be named, and which of them are on this machine.",
    ),
    "show": ("model_commands", "show", "Show what a model can do, its default settings, size and licence."),
    "pull": ("model_commands", "pull", "Download a model, so that it can be used offline."),
    "plugins": (
        "model_commands",
        "plugins",
        "List installed plugins: version, hooks, and why one does not run.",
    ),
    "doctor": (
        "doctor_command",
        "doctor",
        "Show what this machine offers: devices, kernel backends, plugins.",
    ),
    "bench": ("doctor_command", "bench", "Measure a model's tokens per second on this machine."),
}
EPILOG = "Plugins may add commands: `kestrel plugins` shows the hooks that each implements."


class _Commands(TyperGroup):
    """Resolves a name to the built-in command, else to a plugin's."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        found = _built_in(name) if name in COMMANDS else _of_plugins(ctx, name)
        return (name, found, args[1:]) if found else super().resolve_command(ctx, args)


def _built_in(name: str) -> Any:
    from kestrel.cli.options import ordinary

    module, function, _ = COMMANDS[name]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name=name)(ordinary(import_module(f"kestrel.cli.{module}").__dict__[function]))
    return typer.main.get_command(app)


def _of_plugins(ctx: Any, name: str) -> Any:
    from kestrel.cli import session

    if name.startswith("-"):
        return None
    app = typer.Typer(
        callback=lambda: None, add_completion=False
    )  # the callback keeps a lone command a subcommand
    session.load_plugins().add_commands(app)
    if not app.registered_commands and not app.registered_groups:
        return None
    return typer.main.get_group(app).get_command(ctx, name)


def _in_help(summary: str) -> Callable[[], None]:
    """What stands for a command in the help."""

    def stand_in() -> None: ...

    stand_in.__doc__ = summary
    return stand_in


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kestrel {version('kestrel-core')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Ask images questions with multimodal models on this machine."""


def build_app() -> typer.Typer:
    """A fresh command line."""
    app = typer.Typer(
        cls=_Commands,
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # failures are one line; --debug shows Python's own traceback
    )
    app.callback()(_root)
    for name, (_, _, summary) in COMMANDS.items():
        app.command(name=name)(_in_help(summary))
    return app


def main() -> None:
    """Run the command line with the arguments of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold what a Windows console cannot show
    build_app()(prog_name="kestrel")
