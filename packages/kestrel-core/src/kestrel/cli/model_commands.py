"""Commands about what is installed: list, show, pull, plugins. They load no model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.options import ModelOptions

if TYPE_CHECKING:
    from kestrel.plugins import PluginHost

__all__ = ["list_", "plugins", "pull", "show"]

Json = Annotated[bool, typer.Option("--json", help="One JSON object per row on stdout.")]


def list_(*, json: Json = False) -> None:
    """List the models that can be named, and which of them are on this machine."""
    from kestrel.cli import session, tables

    host = session.load_plugins()
    rows = [
        {
            "name": entry.name,
            "family": family.name,
            "source": entry.source,
            "revision": entry.revision,
            "embedded": entry.embedded,
            "state": "embedded"
            if entry.embedded
            else "cached"
            if _is_here(entry.name, host)
            else "not pulled",
        }
        for family in host.families.values()
        for entry in family.catalog()
    ]
    tables.print_rows(rows, ("name", "family", "source", "revision", "state"), json=json)
    if not rows and not json:
        from kestrel.cli.output import note

        note(
            "no model family is installed; install one, such as the package kestrel-moondream (its README says how)"
        )


def _is_here(name: str, host: PluginHost) -> bool:
    from kestrel.cli import session
    from kestrel.config import RuntimeConfig
    from kestrel.errors import KestrelError

    try:
        session.locate_model(RuntimeConfig(model=name, offline=True), host)
    except KestrelError:
        return False
    return True


def show(
    model_name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name, hub id or local path.")
    ] = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    model: ModelOptions,
) -> None:
    """Show what a model can do, its default settings, size and licence.

    The model must be on this machine: see kestrel pull.
    """
    from kestrel.cli import session, tables
    from kestrel.cli.inputs import runtime_config, with_name

    host = session.load_plugins()
    blueprint = session.survey_model(runtime_config(with_name(model, model_name), offline=True), host)
    card, info = blueprint.card, blueprint.info
    facts: dict[str, Any] = {
        "model": card.model_id,
        **{f.name: getattr(info, f.name) for f in dataclasses.fields(info) if f.name != "defaults"},
        "path": str(card.path),
        "revision": card.revision,
        "weight_bytes": sum(size for name, size in card.files.items() if name.endswith(".safetensors")),
        "note": "" if blueprint.note in blueprint.info.notes else blueprint.note,
    }
    facts["skills"] = {
        name: host.skills[name].description if name in host.skills else "" for name in info.skills
    }
    facts["defaults"] = {skill: dict(values) for skill, values in info.defaults.items()}
    tables.print_facts(facts, json=json)


def pull(
    model_name: Annotated[str | None, typer.Argument(metavar="MODEL", help="Name or hub id.")] = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    model: ModelOptions,
) -> None:
    """Download a model, so that it can be used offline.

    What is already here is not fetched again.
    """
    from kestrel.cli import output, session
    from kestrel.cli.inputs import runtime_config, with_name

    host = session.load_plugins()
    with session.progress_bars() as report:
        located = session.locate_model(runtime_config(with_name(model, model_name)), host, report)
    if json:
        output.print_json(
            {"model": located.model_id, "path": str(located.path), "revision": located.revision}
        )
    else:
        output.print_text(str(located.path))
        output.note(f"{located.model_id} is on this machine")


def plugins(*, json: Json = False) -> None:
    """List installed plugins: version, hooks, and why one does not run."""
    from kestrel.cli import session, tables

    host = session.load_plugins()
    rows = [
        {
            "name": info.name,
            "version": info.version,
            "distribution": info.distribution,
            "hooks": list(info.hooks),
            "state": _state(info.error, info.is_enabled),
        }
        for info in host.plugins
    ]
    listed = {row["name"] for row in rows}
    rows += [
        {"name": name, "version": "", "distribution": "", "hooks": [], "state": _state(error, True)}
        for name, error in host.failed.items()
        if not any(name == known or name.startswith(f"{known} (") for known in listed)
    ]
    tables.print_rows(rows, ("name", "version", "distribution", "hooks", "state"), json=json)


def _state(error: Exception | None, is_enabled: bool) -> str:
    if error is not None:
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return "ok" if is_enabled else "left out by KESTREL_PLUGINS"
