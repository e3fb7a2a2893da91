"""Streams: chunks as they come, the result at the end, cancellation by closing or by leaving the loop early."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from kestrel.errors import RequestCancelledError
from kestrel.types import ChunkKind, EngineResult, StreamChunk

__all__ = ["ChunkQueue", "EngineStream"]


class ChunkQueue:
    """Chunks from a call to its stream; ``close`` ends the iteration. A snapshot replaces one that waits to be read."""

    def __init__(self) -> None:
        self._chunks: deque[StreamChunk] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, chunk: StreamChunk) -> None:
        """Add a chunk; nothing after ``close``."""
        if self._closed:
            return
        if chunk.kind is ChunkKind.SNAPSHOT and self._chunks and self._chunks[-1].kind is ChunkKind.SNAPSHOT:
            self._chunks.pop()
        self._chunks.append(chunk)
        self._changed.set()

    def close(self) -> None:
        """No more chunks."""
        self._closed = True
        self._changed.set()

    async def get(self) -> StreamChunk | None:
        """The next chunk, or None at the end (again and again)."""
        while not self._chunks:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()


class EngineStream:
    """An async iterator of ``StreamChunk``. Joined ``text`` of kind "text" is the answer exactly.

    ``await stream.result()`` waits for the ``EngineResult`` (with or without reading the chunks).
    ``await stream.aclose()``, leaving ``async for`` early, or dropping the stream cancels the request. Its result
    then has the finish reason "cancelled" and what was generated until then; before anything was under way, it is a
    RequestCancelledError.
    """

    def __init__(
        self,
        task: asyncio.Task[EngineResult],
        chunks: ChunkQueue,
        cancel: Callable[[], None],
        request_id: str,
    ) -> None:
        self._task = task
        self._chunks = chunks
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._was_closed = False
        self.request_id = request_id

    @property
    def is_done(self) -> bool:
        """The request has ended."""
        return self._task.done()

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        return self._iterate()

    async def __anext__(self) -> StreamChunk:
        chunk = await self._chunks.get()
        if chunk is not None:
            return chunk
        await self._raise_failure()
        raise StopAsyncIteration

    async def _iterate(self) -> AsyncIterator[StreamChunk]:
        ended = False
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
            ended = True
            await self._raise_failure()
        finally:
            if not ended:
                self._close()

    async def _raise_failure(self) -> None:
        """An iteration ends with the error of its request, unless the reader closed the stream itself."""
        await asyncio.wait([self._task])
        if self._was_closed:
            return
        if self._task.cancelled():
            raise RequestCancelledError(f"request {self.request_id} was cancelled")
        if (error := self._task.exception()) is not None:
            raise error

    def _close(self) -> None:
        if not self._task.done():
            self._was_closed = True
            self._cancel()

    async def result(self) -> EngineResult:
        """The result, once the request has ended. Raises what the request failed with."""
        return await asyncio.shield(self._task)

    def ended_result(self) -> EngineResult:
        """The result of a request that has ended (``is_done``), without waiting; on any thread."""
        return self._task.result()

    async def aclose(self) -> None:
        """Cancel the request if it still runs, and wait until it has ended and gave everything back."""
        self._close()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> EngineStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._task.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs on it any more
                self._loop.call_soon_threadsafe(self._cancel)
