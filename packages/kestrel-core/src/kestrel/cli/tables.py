"""Rows and facts on stdout: a table on a terminal, tab-separated lines in a pipe, strict JSON when asked."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from kestrel.cli import output

__all__ = ["print_facts", "print_rows"]


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, json: bool, title: str | None = None
) -> None:
    """Print ``columns`` of ``rows``; as JSON every key of each row, an object per line."""
    if json:
        for row in rows:
            output.print_json(row)
    elif not rows:
        return
    elif output.is_terminal(sys.stdout):
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column.replace("_", " "), overflow="fold")
        for row in rows:
            table.add_row(*(_text(row[column]) for column in columns))
        Console(markup=False, highlight=False).print(table)
    else:
        typer.echo("\t".join(columns))
        for row in rows:
            typer.echo("\t".join(_text(row[column]) for column in columns))


def print_facts(facts: Mapping[str, Any], *, json: bool) -> None:
    """Print named facts, one per line, nested ones indented; as JSON one object. Empty ones are left out of text."""
    if json:
        output.print_json(facts)
        return
    _print_nested(facts, indent="")


def _print_nested(facts: Mapping[str, Any], indent: str) -> None:
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        label = name.replace("_", " ").ljust(width)
        if value is None or value in ("", (), [], {}):
            continue
        if isinstance(value, Mapping):
            typer.echo(indent + typer.style(label.rstrip(), bold=True))
            _print_nested({k: v if v != "" else "-" for k, v in value.items()}, indent + "  ")
        else:
            typer.echo(f"{indent}{typer.style(label, bold=True)}  {_text(value)}")


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "-"
    return str(value)
