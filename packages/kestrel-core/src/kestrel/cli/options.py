"""Options that several commands share, as dataclasses, and the decorator that makes flat typer commands of them.

A command takes whole groups (``model: ModelOptions``); on the command line every field is an option of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from kestrel.cli.failures import guarded

__all__ = ["ModelOptions", "OutputOptions", "SettingOptions", "ordinary"]


def ordinary(function: Callable[..., Any]) -> Callable[..., None]:
    """``function`` as typer takes it: groups spread into options, plus ``--debug`` and the handling of failures."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    for group in (*groups.values(), _DebugOption):
        parameters += _spread(group)

    @functools.wraps(function)
    def command(**given: Any) -> None:
        debug = given.pop("debug")
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        guarded(lambda: function(**given), debug=debug)

    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    return command


def _spread(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(group)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DebugOption:
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure, and more log lines.")
    ] = False


_MODEL = "Model"
_SETTINGS = "Settings"
_OUTPUT = "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Name or hub id. Default: the embedded model.", rich_help_panel=_MODEL
        ),
    ] = None
    model_path: Annotated[
        str | None,
        typer.Option(
            help="A safetensors file, or a directory as the hub lays it out.", rich_help_panel=_MODEL
        ),
    ] = None
    revision: Annotated[
        str | None, typer.Option(help="Commit, tag or branch on the hub.", rich_help_panel=_MODEL)
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=_MODEL)] = (
        "auto"
    )
    dtype: Annotated[
        str, typer.Option(help="auto, float32, float16 or bfloat16.", rich_help_panel=_MODEL)
    ] = "auto"
    offline: Annotated[
        bool, typer.Option("--offline", help="Open no connection.", rich_help_panel=_MODEL)
    ] = False
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="KEY=VALUE",
            help="Any other engine setting; repeatable.",
            rich_help_panel=_MODEL,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOptions:
    """Settings of a request; what is not given is the model's default (``kestrel show`` prints them)."""

    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SETTINGS)] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from this much probability, above 0.", rich_help_panel=_SETTINGS),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many tokens; 0 is all.", rich_help_panel=_SETTINGS)
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Length limit, reasoning included.", rich_help_panel=_SETTINGS)
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SETTINGS)
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.", rich_help_panel=_SETTINGS)
    ] = None
    timeout: Annotated[
        float | None, typer.Option(help="Seconds per request, queue included.", rich_help_panel=_SETTINGS)
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other setting; repeatable.", rich_help_panel=_SETTINGS
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How answers are shown."""

    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per file on stdout.", rich_help_panel=_OUTPUT)
    ] = False
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Tokens and times of each answer, on stderr.", rich_help_panel=_OUTPUT),
    ] = False
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", "-j", min=1, help="Files asked about at once.", rich_help_panel=_OUTPUT
        ),
    ] = 8
