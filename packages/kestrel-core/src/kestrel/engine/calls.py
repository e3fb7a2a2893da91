"""One call from inputs to ``EngineResult``: validate, prepare media, run the skill, account for it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span

from kestrel.config import Settings
from kestrel.engine.infer import EngineInfer
from kestrel.engine.media import PreparedMedia
from kestrel.engine.result import composed, engine_result
from kestrel.engine.scope import CallScope
from kestrel.engine.streams import ChunkQueue, EngineStream
from kestrel.errors import (
    InvalidRequestError,
    KestrelError,
    ModelFaultError,
    RequestCancelledError,
    RequestTimeoutError,
)
from kestrel.media import MediaHold
from kestrel.spi import Call, Completion, PromptFormat, Request, RequestRecord, Skill
from kestrel.types import EngineResult

if TYPE_CHECKING:
    from kestrel.engine.fleet import Fleet
    from kestrel.engine.loaded import LoadedModel, Preparing
    from kestrel.engine.telemetry import Telemetry

__all__ = ["CallRunner"]

Given = Mapping[str, Any] | Settings | None

LAST_WAIT_S = 10.0  # for calls that were told to end: their own code may take its time, shutdown does not


@dataclass(frozen=True, slots=True)
class _Ready:
    """A validated call and what it runs on."""

    model: LoadedModel
    skill: Skill
    call: Call
    scope: CallScope
    span: Span


class CallRunner:
    """Runs the calls of one engine. ``observe`` is told of every ended call, whatever ended it."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry, observe: Callable[[RequestRecord], None]) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._observe = observe
        self._open: set[CallScope] = set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        fleet.on_lost = self._model_lost

    async def run(
        self, model_id: str, skill: str, inputs: Mapping[str, Any], settings: Given
    ) -> EngineResult:
        """The result of one call that is not streamed."""
        scope, span = self._begin(model_id, skill, streamed=False)
        try:
            with self._fleet.in_use(model_id):
                ready = await self._parse(skill, scope, span, inputs, settings)
                result = await self._answer(ready)
        except BaseException as error:
            self._end(scope, span, error)
            raise
        self._end(scope, span, result)
        return result

    async def stream(
        self, model_id: str, skill: str, inputs: Mapping[str, Any], settings: Given
    ) -> EngineStream:
        """A stream of one call; validation errors are raised here, later ones by the stream."""
        scope, span = self._begin(model_id, skill, streamed=True)
        chunks = ChunkQueue()
        scope.emit = chunks.put
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._fleet.in_use(model_id))
                ready = await self._parse(skill, scope, span, inputs, settings)
                if scope.settings.n != 1:
                    raise InvalidRequestError(
                        f"a stream shows one output; n is {scope.settings.n}. Leave n out"
                    )
                held = stack.pop_all()
        except BaseException as error:
            self._end(scope, span, error)
            raise

        def ended(task: asyncio.Task[EngineResult]) -> None:
            held.close()
            chunks.close()
            if task.cancelled():
                self._end(scope, span, asyncio.CancelledError())
            else:
                self._end(scope, span, task.exception() or task.result())

        def cancel() -> None:
            scope.cancel()
            chunks.close()

        task = asyncio.ensure_future(self._answer(ready))
        task.add_done_callback(ended)
        return EngineStream(task, chunks, cancel, scope.request_id)

    async def prepare(self, model_id: str, image: Any, given: Given) -> PreparedMedia:
        """``image`` prepared by a model for several calls; its owner holds it."""
        settings = Settings.from_mapping(given)
        scope = CallScope(model_id=model_id, skill="prepare")
        with self._fleet.in_use(model_id):
            model = await self._fleet.ready(model_id)
            with scope.typed_errors():
                model.intake.check([("image", image)])
                return await model.intake.prepare("image", image, settings, scope.submitted)

    async def wait_ended(self, timeout_s: float | None) -> None:
        """Until no call is under way, at most ``timeout_s``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)

    async def end_all(self, error: KestrelError) -> None:
        """End every call under way with ``error``, and wait until they have ended."""
        for scope in list(self._open):
            scope.end(error)
        running = [scope.task for scope in self._open if scope.task is not None]
        if running:
            await asyncio.wait(running, timeout=LAST_WAIT_S)

    def _model_lost(self, model_id: str, error: BaseException) -> None:
        for scope in [s for s in self._open if s.model_id == model_id and s.task is not None]:
            scope.end(
                ModelFaultError(
                    f"request {scope.request_id}: model {model_id!r} broke down ({type(error).__name__}: {error}). "
                    "It is loaded anew for the next request; if it repeats, look at the log and kestrel doctor."
                )
            )

    # -- accounting

    def _begin(self, model_id: str, skill: str, *, streamed: bool) -> tuple[CallScope, Span]:
        label = (
            skill if self._fleet.has_skill(skill) else "unknown"
        )  # names are labels: no caller may make new ones
        scope = CallScope(model_id=model_id, skill=label, streamed=streamed)
        self._open.add(scope)
        self._all_ended.clear()
        return scope, self._telemetry.begin(scope)

    def _end(self, scope: CallScope, span: Span, outcome: EngineResult | BaseException) -> None:
        self._open.discard(scope)
        if not self._open:
            self._all_ended.set()
        record = _record(scope, outcome)
        self._telemetry.end(span, record, scope.elapsed_s)
        self._observe(record)

    # -- the steps of a call

    async def _parse(
        self, name: str, scope: CallScope, span: Span, inputs: Mapping[str, Any], given: Given
    ) -> _Ready:
        skill = self._fleet.skill(name)
        model = await self._model(skill, scope, given)
        with scope.typed_errors():
            return self._validated(skill, model, scope, span, inputs, given)

    def _validated(
        self,
        skill: Skill,
        model: LoadedModel,
        scope: CallScope,
        span: Span,
        inputs: Mapping[str, Any],
        given: Given,
    ) -> _Ready:
        prompt = model.require_skill(skill.name)
        defaults = prompt.defaults(skill.name)
        settings = skill.settings(given, {"seed": secrets.randbits(63), **defaults})
        if settings.seed is None:  # a skill that takes no seed by default
            settings = settings.with_(seed=secrets.randbits(63))
        if not isinstance(inputs, Mapping):
            raise InvalidRequestError(f"inputs is a {type(inputs).__name__}; give a mapping of name to value")
        values = {name: value for name, value in inputs.items() if value is not None}
        if "reasoning" not in values and defaults.get("reasoning") is not None:
            values["reasoning"] = defaults["reasoning"]
        call = skill.parse(values, settings)
        scope.settings, scope.num_media = call.settings, len(call.media)
        model.intake.check(call.media)
        prompt.validate(skill.name, call)
        return _Ready(model, skill, call, scope, span)

    async def _model(self, skill: Skill, scope: CallScope, given: Given) -> LoadedModel:
        """The call's model. When it must be loaded first, wrong settings are refused before, and a timeout counts."""
        if self._fleet.slot(scope.model_id).model is not None:
            return await self._fleet.ready(scope.model_id)
        scope.settings = skill.settings(given, {})
        try:
            return await asyncio.wait_for(self._fleet.ready(scope.model_id), scope.settings.timeout_s)
        except asyncio.TimeoutError:
            raise scope.timed_out() from None

    async def _answer(self, ready: _Ready) -> EngineResult:
        """The call's result. It runs in a task of its own, so that deadline, stop and stream can end it anywhere."""
        scope = ready.scope
        scope.check()
        task = scope.task = asyncio.ensure_future(self._execute(ready))
        left = None if scope.deadline is None else max(0.0, scope.deadline - time.monotonic())
        try:
            await asyncio.wait([task], timeout=left)
            if not task.done():
                scope.end(scope.timed_out())
                await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.cancelled():
            raise scope.ended or RequestCancelledError(f"request {scope.request_id} was cancelled")
        try:
            with scope.typed_errors():
                return task.result()
        except RequestTimeoutError as error:
            raise scope.timed_out() from error

    async def _execute(self, ready: _Ready) -> EngineResult:
        model, call, scope = ready.model, ready.call, ready.scope
        infer = EngineInfer(model, scope)
        prompt = model.require_skill(ready.skill.name)
        composition = prompt.run(ready.skill.name)
        with (
            self._telemetry.within(ready.span),
            model.intake.budget.hold() as hold,
            contextlib.closing(infer),
            contextlib.closing(model.preparing(call.media)) as preparing,
        ):
            if composition is None and ready.skill.is_one_request and len(call.media) == 1:
                completions, warnings = await _in_one_turn(ready, infer, prompt, hold, preparing)
            else:
                prepared, warnings = await model.intake.prepare_all(
                    call.media, call.settings, hold, scope.submitted
                )
                preparing.close()
                call = call.with_prepared(prepared)
                if composition is not None:
                    completions = [composed(await composition(call, infer), call, scope)]
                else:
                    completions = await ready.skill.run(call, infer, prompt, model.require_tokenizer())
        return engine_result(completions, scope, warnings)


async def _in_one_turn(
    ready: _Ready, infer: EngineInfer, prompt: PromptFormat, hold: MediaHold, preparing: Preparing
) -> tuple[list[Completion], tuple[str, ...]]:
    """Completions, and warnings, of a call that is one request about one item: decoding it, making the request and
    handing it to the lane are one turn on the pool."""
    model, call, tokenizer = ready.model, ready.call, ready.model.require_tokenizer()
    ((role, raw),) = call.media
    warnings: list[str] = []

    def make() -> Request:
        item = model.intake.prepare_here(role, raw, call.settings, hold)
        preparing.close()
        warnings.extend(item.warnings)
        return ready.skill.request(call.with_prepared([item.prepared]), prompt, tokenizer)

    completions = await infer.made(make)
    return completions, tuple(warnings)


def _record(scope: CallScope, outcome: EngineResult | BaseException) -> RequestRecord:
    """What observers learn of an ended call."""
    status, error_type, reason = "ok", None, None
    if isinstance(outcome, EngineResult):
        reason = outcome.finish_reason
        status = "cancelled" if reason == "cancelled" else "ok"
    elif isinstance(outcome, asyncio.CancelledError | RequestCancelledError):
        status, error_type, reason = "cancelled", type(outcome).__name__, "cancelled"
    else:
        status, error_type = "failed", type(outcome).__name__
    return RequestRecord(
        request_id=scope.request_id,
        model_id=scope.model_id,
        skill=scope.skill,
        status=status,
        error_type=error_type,
        finish_reason=reason,
        metrics=scope.total(),
        num_media=scope.num_media,
        streamed=scope.streamed,
    )
