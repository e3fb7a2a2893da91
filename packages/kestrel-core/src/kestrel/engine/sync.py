"""The engine for scripts and notebooks: the same verbs without ``await``, also inside a running event loop."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from kestrel import checks
from kestrel.config import RuntimeConfig
from kestrel.engine.core import AsyncVerbs, InferenceEngine, ModelHandle
from kestrel.engine.fleet import ProgressReport
from kestrel.engine.loop_thread import LoopThread
from kestrel.engine.media import PreparedMedia
from kestrel.engine.streams import EngineStream
from kestrel.engine.verbs import GivenSettings, Verbs
from kestrel.errors import EngineStoppedError
from kestrel.plugins import PluginHost
from kestrel.spi import ModelInfo
from kestrel.types import EngineResult, StreamChunk

__all__ = ["SyncEngine", "SyncModel", "SyncStream"]


class SyncStream:
    """An iterator of ``StreamChunk``; ``result()`` waits for the end, ``close()`` (or leaving early) cancels."""

    def __init__(self, stream: EngineStream, loop: LoopThread, owner: object) -> None:
        self._stream = stream
        self._loop = loop
        self._owner = owner  # an engine that is used is not dropped
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[StreamChunk]:
        ended = False
        try:
            while (chunk := self._next()) is not None:
                yield chunk
            ended = True
        finally:
            if not ended:
                self.close()

    def __next__(self) -> StreamChunk:
        chunk = self._next()
        if chunk is None:
            raise StopIteration
        return chunk

    def _next(self) -> StreamChunk | None:
        async def following() -> StreamChunk | None:
            return await anext(self._stream, None)

        return self._loop.run(following())

    def result(self) -> EngineResult:
        """The result, once the request has ended; also after the engine's shutdown."""
        if self._stream.is_done:
            return self._stream.ended_result()
        return self._loop.run(self._stream.result())

    def close(self) -> None:
        """Cancel the request if it still runs."""
        if not self._stream.is_done:
            with contextlib.suppress(EngineStoppedError):  # nothing of a stopped engine runs
                self._loop.run(self._stream.aclose())

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Waiting(Verbs[EngineResult, SyncStream]):
    """Verbs that wait for what the asynchronous ones give."""

    def __init__(self, verbs: AsyncVerbs, loop: LoopThread) -> None:
        self._verbs = verbs
        self._loop = loop

    def run(self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None) -> EngineResult:
        return self._loop.run(self._verbs.run(skill, inputs, settings))

    def start_stream(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> SyncStream:
        stream = self._loop.run(self._verbs.start_stream(skill, inputs, settings))
        return SyncStream(stream, self._loop, self)


class SyncModel(_Waiting):
    """One model of a ``SyncEngine``."""

    def __init__(self, handle: ModelHandle, loop: LoopThread, owner: SyncEngine) -> None:
        super().__init__(handle, loop)
        self._handle = handle
        self._owner = owner
        self.model_id = handle.model_id

    @property
    def info(self) -> ModelInfo:
        """What the family says of the checkpoint."""
        return self._handle.info

    @property
    def skills(self) -> tuple[str, ...]:
        """The skills that this model can do."""
        return self._handle.skills

    def supports(self, skill: str) -> bool:
        """Whether this model can do ``skill``."""
        return self._handle.supports(skill)

    def prepare(self, image: Any, settings: GivenSettings = None) -> PreparedMedia:
        """``image`` decoded and prepared once; accepted wherever this model takes an image."""
        return self._loop.run(self._handle.prepare(image, settings))


class SyncEngine(_Waiting):
    """``InferenceEngine`` without ``await``; arguments as ``InferenceEngine.create``. Use it as a context manager.

    Any number of threads may use it at once. One that is dropped without ``shutdown``, as notebooks do, stops by
    itself.
    """

    def __init__(
        self,
        config: RuntimeConfig | str | None = None,
        models: Sequence[RuntimeConfig | str] = (),
        adapter_provider: object | None = None,
        api_key: str | None = None,
        progress: ProgressReport | None = None,
        plugins: PluginHost | None = None,
    ) -> None:
        loop = LoopThread()
        try:
            self._engine = loop.run(
                InferenceEngine.create(config, models, adapter_provider, api_key, progress, plugins)
            )
        except BaseException:
            loop.stop()
            raise
        super().__init__(self._engine, loop)
        self._dropped = weakref.finalize(self, loop.abandon, self._engine.shutdown)
        self._dropped.atexit = False  # at exit its threads end with the interpreter

    def __enter__(self) -> SyncEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(drain=kind is None)

    @property
    def models(self) -> tuple[str, ...]:
        """Ids of the engine's models, the default one first."""
        return self._engine.models

    def model(self, model_id: str | None = None) -> SyncModel:
        """The handle of a model (None: the default)."""
        return SyncModel(self._engine.model(model_id), self._loop, self)

    def prepare(self, image: Any, settings: GivenSettings = None) -> PreparedMedia:
        """``image`` decoded and prepared once by the default model."""
        return self._loop.run(self._engine.prepare(image, settings))

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters of each loaded model's lane."""
        return self._engine.stats()

    def pause(self) -> None:
        """Stop launching steps, keep every state."""
        self._loop.run(self._engine.pause())

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._loop.run(self._engine.resume())

    def shutdown(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Stop the engine; see ``InferenceEngine.shutdown``. Idempotent."""
        timeout_s = checks.number("timeout_s", timeout_s, 0.0)
        self._dropped.detach()
        with contextlib.suppress(EngineStoppedError):  # another thread's shutdown got there first
            self._loop.run(self._engine.shutdown(drain, timeout_s))
        self._loop.stop()
