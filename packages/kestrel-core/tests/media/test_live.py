"""Live sound: chunks in, blocks at 16 kHz out, the source closed when nobody listens any more."""

import numpy as np
import pytest

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.media import LiveAudio, open_audio


class Microphone:
    """An async iterator of chunks that remembers whether it was closed."""

    def __init__(self, chunks):
        self._chunks = iter(chunks)
        self.is_closed = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            return next(self._chunks)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self):
        self.is_closed = True


async def heard(chunks, sample_rate=16000):
    live = LiveAudio(Microphone(chunks), sample_rate=sample_rate)
    return np.concatenate([block async for block in live.blocks()])


async def test_chunks_give_what_the_whole_array_gives(sine):
    values = sine(44100, 1.0)
    with open_audio(values, sample_rate=44100) as stream:
        whole = np.concatenate(list(stream.blocks()))
    np.testing.assert_array_equal(await heard(np.split(values, [1, 100, 20000]), 44100), whole)


async def test_integers_and_loud_floats_are_taken():
    blocks = await heard([np.array([16384], np.int16), np.array([2.5], np.float32)])
    np.testing.assert_array_equal(blocks, np.array([0.5, 2.5], np.float32))


async def test_async_generator_is_a_source(sine):
    async def generate():
        yield sine(16000, 0.5)

    live = LiveAudio(generate(), sample_rate=16000)
    assert sum([len(block) async for block in live.blocks()]) == 8000
    assert live.seconds == 0.5


async def test_source_is_closed_when_the_listener_leaves():
    source = Microphone([np.zeros(100, np.float32)] * 10)
    blocks = LiveAudio(source, sample_rate=16000).blocks()
    await anext(blocks)
    await blocks.aclose()
    assert source.is_closed


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (np.zeros(0, np.float32), "no samples"),
        (np.zeros(2**20 + 1, np.int8), "the most"),
        (np.zeros((2, 2), np.float32), "one-dimensional"),
        (np.array([np.nan], np.float32), "not finite"),
        (b"\0\0", "bytes"),
    ],
)
async def test_wrong_chunk_is_refused_and_the_source_closed(chunk, reason):
    source = Microphone([np.zeros(10, np.float32), chunk])
    with pytest.raises(InvalidMediaError, match=reason):
        async for _ in LiveAudio(source, sample_rate=16000).blocks():
            pass
    assert source.is_closed


async def test_source_without_chunks_is_refused():
    with pytest.raises(InvalidMediaError, match="without a sample"):
        await heard([])


def test_live_sound_needs_a_sample_rate():
    with pytest.raises(InvalidRequestError, match="sample_rate"):
        LiveAudio(Microphone([]), sample_rate=None)
