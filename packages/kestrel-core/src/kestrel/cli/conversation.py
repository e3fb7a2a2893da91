"""A conversation with a model over stdin and stdout. It runs its own event loop between turns, so that Ctrl-C while
typing ends the program at once and Ctrl-C during an answer ends only that answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from kestrel.cli import output, session
from kestrel.cli.answers import show_stream
from kestrel.cli.failures import complain, exit_code
from kestrel.cli.options import ModelOptions
from kestrel.errors import InvalidRequestError, KestrelError
from kestrel.types import EngineResult

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine

__all__ = ["Conversation"]

R = TypeVar("R")


class Conversation:
    """Turns read from stdin and answered in order; a turn that fails is left out of what follows."""

    def __init__(
        self,
        *,
        images: Sequence[Any],
        system: str | None,
        reasoning: bool | None,
        settings: Mapping[str, Any],
        as_json: bool,
        stats: bool,
    ) -> None:
        if settings.get("n", 1) != 1:
            raise InvalidRequestError(
                f"a conversation goes on with one answer; n is {settings['n']}. Leave n out"
            )
        self._images = list(images)
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._reasoning = reasoning
        self._settings = settings
        self._as_json = as_json
        self._stats = stats
        self._loop = asyncio.new_event_loop()

    def hold(self, model: ModelOptions) -> None:
        """Answer turns until stdin ends; exits with the code of the last turn that failed."""
        stack = contextlib.AsyncExitStack()
        code = 0
        try:
            engine = self._run(stack.enter_async_context(session.opened(model)))
            for line in _turns():
                code = self._answer(engine, line) or code
        finally:
            self._run(stack.aclose())
            self._run(self._loop.shutdown_asyncgens())
            self._run(self._loop.shutdown_default_executor())
            self._loop.close()
        if code:
            raise typer.Exit(code)

    def _answer(self, engine: InferenceEngine, text: str) -> int:
        """0, or the exit code of what failed."""
        asked = {"role": "user", "content": self._content(text)}
        try:
            result = self._run(self._ask(engine, [*self._messages, asked]))
        except KestrelError as error:
            if self._as_json:
                output.print_json(output.failure_json(None, error))
            complain(error)
            return exit_code(error)
        except KeyboardInterrupt:
            if not output.is_terminal(sys.stdin):
                raise
            output.note("(stopped; Ctrl-D ends the conversation)")
            return 0
        message = result.output["message"]
        self._messages += [asked, {"role": message["role"], "content": message["content"]}]
        self._images.clear()
        self._show(result)
        return 0

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        if not self._images:
            return text
        return [
            *({"type": "image", "image": image} for image in self._images),
            {"type": "text", "text": text},
        ]

    async def _ask(self, engine: InferenceEngine, messages: Sequence[Mapping[str, Any]]) -> EngineResult:
        inputs: dict[str, Any] = {"messages": messages, "reasoning": self._reasoning}
        if self._is_live:
            return await show_stream(await engine.start_stream("chat", inputs, self._settings))
        return await engine.run("chat", inputs, self._settings)

    @property
    def _is_live(self) -> bool:
        return not self._as_json and output.is_terminal(sys.stdout)

    def _show(self, result: EngineResult) -> None:
        if self._as_json:
            output.print_json(output.result_json(None, result))
        elif not self._is_live:
            output.print_text(result.output["message"]["content"])
        if self._stats:
            output.note(output.stats_line(result.metrics))

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """The coroutine's result. Ctrl-C cancels it and is raised once it has let go."""
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
            raise


def _turns() -> Iterator[str]:
    """Lines of stdin that say something, behind a prompt when a person types them."""
    is_person = output.is_terminal(sys.stdin)
    while True:
        if is_person:
            typer.secho("> ", err=True, nl=False, bold=True)
        line = sys.stdin.readline()
        if not line:
            if is_person:
                typer.echo(err=True)
            return
        if line.strip():
            yield line.strip()
