"""Live sound: PCM chunks from an async iterator as mono float32 at 16 kHz, as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.media.audio import MAX_SECONDS, SAMPLE_RATE
from kestrel.media.pcm import Samples, as_float, check_rate, is_pcm, pcm_array
from kestrel.media.resample import Resampler

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_CHUNK", "LiveAudio", "LiveSource"]

LiveSource: TypeAlias = "AsyncIterable[NDArray[Any]] | AsyncIterable[torch.Tensor]"

MAX_CHUNK = 2**20  # samples


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


class LiveAudio:
    """Chunks of ``source`` (1 to 1,048,576 samples each, mono PCM at ``sample_rate``) as blocks at 16 kHz.

    Floats must be finite; their range is not checked. The iterator's ``aclose`` is called when reading stops early.
    """

    def __init__(self, source: LiveSource, *, sample_rate: int | None) -> None:
        if sample_rate is None:
            raise InvalidRequestError("live PCM was given without sample_rate. Give its rate in Hz")
        self._chunks: AsyncIterator[Any] = aiter(source)
        self._resampler = Resampler(check_rate(sample_rate), SAMPLE_RATE)
        self._num_samples = 0

    @property
    def seconds(self) -> float:
        """How much has been heard so far."""
        return self._num_samples / SAMPLE_RATE

    async def blocks(self) -> AsyncGenerator[Samples, None]:
        """Samples [n] float32 at 16 kHz, n > 0, as soon as they are there. Read once.

        Raises InvalidMediaError for a wrong chunk, when no sample came at all, and past 24 h.
        """
        try:
            async for chunk in self._chunks:
                block = self._resampler.push(_checked(chunk))
                if len(block):
                    yield self._counted(block)
            rest = self._resampler.flush()
            if len(rest):
                yield self._counted(rest)
        finally:
            await self.aclose()
        if not self._num_samples:
            raise InvalidMediaError("the live source ended without a sample. Give at least one chunk")

    async def aclose(self) -> None:
        """Close the source, if it can be closed; idempotent."""
        if isinstance(self._chunks, _Closable):
            await self._chunks.aclose()

    def _counted(self, block: Samples) -> Samples:
        self._num_samples += len(block)
        if self._num_samples > MAX_SECONDS * SAMPLE_RATE:
            raise InvalidMediaError(
                f"the live source has run for {MAX_SECONDS // 3600} h, which is the most. Start another"
            )
        return block


def _checked(chunk: object) -> Samples:
    if not is_pcm(chunk):
        raise InvalidMediaError(
            f"a live chunk is a {type(chunk).__name__}. Give arrays or CPU tensors of mono PCM"
        )
    values = pcm_array(chunk, what="a live chunk")
    if len(values) > MAX_CHUNK:
        raise InvalidMediaError(f"a live chunk has {len(values)} samples; {MAX_CHUNK} are the most. Split it")
    block = as_float(values)
    if not np.isfinite(block).all():
        raise InvalidMediaError("a live chunk holds samples that are not finite. Give finite floats")
    return block
