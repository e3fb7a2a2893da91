"""The ``kestrel`` command: its subcommands, those of plugins, and the entry point."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kestrel.cli import chat_command, doctor_command, media_commands, model_commands, options

__all__ = ["build_app", "main"]

HELP = "Ask images questions with multimodal models on this machine."
EPILOG = "Plugins may add commands: `kestrel plugins` shows the hooks that each implements."


class _Commands(TyperGroup):
    """Built-in commands first. Plugins are scanned only for a name that is none of them, so that help stays fast."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or self._of_plugins(ctx, cmd_name)

    def _of_plugins(self, ctx: Any, name: str) -> Any:
        from kestrel.cli.session import load_plugins

        added = typer.Typer(callback=lambda: None)  # a callback keeps a single command a subcommand
        load_plugins().add_commands(added)
        if not added.registered_commands and not added.registered_groups:
            return None
        group = typer.main.get_group(added)
        return group.get_command(ctx, name)


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
    """A fresh command line with every built-in command."""
    app = typer.Typer(
        cls=_Commands,
        help=HELP,
        epilog=EPILOG,
        callback=_root,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # failures are one line; --debug shows Python's own traceback
    )
    for function in (
        media_commands.query,
        media_commands.caption,
        media_commands.point,
        media_commands.detect,
        media_commands.segment,
        chat_command.chat,
        model_commands.list_,
        model_commands.show,
        model_commands.pull,
        model_commands.plugins,
        doctor_command.doctor,
        doctor_command.bench,
    ):
        options.add_command(app, function, function.__name__.rstrip("_"))
    return app


def main() -> None:
    """Run the command line with the arguments of this process."""
    build_app()(prog_name="kestrel")
