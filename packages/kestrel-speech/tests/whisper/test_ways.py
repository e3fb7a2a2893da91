"""Ways through a file: batched by speech, without its silences, live, in clips."""

import asyncio

import numpy as np
import pytest
from speech_engine import PLAIN, create
from whisper_oracle import noise

SILENCE = np.zeros(16_000 * 4, dtype=np.float32)
BURSTS = [noise(seed, 2.4) for seed in (4, 5, 6)]
SPEECH = np.concatenate([SILENCE, BURSTS[0], SILENCE, BURSTS[1], SILENCE, BURSTS[2], SILENCE])
SPOKEN = [(4.0, 6.4), (10.4, 12.8), (16.8, 19.2)]
PADDING = 0.45  # of the detector, and its frames


def lies_in_speech(start, end):
    return any(a - PADDING <= start <= end <= b + PADDING for a, b in SPOKEN)


@pytest.mark.parametrize("batch_size", [2, 8])
def test_pieces_side_by_side_say_what_they_say_alone(transcribe, batch_size):
    together = transcribe(SPEECH, language="de", batch_size=batch_size).output
    alone = [transcribe(SPEECH, language="de", batch_size=2, clip_start_seconds=a - 1, clip_end_seconds=b + 1)
             for a, b in SPOKEN]  # fmt: skip
    assert [s["text"] for s in together["segments"]] == [
        s["text"] for result in alone for s in result.output["segments"]
    ]
    assert all(lies_in_speech(s["start"], s["end"]) for s in together["segments"])
    starts = [s["start"] for s in together["segments"]]
    assert starts == sorted(starts)


def test_without_the_detector_pieces_are_cut_at_quiet_places(transcribe):
    output = transcribe(SPEECH, language="de", batch_size=4, vad_filter=False).output
    assert output["segments"][-1]["end"] > 16
    assert output["duration_seconds"] == pytest.approx(len(SPEECH) / 16_000)


def test_silences_are_left_out_and_times_stay_on_the_files_clock(transcribe):
    output = transcribe(SPEECH, language="de", vad_filter=True).output
    assert output["segments"]
    for segment in output["segments"]:
        assert 3.5 <= segment["start"] <= segment["end"] <= 19.7
    hum = SPEECH + np.float32(1e-3) * np.sin(np.arange(len(SPEECH)), dtype=np.float32)
    everything = transcribe(hum, language="de").output
    assert everything["segments"][0]["start"] < 3.5, "the model has words for a hum, when it is asked"


def test_only_the_clips_are_transcribed(transcribe):
    alone = {"language": "de", "condition_on_previous_text": False}
    output = transcribe(SPEECH, clip_timestamps=[4, 6.5, 16.8, 19], **alone).output
    assert {s["start"] < 7 for s in output["segments"]} == {True, False}
    assert all(
        4 <= s["start"] <= s["end"] <= 6.5 or 16.8 <= s["start"] <= s["end"] <= 19 for s in output["segments"]
    )
    assert (output["clip_start_seconds"], output["clip_end_seconds"]) == (4.0, 19.0)
    one = transcribe(SPEECH[4 * 16_000 : round(6.5 * 16_000)], **alone).output
    first = [s["text"] for s in output["segments"] if s["start"] < 7]
    assert [s["text"] for s in one["segments"]] == first


def test_many_files_at_once_give_what_each_gives_alone(transcribe):
    clips = [noise(seed, 2 + seed / 3) for seed in range(10, 16)]
    together = transcribe(*clips, at_once=True)
    alone = [transcribe(clip) for clip in clips]
    assert [r.output for r in together] == [r.output for r in alone]


class Microphone:
    """A live source that hands out ``samples`` in chunks and notes when it is closed."""

    def __init__(self, samples, chunk=8000):
        self.chunks = [samples[i : i + chunk] for i in range(0, len(samples), chunk)]
        self.is_closed = False
        self.heard = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if not self.chunks:
            raise StopAsyncIteration
        self.heard += 1
        return self.chunks.pop(0)

    async def aclose(self):
        self.is_closed = True


def live(directory, source, *, stop_after=None, **options):
    async def main():
        async with await create(directory) as engine:
            stream = await engine.transcribe(
                audio=source, sample_rate=16_000, stream=True, settings=PLAIN, **options
            )
            shown = []
            async for chunk in stream:
                shown.append(chunk.value)
                if stop_after is not None and len(shown) >= stop_after:
                    break
            await stream.aclose()
            return shown, None if stop_after else await stream.result()

    return asyncio.run(main())


def test_live_sound_is_shown_while_it_comes(tiny_dir):
    source = Microphone(np.concatenate([*BURSTS, *BURSTS]))
    shown, result = live(tiny_dir, source, language="de")
    assert source.is_closed
    assert shown[0]["provisional"] is True
    assert shown[0]["total_seconds"] is None
    done = [s["completed_seconds"] for s in shown[:-1]]
    assert done == sorted(done)
    assert shown[-1] == {**result.output, "provisional": False}
    assert result.output["source_duration_seconds"] == pytest.approx(14.4)
    assert result.output["segments"][-1]["end"] > 12


def test_a_live_source_is_closed_when_nobody_listens_any_more(tiny_dir):
    source = Microphone(np.concatenate([BURSTS[0]] * 20))
    live(tiny_dir, source, language="de", stop_after=2)
    assert source.is_closed
    assert source.chunks, "the rest was not asked for"
