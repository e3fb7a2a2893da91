"""The engine for scripts and notebooks: the same verbs without ``await``, also inside a running event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from kestrel.config import RuntimeConfig
from kestrel.engine.core import InferenceEngine, ModelHandle
from kestrel.engine.fleet import ProgressReport
from kestrel.engine.media import PreparedMedia
from kestrel.engine.models import GivenSettings, Objects, SpatialRefs, Verbs, given_inputs
from kestrel.engine.streams import EngineStream
from kestrel.errors import EngineStoppedError
from kestrel.plugins import PluginHost
from kestrel.spi import ModelInfo
from kestrel.types import EngineResult, StreamChunk

__all__ = ["SyncEngine", "SyncModel", "SyncStream"]

R = TypeVar("R")


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kestrel-sync", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """The coroutine's result. Ctrl-C here cancels it there."""
        if self._loop.is_closed():
            coroutine.close()
            raise EngineStoppedError("the engine is stopped; create a new one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop and close the loop."""
        if self._loop.is_closed():
            return
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncStream:
    """An iterator of ``StreamChunk``; ``result()`` waits for the end, ``close()`` (or leaving early) cancels."""

    def __init__(self, stream: EngineStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[StreamChunk]:
        ended = False
        try:
            yield from iter(self._next, None)
            ended = True
        finally:
            if not ended:
                self.close()

    def _next(self) -> StreamChunk | None:
        async def following() -> StreamChunk | None:
            return await anext(self._stream, None)

        return self._loop.run(following())

    def result(self) -> EngineResult:
        """The result, once the request has ended."""
        return self._loop.run(self._stream.result())

    def close(self) -> None:
        """Cancel the request if it still runs."""
        self._loop.run(self._stream.aclose())


class _SyncVerbs:
    """The verbs of ``Verbs``, waiting for each result."""

    _loop: _LoopThread
    _verbs: Verbs

    def run(self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None) -> EngineResult:
        """Run any skill by name."""
        return self._loop.run(self._verbs.run(skill, inputs, settings))

    def start_stream(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> SyncStream:
        """Stream any skill by name."""
        return SyncStream(self._loop.run(self._verbs.start_stream(skill, inputs, settings)), self._loop)

    def _do(
        self, skill: str, stream: bool, settings: GivenSettings, inputs: Mapping[str, Any]
    ) -> EngineResult | SyncStream:
        given = given_inputs(inputs)
        return self.start_stream(skill, given, settings) if stream else self.run(skill, given, settings)

    @overload
    def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
        *,
        video: Any = None,
    ) -> EngineResult: ...

    @overload
    def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
        video: Any = None,
    ) -> SyncStream: ...

    def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
        *,
        video: Any = None,
    ) -> EngineResult | SyncStream:
        """Answer ``question`` about ``image`` (one, a list, or none) or ``video``: output ``{"answer"}``.

        With ``reasoning`` on, ``"reasoning"`` holds its text and grounding.
        """
        return self._do(
            "query",
            stream,
            settings,
            {
                "image": image,
                "question": question,
                "spatial_refs": spatial_refs,
                "video": video,
                "reasoning": reasoning,
            },
        )

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EngineResult: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> SyncStream: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        stream: bool = False,
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EngineResult | SyncStream:
        """The next message of an OpenAI-style conversation: output ``{"message", "finish_reason"}``."""
        return self._do(
            "chat", stream, settings, {"messages": messages, "tools": tools, "reasoning": reasoning}
        )

    @overload
    def generate(
        self, prompt: Any, stream: Literal[False] = False, settings: GivenSettings = None
    ) -> EngineResult: ...

    @overload
    def generate(
        self, prompt: Any, *, stream: Literal[True], settings: GivenSettings = None
    ) -> SyncStream: ...

    def generate(
        self, prompt: Any, stream: bool = False, settings: GivenSettings = None
    ) -> EngineResult | SyncStream:
        """Continue ``prompt`` (a string, or parts) as it is, no template: output ``{"text", "token_ids"}``."""
        return self._do("generate", stream, settings, {"prompt": prompt})

    @overload
    def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> EngineResult: ...

    @overload
    def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> SyncStream: ...

    def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> EngineResult | SyncStream:
        """Describe ``image``: output ``{"caption"}``."""
        return self._do("caption", stream, settings, {"image": image, "length": length})

    @overload
    def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> EngineResult: ...

    @overload
    def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> SyncStream: ...

    def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> EngineResult | SyncStream:
        """Where each ``object`` is: output ``{"points": [{"x", "y"}]}``, 0–1 of the upright original."""
        return self._do(
            "point", stream, settings, {"image": image, "object": object, "spatial_refs": spatial_refs}
        )

    @overload
    def detect(
        self, image: Any, object: Objects, stream: Literal[False] = False, settings: GivenSettings = None
    ) -> EngineResult: ...

    @overload
    def detect(
        self, image: Any, object: Objects, *, stream: Literal[True], settings: GivenSettings = None
    ) -> SyncStream: ...

    def detect(
        self, image: Any, object: Objects, stream: bool = False, settings: GivenSettings = None
    ) -> EngineResult | SyncStream:
        """Boxes around each ``object``: output ``{"objects": [{"x_min", "y_min", "x_max", "y_max"}]}``."""
        return self._do("detect", stream, settings, {"image": image, "object": object})

    @overload
    def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> EngineResult: ...

    @overload
    def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> SyncStream: ...

    def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> EngineResult | SyncStream:
        """Outlines of each ``object``: output ``{"segments": [{"svg_path", "bbox", …}]}``."""
        return self._do(
            "segment", stream, settings, {"image": image, "object": object, "spatial_refs": spatial_refs}
        )


class SyncModel(_SyncVerbs):
    """One model of a ``SyncEngine``."""

    def __init__(self, handle: ModelHandle, loop: _LoopThread) -> None:
        self._handle = handle
        self._verbs = handle
        self._loop = loop
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


class SyncEngine(_SyncVerbs):
    """``InferenceEngine`` without ``await``; arguments as ``InferenceEngine.create``. Use it as a context manager."""

    def __init__(
        self,
        config: RuntimeConfig | str | None = None,
        models: Sequence[RuntimeConfig | str] = (),
        progress: ProgressReport | None = None,
        plugins: PluginHost | None = None,
    ) -> None:
        self._loop = _LoopThread()
        try:
            self._engine = self._loop.run(
                InferenceEngine.create(config, models, progress=progress, plugins=plugins)
            )
        except BaseException:
            self._loop.stop()
            raise
        self._verbs = self._engine

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
        return SyncModel(self._engine.model(model_id), self._loop)

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
        try:
            self._loop.run(self._engine.shutdown(drain, timeout_s))
        except EngineStoppedError:
            return
        self._loop.stop()
