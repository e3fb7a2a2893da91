"""``Infer`` for skills and compositions: requests become works on the model's lane, events become completions."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kestrel.engine.router import Receiver
from kestrel.errors import InvalidRequestError, RequestCancelledError, RequestTimeoutError
from kestrel.lanes import Finished
from kestrel.spi import Completion, Infer, MediaItem, Reader, Request
from kestrel.types import FinishReason, Media, Metrics, Prepared, StreamChunk, Token

if TYPE_CHECKING:
    from kestrel.engine.loaded import LoadedModel

__all__ = ["CallScope", "EngineInfer"]

R = TypeVar("R")


@dataclass(slots=True)
class CallScope:
    """What every request of one call shares: identity, deadline, seed, the stream, and what it cost so far.

    ``deadline`` is in ``time.monotonic`` seconds. ``cancelled`` is set once by the stream's close.
    """

    request_id: str
    seed: int
    submitted: float
    deadline: float | None = None
    emit: Callable[[StreamChunk], None] | None = None
    admitted: bool = False
    cancelled: bool = False
    active: set[Receiver] = field(default_factory=set)
    costs: list[Metrics] = field(default_factory=list)

    def cancel(self) -> None:
        """End the works under way as "cancelled"; requests made later are refused."""
        self.cancelled = True
        for receiver in list(self.active):
            receiver.finish(None)

    def total(self) -> Metrics:
        """The call's metrics: sums of its requests, queue time and TTFT of the first."""
        if not self.costs:
            return Metrics()
        first = self.costs[0]
        waited_ms = (time.monotonic() - self.submitted) * 1000.0
        return Metrics(
            input_tokens=sum(m.input_tokens for m in self.costs),
            output_tokens=sum(m.output_tokens for m in self.costs),
            cached_tokens=sum(m.cached_tokens for m in self.costs),
            queue_time_ms=first.queue_time_ms,
            prefill_time_ms=sum(m.prefill_time_ms for m in self.costs),
            decode_time_ms=sum(m.decode_time_ms for m in self.costs),
            ttft_ms=min(first.ttft_ms, waited_ms) if first.ttft_ms else 0.0,
        )


class EngineInfer(Infer):
    """One call's view of a loaded model."""

    def __init__(self, model: LoadedModel, scope: CallScope) -> None:
        self._model = model
        self._scope = scope
        self.tokenizer = model.tokenizer
        self.prompt = model.built.prompt

    async def __call__(self, request: Request) -> list[Completion]:
        settings = request.settings
        readers = [request.reader() if request.reader else None for _ in range(settings.n)]
        streamed = self._scope.emit is not None and settings.n == 1
        runs = [_Run(reader, self.emit if streamed else None, request) for reader in readers]
        receivers = await self._submit(request, [run.feed for run in runs])
        try:
            ends = await _all_done(receivers)
        finally:
            self._release(receivers)
        return [
            self._completion(request, run, end, choice)
            for choice, (run, end) in enumerate(zip(runs, ends, strict=True))
        ]

    async def stream(self, request: Request) -> AsyncIterator[Token]:
        if request.settings.n != 1:
            raise InvalidRequestError(f"a token stream has one output, not n={request.settings.n}")
        queue: asyncio.Queue[Token | None] = asyncio.Queue()

        def put(tokens: Sequence[Token]) -> None:
            for token in tokens:
                queue.put_nowait(token)

        receivers = await self._submit(request, [put])
        receivers[0].done.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (token := await queue.get()) is not None:
                yield token
            end = await receivers[0].done
            self._cost(end, 0)
        finally:
            self._release(receivers)

    async def prepare(self, item: MediaItem) -> Prepared:
        return await self._model.intake.prepare_item(item, self._model.no_settings)

    async def run_pass(
        self, name: str, inputs: Sequence[Mapping[str, Any]], media: Sequence[Prepared] = ()
    ) -> list[Any]:
        self._check_open()
        single_pass = self._model.built.passes.get(name)
        if single_pass is None:
            passes = ", ".join(sorted(self._model.built.passes)) or "none"
            raise InvalidRequestError(f"{self._model.model_id} has no pass {name!r}; it has: {passes}")
        future = self._model.thread.call(
            lambda: single_pass.infer(inputs, self._model.encode_for_pass(media))
        )
        return await asyncio.wrap_future(future)

    async def cpu(self, fn: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._model.pool, fn)

    def emit(self, chunk: StreamChunk) -> None:
        if self._scope.emit is not None and not self._scope.cancelled:
            self._scope.emit(chunk)

    def _check_open(self) -> None:
        if self._scope.cancelled:
            raise RequestCancelledError(f"request {self._scope.request_id} was cancelled")
        if self._scope.deadline is not None and time.monotonic() >= self._scope.deadline:
            raise RequestTimeoutError(f"request {self._scope.request_id} ran out of its timeout_s")

    async def _submit(
        self, request: Request, feeds: Sequence[Callable[[Sequence[Token]], None]]
    ) -> list[Receiver]:
        """Works on the lane, one per output; all of them or none."""
        self._check_open()
        make_works = await self.cpu(lambda: self._model.works(request))
        self._check_open()
        receivers = [self._model.router.open(feed) for feed in feeds]
        self._scope.active.update(receivers)
        try:
            for choice, receiver in enumerate(receivers):
                exempt = self._scope.admitted or choice > 0
                self._model.lane.submit(make_works(self._scope, receiver.work_id, choice, exempt))
                self._scope.admitted = True
        except BaseException:
            self._release(receivers)
            raise
        return receivers

    def _release(self, receivers: Sequence[Receiver]) -> None:
        """Cancel what still runs on the lane and forget the works."""
        for receiver in receivers:
            self._scope.active.discard(receiver)
            end = receiver.done
            ended = (
                end.done() and not end.cancelled() and end.exception() is None and end.result() is not None
            )
            if not ended:
                self._model.lane.cancel(receiver.work_id)
            self._model.router.close(receiver)

    def _completion(self, request: Request, run: _Run, end: Finished | None, choice: int) -> Completion:
        self._cost(end, choice)
        reason: FinishReason = "cancelled" if end is None else end.finish_reason
        return Completion(
            tokens=tuple(run.tokens),
            finish_reason=reason,
            probes=() if end is None else end.probes,
            output=run.finish(reason, None if end is None else end.output),
            metrics=Metrics() if end is None else end.metrics,
            seed=self._scope.seed,
            media=tuple(segment.prepared.meta for segment in request.segments if isinstance(segment, Media)),
        )

    def _cost(self, end: Finished | None, choice: int) -> None:
        if end is None:
            return
        metrics = end.metrics
        if choice:  # siblings share one prompt
            metrics = dataclasses.replace(metrics, input_tokens=0, cached_tokens=0, prefill_time_ms=0.0)
        self._scope.costs.append(metrics)


class _Run:
    """One output being read: tokens in, chunks out, the reader's result at the end."""

    def __init__(
        self, reader: Reader | None, emit: Callable[[StreamChunk], None] | None, request: Request
    ) -> None:
        self._reader = reader
        self._emit = emit
        self._stops = request.decoding.stop_ids | set(request.settings.stop_token_ids)
        self.tokens: list[Token] = []
        self._held: Token | None = None

    def feed(self, tokens: Sequence[Token]) -> None:
        self.tokens.extend(tokens)
        if self._reader is None:
            return
        for token in tokens:
            self._flush_held()
            if token.id in self._stops:
                self._held = token  # the final stop id is not for the reader; whether it is final shows later
            else:
                self._show(self._reader.feed(token))

    def _flush_held(self) -> None:
        if self._held is not None and self._reader is not None:
            held, self._held = self._held, None
            self._show(self._reader.feed(held))

    def finish(self, reason: FinishReason, output: Any) -> Any:
        if self._reader is None:
            return output
        if self._held is not None and reason != "stop":
            self._flush_held()
        chunks, result = self._reader.finish(reason)
        self._show(chunks)
        return result

    def _show(self, chunks: Sequence[StreamChunk]) -> None:
        if self._emit is not None:
            for chunk in chunks:
                self._emit(chunk)


async def _all_done(receivers: Sequence[Receiver]) -> list[Finished | None]:
    """Every work's end, in order; the first failure is raised at once."""
    await asyncio.wait([r.done for r in receivers], return_when=asyncio.FIRST_EXCEPTION)
    return [await receiver.done for receiver in receivers]
