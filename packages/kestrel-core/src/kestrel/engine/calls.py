"""One call from inputs to ``EngineResult``: validate, prepare media, run the skill, account for it."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel.config import Settings
from kestrel.engine.infer import CallScope, EngineInfer
from kestrel.engine.streams import ChunkQueue, EngineStream
from kestrel.errors import InvalidRequestError, RequestCancelledError, RequestTimeoutError
from kestrel.spi import Call, Completion, RequestRecord, Skill
from kestrel.types import EngineResult

if TYPE_CHECKING:
    from kestrel.engine.loaded import LoadedModel
    from kestrel.engine.telemetry import Telemetry

__all__ = ["CallRunner"]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A validated call and what it runs on."""

    model: LoadedModel
    skill: Skill
    call: Call
    scope: CallScope


class CallRunner:
    """Runs calls of one engine. ``observe`` is told of every ended request."""

    def __init__(self, telemetry: Telemetry, observe: Callable[[RequestRecord], None]) -> None:
        self._telemetry = telemetry
        self._observe = observe

    async def run(
        self,
        model: LoadedModel,
        skill: Skill,
        inputs: Mapping[str, Any],
        settings: Mapping[str, Any] | Settings | None,
    ) -> EngineResult:
        """The result of one call that is not streamed."""
        ready = self._parse(model, skill, inputs, settings)
        return await self._accounted(ready, streamed=False)

    def stream(
        self,
        model: LoadedModel,
        skill: Skill,
        inputs: Mapping[str, Any],
        settings: Mapping[str, Any] | Settings | None,
    ) -> EngineStream:
        """A stream of one call; validation errors are raised here, later ones by the stream."""
        ready = self._parse(model, skill, inputs, settings)
        if ready.call.settings.n != 1:
            raise InvalidRequestError(f"a stream shows one output; n is {ready.call.settings.n}. Leave n out")
        chunks = ChunkQueue()
        ready.scope.emit = chunks.put
        usage = model.in_use()
        usage.__enter__()  # held until the task ends, started or not
        task = asyncio.ensure_future(self._streamed(ready, chunks))
        task.add_done_callback(lambda _: usage.__exit__(None, None, None))

        def cancel() -> None:
            ready.scope.cancel()
            chunks.close()

        return EngineStream(task, chunks, cancel, ready.scope.request_id)

    async def _streamed(self, ready: _Ready, chunks: ChunkQueue) -> EngineResult:
        try:
            return await self._accounted(ready, streamed=True)
        finally:
            chunks.close()

    def _parse(
        self,
        model: LoadedModel,
        skill: Skill,
        inputs: Mapping[str, Any],
        given: Mapping[str, Any] | Settings | None,
    ) -> _Ready:
        prompt = model.require_skill(skill.name)
        defaults = prompt.defaults(skill.name)
        settings = skill.settings(given, defaults)
        if settings.seed is None:
            settings = settings.with_(seed=secrets.randbits(63))
        values = dict(inputs)
        if "reasoning" in values and values["reasoning"] is None:
            values["reasoning"] = bool(defaults.get("reasoning", False))
        call = skill.parse(values, settings)
        model.intake.check(call.media)
        prompt.validate(skill.name, call)
        now = time.monotonic()
        assert settings.seed is not None
        deadline = None if settings.timeout_s is None else now + settings.timeout_s
        scope = CallScope(request_id=uuid.uuid4().hex, seed=settings.seed, submitted=now, deadline=deadline)
        return _Ready(model, skill, call, scope)

    async def _accounted(self, ready: _Ready, streamed: bool) -> EngineResult:
        scope, model = ready.scope, ready.model
        status, error_type, reason = "ok", None, None
        try:
            with self._telemetry.span(scope.request_id, model.model_id, ready.skill.name):
                result = await self._within_deadline(ready)
            reason = result.finish_reason
            status = "cancelled" if reason == "cancelled" else "ok"
            return result
        except (asyncio.CancelledError, RequestCancelledError) as error:
            status, error_type, reason = "cancelled", type(error).__name__, "cancelled"
            raise
        except BaseException as error:
            status, error_type = "failed", type(error).__name__
            raise
        finally:
            record = RequestRecord(
                request_id=scope.request_id,
                model_id=model.model_id,
                skill=ready.skill.name,
                status=status,
                error_type=error_type,
                finish_reason=reason,
                metrics=scope.total(),
                num_media=len(ready.call.media),
                streamed=streamed,
            )
            self._telemetry.record(record, time.monotonic() - scope.submitted)
            self._observe(record)

    async def _within_deadline(self, ready: _Ready) -> EngineResult:
        deadline = ready.scope.deadline
        if deadline is None:
            return await self._execute(ready)
        left = max(0.0, deadline - time.monotonic())
        try:
            return await asyncio.wait_for(self._execute(ready), left)
        except (asyncio.TimeoutError, RequestTimeoutError) as error:
            if isinstance(error, RequestTimeoutError):
                raise
            raise RequestTimeoutError(
                f"request {ready.scope.request_id} did not finish within timeout_s={ready.call.settings.timeout_s:g} s "
                "(queue time included). Retry, or raise timeout_s."
            ) from None

    async def _execute(self, ready: _Ready) -> EngineResult:
        model, call, scope = ready.model, ready.call, ready.scope
        prepared, warnings = await model.intake.prepare_all(call.media, call.settings)
        infer = EngineInfer(model, scope)
        prompt = model.require_skill(ready.skill.name)
        ready_call = call.with_prepared(prepared)
        composition = prompt.run(ready.skill.name)
        if composition is not None:
            output = await composition(ready_call, infer)
            completions = [Completion(output=output)]
        else:
            completions = await ready.skill.run(ready_call, infer, prompt, model.require_tokenizer())
        return _result(completions, model.model_id, scope, warnings)


def _result(
    completions: list[Completion], model_id: str, scope: CallScope, warnings: tuple[str, ...]
) -> EngineResult:
    first = completions[0]
    logprobs = tuple(token.logprobs for token in first.tokens if token.logprobs is not None)
    return EngineResult(
        output=first.output,
        outputs=tuple(c.output for c in completions),
        finish_reason=first.finish_reason,
        metrics=scope.total(),
        request_id=scope.request_id,
        seed=scope.seed,
        model_id=model_id,
        tokens=tuple(token.id for token in first.tokens),
        logprobs=logprobs if logprobs and len(logprobs) == len(first.tokens) else None,
        media=first.media,
        warnings=warnings,
    )
