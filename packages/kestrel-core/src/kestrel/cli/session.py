"""Opens the engine, or the plugins alone, for a command, and shows how far it has got."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from kestrel.cli import output
from kestrel.cli.inputs import runtime_config
from kestrel.cli.options import ModelOptions
from kestrel.config import Environment, RuntimeConfig

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine
    from kestrel.engine.loading import Blueprint
    from kestrel.hub import Located
    from kestrel.ops import OpChoice
    from kestrel.plugins import PluginHost

__all__ = [
    "Report",
    "clock",
    "create_engine",
    "decode_path",
    "load_plugins",
    "locate_model",
    "no_report",
    "op_choices",
    "opened",
    "progress_bars",
    "survey_model",
]

Report = Callable[[str, int, int], None]

_BYTES_FROM = 10_000  # totals above this are bytes; steps and layers are fewer


def load_plugins() -> PluginHost:
    """The installed plugins, with what is built in. Tests replace this."""
    from kestrel.plugins import PluginHost
    from kestrel.skills import builtin_skills

    return PluginHost.load(Environment.read(), skills=builtin_skills())


async def create_engine(config: RuntimeConfig, progress: Report, plugins: PluginHost) -> InferenceEngine:
    """An engine for one model. Tests replace this."""
    from kestrel.engine import InferenceEngine

    return await InferenceEngine.create(config, progress=progress, plugins=plugins)


def locate_model(config: RuntimeConfig, plugins: PluginHost, progress: Report | None = None) -> Located:
    """Where a model's files are; downloads them unless offline."""
    from kestrel.hub import resolve_model

    offline = config.offline or Environment.read().offline
    return resolve_model(config, plugins, offline=offline, progress=progress)


def survey_model(config: RuntimeConfig, plugins: PluginHost) -> Blueprint:
    """What is known of a model before it is loaded; downloads it unless offline."""
    from kestrel.engine.loading import survey

    return survey(config, plugins)


async def decode_path(engine: InferenceEngine) -> str:
    """How the engine's default model decodes: by captured programs, or op by op and why."""
    model = await engine.fleet.ready(engine.models[0])
    return str(model.decode)


async def op_choices(engine: InferenceEngine) -> list[OpChoice]:
    """Who serves each op of the engine's default model, and why others do not."""
    model = await engine.fleet.ready(engine.models[0])
    return model.ops.rows()


@contextlib.asynccontextmanager
async def opened(options: ModelOptions) -> AsyncIterator[InferenceEngine]:
    """The engine that the options ask for; stopped at the end, at once when a failure or Ctrl-C ends the block."""
    config = runtime_config(options)
    plugins = load_plugins()
    if config.model is None and config.model_path is None:
        announce_default(plugins)
    with progress_bars() as report:
        engine = await create_engine(config, report, plugins)
    async with engine:
        yield engine


def announce_default(plugins: PluginHost) -> None:
    """Say on stderr which model answers when none was named, and what it is."""
    for entry in plugins.catalog():
        if entry.embedded:
            about = entry.note if entry.name in entry.note else f"{entry.name} is used. {entry.note}".rstrip()
            output.note(f"no --model given: {about}")
            return


def no_report(what: str, done: int, total: int) -> None:
    """Progress that nobody sees."""


@contextlib.contextmanager
def progress_bars(amount: Callable[[int, int], str] | None = None) -> Iterator[Report]:
    """``report(what, done, total)`` for long work: bars on stderr, gone at the end; nothing unless a terminal.

    ``amount(done, total)``: the figure beside a bar; by default a count, or megabytes."""
    if not output.is_terminal(sys.stderr):
        yield no_report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn(),
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    shown = amount or _amount
    bars = Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
    )

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=None, amount="")
        bars.update(tasks[what], completed=done, total=total or None, amount=shown(done, total))

    with bars:
        yield report


def clock(done: int, total: int) -> str:
    """Seconds as minutes: "1:05/12:40"."""
    return f"{_minutes(done)}/{_minutes(total)}" if total else _minutes(done)


def _minutes(seconds: int) -> str:
    return f"{seconds // 60}:{seconds % 60:02d}"


def _amount(done: int, total: int) -> str:
    if not total:
        return ""
    if total < _BYTES_FROM:
        return f"{done}/{total}"
    return f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"
