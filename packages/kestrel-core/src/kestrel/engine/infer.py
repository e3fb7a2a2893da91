"""``Infer`` for skills and compositions: requests become works on the model's lane, events become completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kestrel.engine.reading import Output
from kestrel.engine.router import Receiver
from kestrel.errors import InvalidRequestError, KestrelError, ModelFaultError
from kestrel.lanes import Finished
from kestrel.lanes.faults import lost
from kestrel.spi import Completion, Infer, MediaItem, Request
from kestrel.types import Media, Prepared, StreamChunk, Token

if TYPE_CHECKING:
    from kestrel.engine.loaded import LoadedModel
    from kestrel.engine.scope import CallScope

__all__ = ["EngineInfer"]

R = TypeVar("R")

Feed = Callable[[Sequence[Token]], None]
Feeds = Callable[[Request], tuple[list[Feed], bool]]
"""Who reads each output of a request, and whether somebody watches."""


class _Begun:
    """A request whose works are on the lane, or on their way there while ``request`` is not known."""

    request: Request

    def __init__(self) -> None:
        self.receivers: list[Receiver] = []
        self.is_abandoned = False


class EngineInfer(Infer):
    """One call's view of a loaded model. ``close`` ends whatever of the call still runs on the lane."""

    def __init__(self, model: LoadedModel, scope: CallScope) -> None:
        self._model = model
        self._scope = scope
        self.tokenizer = model.tokenizer
        self.prompt = model.built.prompt

    @property
    def is_watched(self) -> bool:
        return self._scope.emit is not None

    async def __call__(self, request: Request) -> list[Completion]:
        return await self.made(lambda: request)

    async def made(self, make: Callable[[], Request]) -> list[Completion]:
        outputs: list[Output] = []

        def feeds(request: Request) -> tuple[list[Feed], bool]:
            is_watched = self.is_watched and request.settings.n == 1
            emit = self.emit if is_watched else None
            outputs.extend(Output(request, emit) for _ in range(request.settings.n))
            return [output.feed for output in outputs], is_watched

        begun = await self._begun(make, feeds)
        try:
            ends = await _all_done(begun.receivers)
        finally:
            self._settle(begun.receivers)
        runs = zip(outputs, begun.receivers, ends, strict=True)
        return [self._completion(begun.request, *run) for run in runs]

    async def stream(self, request: Request) -> AsyncIterator[Token]:
        if request.settings.n != 1:
            raise InvalidRequestError(f"a token stream has one output, not n={request.settings.n}")
        queue: asyncio.Queue[Token | None] = asyncio.Queue()

        def put(tokens: Sequence[Token]) -> None:
            for token in tokens:
                queue.put_nowait(token)

        begun = await self._begun(lambda: request, lambda _: ([put], True))
        receiver = begun.receivers[0]
        receiver.done.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (token := await queue.get()) is not None:
                yield token
            self._scope.reasons.append((await receiver.done).finish_reason)
        finally:
            self._settle(begun.receivers)

    async def prepare(self, item: MediaItem) -> Prepared:
        scope = self._scope
        return await self._model.intake.prepare_item(item, scope.settings, scope.submitted)

    async def run_pass(
        self, name: str, inputs: Sequence[Mapping[str, Any]], media: Sequence[Prepared] = ()
    ) -> list[Any]:
        model = self._model
        single_pass = model.built.passes.get(name)
        if single_pass is None:
            passes = ", ".join(sorted(model.built.passes)) or "none"
            raise InvalidRequestError(f"{model.model_id} has no pass {name!r}; it has: {passes}")

        def launch() -> list[Any]:
            with torch.inference_mode(), model.encoded(media) as encoded:
                return single_pass.infer(inputs, encoded)

        await model.running.wait()
        self._scope.check()
        try:
            return await asyncio.wrap_future(model.thread.call(launch))
        except KestrelError:
            raise
        except Exception as error:  # a pass fails like any other launch: this request alone
            what = f"request {self._scope.request_id}: pass {name!r} failed"
            raise ModelFaultError(lost(what, error)) from error

    async def cpu(self, fn: Callable[[], R]) -> R:
        return await self._model.pool.run(fn, self._scope.submitted)

    def emit(self, chunk: StreamChunk) -> None:
        if self._scope.emit is not None:
            self._scope.emit(chunk)

    def close(self) -> None:
        """Nobody reads any more: cancel the works of this call that are left, such as abandoned children."""
        for receiver in list(self._scope.running):
            self._settle([receiver])

    async def _begun(self, make: Callable[[], Request], feeds: Feeds) -> _Begun:
        """What ``make`` returns, its works on the lane: one per output, all of them or none.

        All of it is one step of the pool, so that the device has the work before the event loop's next turn comes.
        """
        begun = _Begun()
        self._scope.check()
        try:
            await self.cpu(lambda: self._begin(begun, make, feeds))
        except BaseException:
            begun.is_abandoned = True
            self._settle(begun.receivers)
            raise
        return begun

    def _begin(self, begun: _Begun, make: Callable[[], Request], feeds: Feeds) -> None:
        """Fill ``begun``. On a pool thread: the call may be given up meanwhile."""
        model, scope = self._model, self._scope
        begun.request = request = make()
        make_work = model.works(request, scope)
        scope.check()
        receive, is_watched = feeds(request)
        begun.receivers = [
            model.router.open(model.lane.cancel, feed, is_watched=is_watched) for feed in receive
        ]
        scope.running.update(begun.receivers)
        try:
            for choice, receiver in enumerate(begun.receivers):
                model.submit(make_work(receiver.work_id, choice, scope.admitted))
                scope.admitted = True  # the call's first work alone counts as queued
        finally:  # what was cancelled before it was submitted is cancelled again
            if begun.is_abandoned:
                model.router.abandon(begun.receivers)
            elif scope.ended is not None:
                for receiver in begun.receivers:
                    receiver.cancel()

    def _settle(self, receivers: Sequence[Receiver]) -> None:
        """Note what works cost, cancel what still runs of them, and forget them."""
        first = min((receiver.work_id for receiver in receivers), default=0)
        for receiver in receivers:
            self._scope.running.discard(receiver)
            self._scope.cost(receiver, is_sibling=receiver.work_id != first)
            self._model.router.close(receiver)

    def _completion(self, request: Request, output: Output, receiver: Receiver, end: Finished) -> Completion:
        self._scope.reasons.append(end.finish_reason)
        return Completion(
            tokens=tuple(output.tokens),
            finish_reason=end.finish_reason,
            probes=end.probes,
            output=output.finish(end.finish_reason, end.output),
            metrics=end.metrics,
            seed=self._scope.seed if request.settings.seed is None else request.settings.seed,
            media=tuple(segment.prepared.meta for segment in request.segments if isinstance(segment, Media)),
            frames=tuple(receiver.frames),
            durations=tuple(receiver.durations),
        )


async def _all_done(receivers: Sequence[Receiver]) -> list[Finished]:
    """Every work's end, in order; the first failure is raised at once."""
    if len(receivers) == 1:
        return [await receivers[0].done]
    done, _ = await asyncio.wait([r.done for r in receivers], return_when=asyncio.FIRST_EXCEPTION)
    for end in done:
        if end.cancelled() or end.exception() is not None:
            end.result()
    return [receiver.done.result() for receiver in receivers]
