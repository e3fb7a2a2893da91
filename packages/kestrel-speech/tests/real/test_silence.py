"""Where nobody speaks nothing is written down, and odd recordings are heard or refused clearly."""

import io
import wave

import numpy as np
import pytest
import realweights
from realweights.oracles import error_rate, normalise

from kestrel.errors import InvalidMediaError, InvalidRequestError

RATE = 16000


def noise(seconds, level):
    return (
        (np.random.default_rng(0).standard_normal(round(seconds * RATE)) * level)
        .clip(-1, 1)
        .astype(np.float32)
    )


def chords(seconds):
    """A melody of three-note chords with decaying strokes: music without words."""
    time = np.arange(round(seconds * RATE)) / RATE
    roots = np.array([261.6, 349.2, 392.0, 220.0])[(time // 0.5).astype(int) % 4]
    voices = sum(np.sin(2 * np.pi * roots * ratio * time) for ratio in (1.0, 1.25, 1.5))
    return (0.2 * voices * np.exp(-3 * (time % 0.5))).astype(np.float32)


def tone(seconds, hertz, level):
    time = np.arange(round(seconds * RATE)) / RATE
    return (level * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@pytest.mark.parametrize("seconds", [0.05, 1.0, 12.0, 45.0])
def test_silence_has_no_text(model, hear, seconds):
    output = hear(model, np.zeros(round(seconds * RATE), np.float32), settings={})
    assert (output["text"], output["segments"]) == ("", [])


@pytest.mark.parametrize("seconds", [3.0, 40.0])
def test_silence_has_no_text_behind_a_vad(model, hear, seconds):
    output = hear(model, np.zeros(round(seconds * RATE), np.float32), vad_filter=True)
    assert (output["text"], output["segments"]) == ("", [])


SOUNDS = {
    "quiet noise": lambda: noise(10, 0.003),
    "noise": lambda: noise(10, 0.1),
    "long noise": lambda: noise(70, 0.02),
    "music": lambda: chords(10),
    "a tone": lambda: tone(10, 440, 0.3),
    "a hum": lambda: tone(10, 50, 0.01),
    "a click": lambda: np.eye(1, 10 * RATE, 5 * RATE, dtype=np.float32)[0],
    "50 ms of noise": lambda: noise(0.05, 0.1),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"seed": 1}], ids=["greedy", "ladder"])
@pytest.mark.parametrize("sound", SOUNDS)
def test_sound_without_words_is_empty_or_flagged(model, hear, sound, settings):
    output = hear(model, SOUNDS[sound](), settings=settings)
    flagged = all(s["no_speech_prob"] > 0.6 or s["avg_logprob"] < -0.7 for s in output["segments"])
    marked = set(output["text"].lower()) <= set("♪ .()[]") or "music" in output["text"].lower()
    assert not output["text"] or flagged or marked, output["text"]


def test_pause_between_sentences_gets_no_text(model, librivox, hear, pcm):
    first, second = pcm(librivox[1].path), pcm(librivox[4].path)
    pause = noise(20, 1e-4)
    output = hear(model, np.concatenate([first, pause, second]), timestamps="word", settings={})
    start, end = len(first) / RATE + 0.5, (len(first) + len(pause)) / RATE - 0.5
    inside = [
        word["word"]
        for segment in output["segments"]
        for word in segment["words"]
        if start < (word["start"] + word["end"]) / 2 < end
    ]
    assert inside == []


def wav(values, rate, width=2):
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1 if values.ndim == 1 else values.shape[1], width, rate, 0, "NONE", ""))
        output.writeframes(values.tobytes())
    return file.getvalue()


def coded(samples, rate, container, codec, *, repeats=1, pictures=0):
    """``samples``, each ``repeats`` times in a row, in a file at ``rate``; with ``pictures``, a film."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        film = output.add_stream("mpeg4", rate=5) if pictures else None
        if film is not None:
            film.width, film.height, film.pix_fmt = 64, 48, "yuv420p"
        fitted = av.AudioResampler(
            format=stream.format, layout="mono", rate=rate, frame_size=stream.frame_size or None
        )
        frame = av.AudioFrame.from_ndarray(
            np.repeat(samples, repeats).reshape(1, -1), format="flt", layout="mono"
        )
        frame.sample_rate = RATE * repeats if repeats > 1 else RATE
        for piece in (*fitted.resample(frame), *fitted.resample(None)):
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
        for _ in range(pictures):
            picture = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            output.mux(film.encode(picture))
        if film is not None:
            output.mux(film.encode(None))
    return file.getvalue()


ODD = {
    "8 kHz µ-law": lambda samples: coded(samples, 8000, "wav", "pcm_mulaw"),
    "192 kHz, 24 bit": lambda samples: coded(samples, 192_000, "wav", "pcm_s24le", repeats=12),
    "float64": lambda samples: coded(samples, RATE, "wav", "pcm_f64le"),
    "6 channels": lambda samples: wav(np.repeat((samples * 32767).astype("<i2")[:, None], 6, axis=1), RATE),
    "a film": lambda samples: coded(samples, 48_000, "mp4", "aac", pictures=20),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_recordings_are_heard(librivox, hear, pcm, kind):
    sample = librivox[1]
    expected = normalise(hear("base", sample.path)["text"])
    assert normalise(hear("base", ODD[kind](pcm(sample.path)))["text"]) == expected


def test_truncated_mp3_is_heard_up_to_there_with_a_warning(engine_of, librivox, pcm):
    sample = librivox[0]
    raw = coded(pcm(sample.path), 16_000, "mp3", "libmp3lame")
    result = engine_of("base").transcribe(raw[: len(raw) // 2], settings={"temperature": 0.0})
    words, said = normalise(result.output["text"]).split(), normalise(sample.text).split()
    assert 4 <= len(words) < len(said)
    assert words[2:-1] == said[2 : len(words) - 1], "it breaks off within a word, and begins with Mr."
    assert "truncated" in " ".join(result.warnings)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seconds", [1 / RATE, 0.05, 0.3])
def test_snippets_of_speech_are_no_error(model, librivox, hear, pcm, seconds):
    snippet = pcm(librivox[0].path)[RATE // 2 :][: round(seconds * RATE)]
    output = hear(model, snippet, settings={"seed": 1})
    assert output["duration_seconds"] == pytest.approx(seconds, abs=1e-3)
    assert len(output["text"].split()) <= 3


def test_no_samples_are_refused(hear):
    with pytest.raises(InvalidMediaError, match="no samples"):
        hear("tiny.en", wav(np.zeros(0, "<i2"), RATE))


def test_text_named_wav_is_refused(hear, tmp_path):
    file = tmp_path / "notes.wav"
    file.write_text("no sound here\n" * 50)
    with pytest.raises(InvalidMediaError, match="not audio: text"):
        hear("tiny.en", file)


def test_beam_search_is_refused(hear):
    with pytest.raises(InvalidRequestError, match="beam"):
        hear("tiny.en", np.zeros(RATE, np.float32), beam_size=5)


def test_silero_leaves_the_silences_out(model, had, librivox, hear, pcm):
    silence = noise(5, 1e-4)
    joined = np.concatenate([part for sample in librivox[:3] for part in (silence, pcm(sample.path))])
    given = {
        "vad_filter": True,
        "vad_parameters": {"model_path": str(had(realweights.silero) / "vad.safetensors")},
    }
    output = hear(model, joined, **given)
    said = [(sample.text, hear(model, sample.path)["text"]) for sample in librivox[:3]]
    assert error_rate([(" ".join(text for text, _ in said), output["text"])]) <= error_rate(said) + 0.05
    assert all(segment["end"] > 5 for segment in output["segments"]), "the first silence is 5 s long"


def test_hotwords_change_the_spelling(librivox, hear):
    assert "dashwood" in normalise(hear("base", librivox[0].path)["text"])
    told = hear("base", librivox[0].path, hotwords="Dashwoode")
    assert "dashwoode" in normalise(told["text"])


def test_guard_against_invented_text_keeps_what_is_said(model, librivox, hear, pcm):
    joined = np.concatenate([pcm(librivox[1].path), noise(12, 1e-3), pcm(librivox[4].path), noise(12, 1e-3)])
    output = hear(model, joined, hallucination_silence_threshold=2.0, timestamps="word", settings={})
    said = " ".join(librivox[at].text for at in (1, 4))
    assert error_rate([(said, output["text"])]) <= 0.13
