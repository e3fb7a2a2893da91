"""From exceptions to one line on stderr and an exit code: 2 for a bad request, 1 for the rest, 130 for Ctrl-C."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import typer

from kestrel.errors import InvalidRequestError, KestrelError

__all__ = ["BAD_REQUEST", "FAILED", "INTERRUPTED", "complain", "exit_code", "guarded", "message"]

FAILED = 1
BAD_REQUEST = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count it


def exit_code(error: BaseException) -> int:
    """The exit code that ``error`` asks for."""
    return BAD_REQUEST if isinstance(error, InvalidRequestError) else FAILED


def message(error: BaseException) -> str:
    """One line that says what went wrong; the type is named when it is not one of ours."""
    text = " ".join(str(error).split())
    if isinstance(error, KestrelError):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text} (--debug shows the traceback)"


def complain(error: BaseException, about: str = "") -> None:
    """Print ``error`` on stderr as one line, behind the file or step it is ``about``."""
    where = f"{about}: " if about else ""
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {where}{message(error)}", err=True)


def guarded(body: Callable[[], Any], *, debug: bool) -> None:
    """Run the body of a command, a coroutine to its end; failures become a line and an exit code."""
    from kestrel.cli.logs import configure_logs

    configure_logs(debug=debug)
    try:
        outcome = body()
        if inspect.iscoroutine(outcome):
            import asyncio

            asyncio.run(outcome)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        complain(error)
        raise typer.Exit(exit_code(error)) from None
