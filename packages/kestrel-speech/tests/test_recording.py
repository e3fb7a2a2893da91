"""Recordings by position: nothing is decoded before it is asked for, nothing is held behind what is needed."""

import asyncio

import numpy as np
import pytest

from kestrel.media import MediaLimits
from kestrel.media.live import LiveAudio
from kestrel.spi import Infer
from kestrel_speech.opening import open_source
from kestrel_speech.recording import MOST_AT_ONCE, SAMPLE_RATE, Blocks, Clip, LiveBlocks, Source
from kestrel_speech.speech import Held, Joined, SpeechOnly
from kestrel_speech.vad import VadOptions

RAMP = np.arange(200_000, dtype=np.float32)


class Counted(Blocks):
    """One-second blocks of ``samples`` that notes how many were decoded."""

    def __init__(self, samples, duration_s=None):
        self.rest = [samples[i : i + SAMPLE_RATE] for i in range(0, len(samples), SAMPLE_RATE)]
        self.decoded = 0
        self.closed = 0
        self._duration_s = duration_s

    @property
    def duration_s(self):
        return self._duration_s

    async def more(self, count):
        found = []
        while self.rest and sum(map(len, found)) < count:
            found.append(self.rest.pop(0))
            self.decoded += 1
        return found

    async def close(self):
        self.closed += 1


class Now(Infer):
    """Runs CPU work at once."""

    async def __call__(self, request):
        raise NotImplementedError

    def stream(self, request):
        raise NotImplementedError

    async def prepare(self, item):
        raise NotImplementedError

    async def run_pass(self, name, inputs, media=()):
        raise NotImplementedError

    waits = 0

    async def cpu(self, fn):
        self.waits += 1
        return fn()

    def emit(self, chunk):
        pass


async def test_only_what_is_asked_for_is_decoded():
    blocks = Counted(RAMP)
    source = Source(blocks)
    assert (await source.read(10, 20)).tolist() == RAMP[10:30].tolist()
    assert blocks.decoded == 1
    assert await source.length_up_to(20_000) == 20_000
    assert blocks.decoded == 2
    assert source.known_length is None
    assert await source.length_up_to(10**9) == len(RAMP)
    assert source.known_length == len(RAMP)
    assert (await source.read(199_990, 100)).tolist() == RAMP[199_990:].tolist()
    assert len(await source.read(300_000, 5)) == 0
    await source.close()
    assert blocks.closed == 1


async def test_the_length_is_the_containers_until_the_end_is_read():
    source = Source(Counted(RAMP, duration_s=12.5))
    assert source.known_length == 200_000
    assert Clip(source, 16_000, None).known_length == 184_000
    assert Clip(source, 16_000, 48_000).known_length == 32_000
    assert Clip(source, 190_000, 300_000).known_length == 10_000


async def test_what_is_behind_is_forgotten():
    source = Source(Counted(np.zeros(100 * SAMPLE_RATE, dtype=np.float32)))
    for second in range(0, 100, 10):
        await source.read(second * SAMPLE_RATE, 10 * SAMPLE_RATE)
        source.forget((second + 10) * SAMPLE_RATE)
        assert sum(map(len, source._held)) <= 10 * SAMPLE_RATE
    with pytest.raises(AssertionError, match="are gone"):
        await source.read(0, 10)


async def test_what_a_clip_skips_is_never_held():
    class Watched(Counted):
        most = 0

        async def more(self, count):
            Watched.most = max(Watched.most, count)
            return await super().more(count)

    source = Source(Watched(np.zeros(400 * SAMPLE_RATE, dtype=np.float32)))
    source.forget(350 * SAMPLE_RATE)
    clip = Clip(source, 350 * SAMPLE_RATE, 360 * SAMPLE_RATE)
    assert len(await clip.read(0, 30 * SAMPLE_RATE)) == 10 * SAMPLE_RATE
    assert Watched.most == MOST_AT_ONCE
    assert sum(map(len, source._held)) <= 60 * SAMPLE_RATE


async def test_a_clip_counts_from_its_start_on_the_files_clock():
    clip = Clip(Source(Counted(RAMP)), 32_000, 64_000)
    assert (await clip.read(5, 3)).tolist() == [32_005, 32_006, 32_007]
    assert len(await clip.read(31_000, 5_000)) == 1_000
    assert await clip.length_up_to(10**6) == 32_000
    assert clip.seconds_at(16_000) == 3.0


async def test_joined_spans_read_as_one_and_map_back():
    joined = Joined(Source(Counted(RAMP)), [(1_000, 3_000), (10_000, 11_000)])
    assert await joined.length_up_to(10**6) == joined.known_length == 3_000
    assert (await joined.read(1_999, 3)).tolist() == [2_999, 10_000, 10_001]
    assert joined.seconds_at(2_000) * SAMPLE_RATE == 10_000, "the start of the second span"
    assert joined.seconds_at(2_000, is_end=True) * SAMPLE_RATE == 3_000, "the end of the first"
    assert joined.seconds_at(0) * SAMPLE_RATE == joined.seconds_at(0, is_end=True) * SAMPLE_RATE == 1_000
    assert joined.seconds_at(3_000, is_end=True) * SAMPLE_RATE == 11_000
    held = Held(await joined.read(0, 3_000), joined)
    assert (await held.read(2_500, 1_000)).tolist() == list(range(10_500, 11_000))
    assert held.seconds_at(2_500) == joined.seconds_at(2_500)
    assert (held.known_length, await held.length_up_to(99_999)) == (3_000, 3_000)


def bursts(count, seconds=3.0, pause=6.0):
    rng = np.random.default_rng(0)
    quiet = (0.0005 * rng.normal(size=round(pause * SAMPLE_RATE))).astype(np.float32)
    loud = (0.2 * rng.normal(size=round(seconds * SAMPLE_RATE))).clip(-1, 1).astype(np.float32)
    return np.concatenate([quiet, *[part for _ in range(count) for part in (loud, quiet)]])


async def test_speech_is_found_as_far_as_it_is_read_and_silence_is_not_held():
    samples = bursts(12)
    blocks = Counted(samples)
    source = Source(blocks)
    speech = SpeechOnly(source, VadOptions(), Now())
    at, most = 0, 0
    while len(part := await speech.read(at, 2 * SAMPLE_RATE)):
        at += len(part)
        speech.forget(at)
        most = max(most, sum(map(len, source._held)))
        if at <= 2 * SAMPLE_RATE:
            assert blocks.decoded < 30, "the rest is decoded later"
    assert at == speech.known_length
    assert 12 * 3.0 <= at / SAMPLE_RATE <= 12 * 4.0
    assert most <= 30 * SAMPLE_RATE, "less than the file's 114 s"


async def test_a_live_source_is_read_as_it_comes_and_closed_at_the_end():
    class Chunks:
        closed = 0

        def __init__(self):
            self.left = 5

        def __aiter__(self):
            return self

        async def __anext__(self):
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return np.full(1_000, 0.1, dtype=np.float32)

        async def aclose(self):
            Chunks.closed += 1

    chunks = Chunks()
    source = Source(LiveBlocks(LiveAudio(chunks, sample_rate=SAMPLE_RATE)))
    assert source.is_live
    assert len(await source.read(0, 500)) == 500
    assert chunks.left >= 3
    assert source.known_length is None
    await source.close()
    assert Chunks.closed >= 1
    unread = Source(LiveBlocks(LiveAudio(Chunks(), sample_rate=SAMPLE_RATE)))
    before = Chunks.closed
    await unread.close()
    assert Chunks.closed > before, "also when nothing was read"


def test_readers_of_one_source_do_not_mix_its_blocks():
    async def main():
        source = Source(Counted(RAMP))
        parts = await asyncio.gather(*(source.read(start, 1_000) for start in range(0, 100_000, 10_000)))
        return [part[0] for part in parts]

    assert asyncio.run(main()) == list(range(0, 100_000, 10_000))


@pytest.mark.parametrize("ahead", [0, 1, 48_000, 199_999, 200_000, 200_001, 300_000])
def test_what_is_read_ahead_is_read_once(ahead):
    async def scenario():
        source = await open_source(RAMP / 2**18, SAMPLE_RATE, MediaLimits(), Now(), ahead=ahead)
        found = [await source.read(0, 1000), await source.read(1000, 200_000)]
        assert await source.length_up_to(10**9) == len(RAMP)
        await source.close()
        return np.concatenate(found)

    np.testing.assert_array_equal(asyncio.run(scenario()), RAMP / 2**18)


def test_a_recording_that_fits_what_is_read_ahead_waits_for_a_pool_thread_once():
    async def scenario():
        infer = Now()
        source = await open_source(RAMP / 2**18, SAMPLE_RATE, MediaLimits(), infer, ahead=len(RAMP) + 1)
        assert await source.length_up_to(10**9) == len(RAMP)
        assert len(await source.read(0, len(RAMP))) == len(RAMP)
        await source.close()
        return infer.waits

    assert asyncio.run(scenario()) == 1
