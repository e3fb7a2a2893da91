"""transcribe through the engine: options, results, streams, silence, and what is refused."""

import asyncio
import wave

import numpy as np
import pytest
from speech_engine import PLAIN, create
from whisper_oracle import noise

from kestrel.config import RuntimeConfig
from kestrel.engine import SyncEngine
from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.media.audio import AudioStream
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel_speech import plugin

SHORT, LONG = noise(1, 1.7), noise(2, 8.2)
KEYS = {
    "text", "language", "task", "duration_seconds", "source_duration_seconds", "clip_start_seconds",
    "clip_end_seconds", "segments", "language_probability", "temperature", "avg_logprob", "compression_ratio",
    "no_speech_prob",
}  # fmt: skip


def streamed(directory, samples, settings=None, **options):
    async def main():
        async with await create(directory) as engine:
            stream = await engine.transcribe(
                audio=samples,
                sample_rate=16_000,
                stream=True,
                settings={**PLAIN, **(settings or {})},
                **options,
            )
            shown = [chunk async for chunk in stream]
            return [chunk.value for chunk in shown], await stream.result()

    return asyncio.run(main())


def test_the_result_has_the_shape_of_the_skill(transcribe):
    output = transcribe(LONG).output
    assert output.keys() == KEYS
    assert output["text"] == "".join(s["text"] for s in output["segments"]).strip()
    assert output["duration_seconds"] == output["source_duration_seconds"] == 8.2
    for segment in output["segments"]:
        assert 0 <= segment["start"] <= segment["end"] <= 8.2
        assert segment.keys() >= {"text", "start", "end", "temperature", "avg_logprob", "no_speech_prob"}


def test_without_times_there_are_no_segments(transcribe):
    output = transcribe(LONG, timestamps="none").output
    assert output["segments"] == []
    assert output["text"]


def test_silence_is_empty_text_in_no_language(transcribe):
    thresholds = {"no_speech_threshold": 0.0, "logprob_threshold": 0.0}  # random weights know no silence
    for samples in (np.zeros(16_000, dtype=np.float32), np.zeros(160_000, dtype=np.float32)):
        output = transcribe(samples, settings=thresholds).output
        assert (output["text"], output["segments"], output["language"]) == ("", [], None)
    assert transcribe(np.zeros(64_000, dtype=np.float32), vad_filter=True).output["text"] == ""
    assert transcribe(np.zeros(64_000, dtype=np.float32), batch_size=4).output["text"] == ""


def test_windows_without_any_sound_are_not_decoded(transcribe):
    silence = np.zeros(10 * 16_000, dtype=np.float32)
    silence[::7] = 1e-5
    for options in ({}, {"timestamps": "word"}, {"batch_size": 4, "vad_filter": False}):
        result = transcribe(silence, **options)
        assert (result.output["text"], result.output["segments"], result.output["language"]) == ("", [], None)
        assert result.metrics.output_tokens == 0
    late = transcribe(np.concatenate([silence, noise(1, 2.0)]), language="de").output
    assert late["segments"][0]["start"] >= 9.0


@pytest.mark.parametrize("count", [1, 100, 800])
def test_the_shortest_sounds_are_no_error(transcribe, count):
    output = transcribe(noise(0, 0.1)[:count], language="en").output
    assert output["duration_seconds"] == round(count / 16_000, 3)
    assert all(s["end"] <= 0.051 for s in output["segments"])


def test_a_path_is_the_same_as_its_samples(transcribe, tiny_dir, tmp_path):
    values = (SHORT * 32767).astype(np.int16)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(values.tobytes())

    async def main():
        async with await create(tiny_dir) as engine:
            return [
                (await engine.transcribe(audio=audio, settings=PLAIN, language="en")).output
                for audio in (tmp_path / "a.wav", (tmp_path / "a.wav").read_bytes())
            ]

    from_path, from_bytes = asyncio.run(main())
    samples = (values / np.float32(32768)).astype(np.float32)
    assert from_path == from_bytes == transcribe(samples, language="en").output


def test_what_the_decoder_warns_of_reaches_the_caller(transcribe, monkeypatch):
    monkeypatch.setattr(AudioStream, "warnings", property(lambda self: ("it ends early",)))
    assert transcribe(SHORT, language="en").warnings == ("it ends early",)


def test_a_prompt_changes_the_text_of_the_first_window_alone(transcribe):
    plain = transcribe(LONG, language="en", condition_on_previous_text=False).output["segments"]
    prompted = transcribe(
        LONG, language="en", condition_on_previous_text=False, initial_prompt="x y z"
    ).output
    assert prompted["segments"][0] != plain[0]
    carried = transcribe(
        LONG,
        language="en",
        condition_on_previous_text=False,
        initial_prompt="x y z",
        carry_initial_prompt=True,
    ).output["segments"]
    assert carried != prompted["segments"]
    hot = transcribe(LONG, language="en", condition_on_previous_text=False, hotwords="x y z").output[
        "segments"
    ]
    assert hot == carried, "hotwords are context of every window"


def test_a_prefix_is_what_the_first_window_begins_with(transcribe):
    plain = transcribe(SHORT, language="en").output
    output = transcribe(SHORT, language="en", prefix="hello there").output
    assert output["text"] != plain["text"]
    assert output["segments"][0]["start"] == 0.0


def test_a_long_prompt_is_cut_to_what_the_context_allows(transcribe, oracle):
    result = transcribe(SHORT, language="en", initial_prompt="a" * 1000, settings={"max_tokens": 20})
    assert result.metrics.input_tokens == 1 + 223 + 3


def test_short_input_is_shown_as_it_comes(tiny_dir):
    shown, result = streamed(tiny_dir, SHORT, language="en")
    assert shown[-1] == {**result.output, "provisional": False}
    for value in shown[:-1]:
        assert value["provisional"] is True
        assert (value["attempt"], value["retrying"]) == (1, False)


def test_long_input_says_how_far_it_is(tiny_dir):
    shown, result = streamed(tiny_dir, LONG, language="en")
    done = [value["completed_seconds"] for value in shown[:-1]]
    assert done == sorted(done)
    assert {value["total_seconds"] for value in shown[:-1]} == {8.2}
    texts = [value["segments"] for value in shown]
    assert all(texts[-1][: len(t)] == t for t in texts), "what was shown as a segment stays"
    assert shown[-1]["text"] == result.output["text"]


def test_leaving_the_stream_early_keeps_what_was_said(tiny_dir):
    async def main():
        async with await create(tiny_dir) as engine:
            stream = await engine.transcribe(
                audio=np.concatenate([LONG] * 4),
                sample_rate=16_000,
                stream=True,
                language="en",
                settings=PLAIN,
            )
            async for chunk in stream:
                if chunk.value["segments"]:
                    break
            await stream.aclose()
            return engine.stats(), stream

    stats, stream = asyncio.run(main())
    assert next(iter(stats.values()))["running"] == 0
    assert stream.is_done


def test_a_fixed_seed_repeats_the_samples(transcribe):
    settings = {"temperature": 0.8, "best_of": 2, "seed": 11, "max_tokens": 20}
    first, second = (transcribe(SHORT, language="en", settings=settings) for _ in "ab")
    assert first.output == second.output
    assert first.output["temperature"] == 0.8
    assert first.seed == 11
    other = transcribe(SHORT, language="en", settings={**settings, "seed": 12}).output
    assert other["text"] != first.output["text"]


def test_the_sync_engine_transcribes_too(tiny_dir, transcribe):
    host = PluginHost.from_modules({"speech": plugin}, skills=builtin_skills())
    config = RuntimeConfig(model_path=tiny_dir, device="cpu", kv_cache_bytes=2**24)
    with SyncEngine(config, plugins=host) as engine:
        result = engine.transcribe(audio=SHORT, sample_rate=16_000, language="en", settings=PLAIN)
    assert result.output == transcribe(SHORT, language="en").output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timestamps": "character"}, "no times of characters"),
        ({"language": "Klingon"}, "does not know"),
        ({"language": "uk"}, "does not know the language 'uk'"),
        ({"beam_size": 5}, "not supported yet"),
        ({"suppress_tokens": [100_000]}, "ids go from 0"),
        ({"vad_filter": True, "vad_parameters": {"treshold": 0.3}}, "threshold"),
        ({"clip_start_seconds": 30}, "ends at 1.7 s"),
        ({"sample_rate": None}, "without sample_rate"),
    ],
)
def test_what_cannot_be_done_is_refused(transcribe, options, says):
    with pytest.raises(InvalidRequestError, match=says):
        transcribe((SHORT, options))


@pytest.mark.parametrize("audio", [b"this is no sound at all", np.zeros(0, dtype=np.float32)])
def test_what_is_no_recording_is_refused(transcribe, audio):
    with pytest.raises(InvalidMediaError):
        transcribe((audio, {"sample_rate": None if isinstance(audio, bytes) else 16_000}))


def test_an_english_model_knows_no_other_language(tiny_dir, tmp_path, transcribe):
    import json
    import shutil

    directory = tmp_path / "english"
    shutil.copytree(tiny_dir, directory)
    given = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps({**given, "is_multilingual": False}))
    result = transcribe(SHORT, directory=directory)
    assert result.output["language"] == "en"
    assert result.metrics.input_tokens == 1, "the start of the transcript alone"
    assert transcribe(SHORT, directory=directory, language="English").output == result.output
    for options, says in (
        ({"language": "de"}, "English-only"),
        ({"task": "translate"}, "translates nothing"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            transcribe(SHORT, directory=directory, **options)
