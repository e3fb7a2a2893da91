"""What real weights understand of real speech, beside the implementations that everybody knows."""

import concurrent.futures
import io

import numpy as np
import pytest
from realweights.oracles import error_rate, normalise

MAX_WORD_ERRORS = {"tiny.en": 0.06, "base": 0.03}  # measured: 4 and 2 of 71 words


def test_short_recordings_are_heard_as_faster_whisper_hears_them(
    model, librivox, recordings, hear, pcm, faster_whisper
):
    for sample in (*librivox, recordings["beckett"]):
        samples = pcm(sample.path)
        expected = faster_whisper(model).transcribe(samples)
        assert normalise(hear(model, samples)["text"]) == normalise(expected.text), sample.name


def test_error_rate_is_no_worse_than_faster_whispers(model, librivox, hear, pcm, faster_whisper):
    ours = error_rate([(sample.text, hear(model, sample.path)["text"]) for sample in librivox])
    theirs = error_rate(
        [(sample.text, faster_whisper(model).transcribe(pcm(sample.path)).text) for sample in librivox]
    )
    assert ours <= theirs + 1e-9


def test_librivox_is_heard(model, librivox, hear):
    assert error_rate([(s.text, hear(model, s.path)["text"]) for s in librivox]) <= MAX_WORD_ERRORS[model]


def test_recording_of_more_than_a_window_is_heard(model, recordings, hear, pcm, faster_whisper):
    sample = recordings["two_cities"]
    ours = error_rate([(sample.text, hear(model, sample.path)["text"])])
    theirs = error_rate([(sample.text, faster_whisper(model).transcribe(pcm(sample.path)).text)])
    assert ours <= max(theirs, 0.02)


@pytest.mark.parametrize("vad_filter", [None, False], ids=["by speech", "by length"])
def test_pieces_side_by_side_are_heard_as_well_as_faster_whispers(
    model, librivox, recordings, hear, pcm, faster_whisper, vad_filter
):
    pause = np.zeros(16_000, np.float32)
    joined = np.concatenate([part for sample in librivox for part in (pcm(sample.path), pause)])
    said = [(joined, " ".join(sample.text for sample in librivox))]
    said += [(pcm(sample.path), sample.text) for sample in recordings.values()]
    ours = [(text, hear(model, sound, batch_size=8, vad_filter=vad_filter)["text"]) for sound, text in said]
    given = {"batch_size": 8, "without_timestamps": False}
    theirs = [(text, faster_whisper(model).batched(sound, **given).text) for sound, text in said]
    assert error_rate(ours) <= error_rate(theirs)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # openai-whisper leaves a file open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_words_have_the_times_of_openai_whisper(model, librivox, recordings, hear, pcm, openai_whisper):
    near, count = 0, 0
    for sample in (*librivox, *recordings.values()):
        expected = openai_whisper(model).transcribe(pcm(sample.path), word_timestamps=True).words
        output = hear(model, pcm(sample.path), timestamps="word")
        found = [word for segment in output["segments"] for word in segment["words"]]
        assert [word["word"] for word in found] == [word.word for word in expected], sample.name
        near += sum(
            abs(ours["start"] - theirs.start) <= 0.1 and abs(ours["end"] - theirs.end) <= 0.1
            for ours, theirs in zip(found, expected, strict=True)
        )
        count += len(found)
    assert near >= 0.95 * count


def test_many_recordings_at_once_are_heard_as_alone(model, librivox, hear):
    alone = [hear(model, sample.path) for sample in librivox]
    with concurrent.futures.ThreadPoolExecutor(len(librivox)) as pool:
        together = list(pool.map(lambda sample: hear(model, sample.path), librivox))
    assert [found["text"] for found in together] == [found["text"] for found in alone]
    times = [[(s["start"], s["end"]) for s in found["segments"]] for found in (*alone, *together)]
    assert times[: len(librivox)] == times[len(librivox) :]


@pytest.mark.parametrize("container", ["flac", "mp3", "ogg", "webm", "mp4"])
def test_container_does_not_change_what_is_heard(librivox, hear, pcm, container):
    sample = librivox[0]
    text = hear("base", encoded(pcm(sample.path), container))["text"]
    assert normalise(text) == normalise(hear("base", sample.path)["text"])


def encoded(samples: np.ndarray, container: str) -> bytes:
    """``samples`` (16 kHz) at 48 kHz in stereo."""
    av = pytest.importorskip("av")
    codec = {"flac": "flac", "mp3": "libmp3lame", "ogg": "libopus", "webm": "libopus", "mp4": "aac"}[
        container
    ]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=48000, layout="stereo")
        fitted = av.AudioResampler(
            format=stream.format, layout="stereo", rate=48000, frame_size=stream.frame_size or None
        )
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
        frame.sample_rate = 16000
        for piece in (*fitted.resample(frame), *fitted.resample(None)):
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return file.getvalue()


def test_language_is_detected(pangrams, hear):
    found = {sample.language: hear("base", sample.path)["language"] for sample in pangrams}
    wrong = {language: detected for language, detected in found.items() if language != detected}
    assert len(wrong) <= 1, wrong


def test_languages_are_those_that_faster_whisper_detects(pangrams, hear, pcm, faster_whisper):
    for sample in pangrams:
        expected = faster_whisper("base").transcribe(pcm(sample.path)).language
        assert hear("base", sample.path)["language"] == expected, sample.name


def test_translation_is_english(pangrams, hear):
    spanish = next(sample for sample in pangrams if sample.language == "es")
    text = hear("base", spanish.path, task="translate", language="es")["text"].lower()
    assert any(word in text.split() for word in ("the", "and", "a", "was", "with")), text


def test_prompt_changes_the_spelling(librivox, hear):
    sample = librivox[0]
    told = hear(
        "base", sample.path, initial_prompt="Mister John Dashwood, Mister Henry Dashwood, Mister Palmer."
    )
    assert "mister" in normalise(told["text"])
    assert "mister" not in normalise(hear("base", sample.path)["text"])
