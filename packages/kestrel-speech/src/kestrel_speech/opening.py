"""What callers give as audio, opened as a ``Source``."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

from kestrel.media import MediaLimits
from kestrel.media.audio import open_audio
from kestrel.media.live import LiveAudio
from kestrel.spi import Infer
from kestrel_speech.recording import FileBlocks, LiveBlocks, Source

__all__ = ["open_source"]


async def open_source(
    audio: Any, sample_rate: int | None, limits: MediaLimits, infer: Infer, *, ahead: int = 0
) -> Source:
    """``audio`` ready to be read, its first ``ahead`` samples decoded already: what needs no more waits for a pool
    thread once. Raises InvalidMediaError and InvalidRequestError as ``kestrel.media`` does."""
    if isinstance(audio, AsyncIterable):
        return Source(LiveBlocks(LiveAudio(audio, sample_rate=sample_rate)))

    def opened() -> FileBlocks:
        stream = open_audio(audio, sample_rate=sample_rate, limits=limits)
        try:
            return FileBlocks(stream, infer, ahead=ahead)
        except BaseException:
            stream.close()
            raise

    return Source(await infer.cpu(opened))
