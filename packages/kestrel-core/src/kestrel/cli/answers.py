"""Asks one thing about many files at once and shows the answers in the order of the files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import typer

from kestrel.cli import output, session
from kestrel.cli.failures import FAILED, complain, exit_code
from kestrel.cli.inputs import Picture
from kestrel.cli.options import ModelOptions, OutputOptions
from kestrel.types import ChunkKind, EngineResult

if TYPE_CHECKING:
    from kestrel.engine import EngineStream, InferenceEngine

__all__ = ["Ask", "answer", "show_stream"]

log = logging.getLogger(__name__)


class Written(Protocol):
    """Something that is written about a picture and its answer."""

    @property
    def verb(self) -> str:
        """What notes say before the path: "drawn in"."""

    def write(self, picture: Picture, output: Mapping[str, Any], /) -> str:
        """Write it; the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One skill with its inputs and settings. Each picture becomes the input ``role``; without pictures it is asked
    once. ``streams``: the answer is text that may be shown as it comes. ``reports``: its snapshots tell how far it got.
    ``lines``: the output as it is printed. ``file``: what is written about each picture, instead of printing it when
    ``prints`` is false.
    """

    skill: str
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any]
    pictures: Sequence[Picture] = ()
    role: str = "image"
    file: Written | None = None
    streams: bool = False
    reports: bool = False
    prints: bool = True
    lines: Callable[[Mapping[str, Any]], list[str]] = output.answer_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    picture: Picture | None
    result: EngineResult | None = None
    error: Exception | None = None
    written: str | None = None
    was_streamed: bool = False

    @property
    def name(self) -> str | None:
        return None if self.picture is None else self.picture.name


async def answer(ask: Ask, model: ModelOptions, shown: OutputOptions) -> None:
    """Answer ``ask`` for each of its pictures. A picture that fails is reported; the others are still answered.

    Exits with what the failures agree on, or with 1 when some pictures were answered.
    """
    show = _Show(ask, shown)
    if ask.pictures and all(picture.error for picture in ask.pictures):  # nothing worth loading a model for
        for picture in ask.pictures:
            show(_Answer(picture=picture, error=picture.error))
    else:
        async with session.opened(model) as engine:
            await _answer_all(engine, ask, show, shown.concurrency)
    show.exit()


async def _answer_all(engine: InferenceEngine, ask: Ask, show: _Show, concurrency: int) -> None:
    gate = asyncio.Semaphore(concurrency)

    with show.bars() as report:

        async def one(picture: Picture | None) -> _Answer:
            async with gate:
                return await _answer_one(engine, ask, picture, show.is_live, report)

        tasks = [asyncio.ensure_future(one(picture)) for picture in ask.pictures or (None,)]
        try:
            for number, task in enumerate(tasks, start=1):
                show(await task)
                if not ask.reports:
                    report("files", number, len(tasks))
        finally:
            for task in tasks:
                task.cancel()


async def _answer_one(
    engine: InferenceEngine, ask: Ask, picture: Picture | None, live: bool, report: session.Report
) -> _Answer:
    result = written = None
    try:
        inputs = dict(ask.inputs)
        if picture is not None:
            if picture.error:
                raise picture.error
            inputs[ask.role] = picture.source
        if live:
            result = await show_stream(await engine.start_stream(ask.skill, inputs, ask.settings))
        elif ask.reports and picture is not None and report is not session.no_report:
            result = await _followed(
                await engine.start_stream(ask.skill, inputs, ask.settings), picture.name, report
            )
        else:
            result = await engine.run(ask.skill, inputs, ask.settings)
        if ask.file is not None and picture is not None:
            written = await asyncio.to_thread(ask.file.write, picture, result.output)
    except Exception as error:  # a picture fails alone
        log.debug("%s failed", ask.skill, exc_info=error)
        return _Answer(picture=picture, result=result, error=error, was_streamed=live)
    return _Answer(picture=picture, result=result, written=written, was_streamed=live)


async def show_stream(stream: EngineStream) -> EngineResult:
    """The result of a text stream, its chunks written to stdout as they come, reasoning dimmed."""
    last: ChunkKind | None = None
    try:
        async for chunk in stream:
            if chunk.kind not in (ChunkKind.TEXT, ChunkKind.REASONING):
                continue
            if last is ChunkKind.REASONING and chunk.kind is ChunkKind.TEXT:
                output.write_chunk("\n")
            output.write_chunk(chunk.text, dim=chunk.kind is ChunkKind.REASONING)
            last = chunk.kind
    finally:
        if last is not None:
            output.write_chunk("\n")
    return await stream.result()


async def _followed(stream: EngineStream, name: str, report: session.Report) -> EngineResult:
    """The result of a stream of snapshots, which say how many seconds of how many are done."""
    async for chunk in stream:
        if chunk.kind is ChunkKind.SNAPSHOT and "completed_seconds" in chunk.value:
            report(name, round(chunk.value["completed_seconds"]), round(chunk.value["total_seconds"] or 0))
    return await stream.result()


@dataclass(slots=True)
class _Show:
    """Shows answers as the user asked, and keeps count for the exit code."""

    ask: Ask
    shown: OutputOptions
    num_answered: int = 0
    codes: list[int] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        """Whether the answer is shown while it is written: one text, to a terminal."""
        is_single = len(self.ask.pictures) <= 1 and self.ask.settings.get("n", 1) == 1
        return self.ask.streams and is_single and not self.shown.json and output.is_terminal(sys.stdout)

    def bars(self) -> contextlib.AbstractContextManager[session.Report]:
        """Progress bars, unless the answers themselves appear on the terminal meanwhile."""
        is_quiet = not (self.ask.prints and output.is_terminal(sys.stdout))
        if self.ask.reports and (is_quiet or len(self.ask.pictures) == 1):
            return session.progress_bars(session.clock)
        if len(self.ask.pictures) > 1 and is_quiet:
            return session.progress_bars()
        return contextlib.nullcontext(session.no_report)

    def __call__(self, answer: _Answer) -> None:
        if answer.result is not None:
            self._result(answer, answer.result)
        if answer.error is None:
            self.num_answered += 1
            return
        self.codes.append(exit_code(answer.error))
        if self.shown.json and answer.result is None:
            output.print_json(output.failure_json(answer.name, answer.error))
        about = answer.name or ""
        complain(answer.error, "" if about and about in str(answer.error) else about)

    def _result(self, answer: _Answer, result: EngineResult) -> None:
        if self.shown.json:
            output.print_json(output.result_json(answer.name, result))
        elif not answer.was_streamed and self.ask.prints:
            self._text(answer, result)
        about = f"{answer.name}: " if answer.name else ""
        for warning in result.warnings:
            output.warn(about + warning)
        if result.finish_reason == "length" and not self.shown.json:
            output.note(f"{about}stopped at the length limit; raise --max-tokens or --max-objects for more")
        if self.shown.stats:
            output.note(about + output.stats_line(result.metrics))
        if answer.written and self.ask.file is not None:
            output.note(f"{about}{self.ask.file.verb} {answer.written}")

    def _text(self, answer: _Answer, result: EngineResult) -> None:
        prefix = f"{answer.name}: " if len(self.ask.pictures) > 1 else ""
        for single in result.outputs or (result.output,):
            lines = self.ask.lines(single)
            for line in lines:
                output.print_text(prefix + line)
            if not lines:
                output.note(f"{answer.name}: nothing found")

    def exit(self) -> None:
        """Leave with an exit code when anything failed."""
        if self.codes:
            agreed = not self.num_answered and len(set(self.codes)) == 1
            raise typer.Exit(self.codes[0] if agreed else FAILED)
