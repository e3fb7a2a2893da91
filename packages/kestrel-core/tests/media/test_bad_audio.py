"""Recordings that are no recordings, or broken ones: a clear error, or what can be heard with a warning."""

import builtins
import io
import wave

import numpy as np
import pytest
import torch

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.media import MediaLimits, open_audio
from kestrel.media import source as source_module


def heard(source, **given):
    """Samples and warnings of the whole recording."""
    with open_audio(source, **given) as stream:
        return np.concatenate(list(stream.blocks())), stream.warnings


def refusal(source, **given) -> str:
    with pytest.raises(InvalidMediaError) as caught:
        heard(source, **given)
    return str(caught.value)


def test_text_named_wav_is_called_text(tmp_path):
    file = tmp_path / "notes.wav"
    file.write_text("Once there was no sound at all.\n" * 20)
    message = refusal(file)
    assert "notes.wav is not audio: text" in message
    assert "Supported: WAV" in message


@pytest.mark.parametrize("start", [b"\x89PNG\r\n\x1a\n", b"%PDF-1.7", b"PK\x03\x04", bytes(range(64))])
def test_other_files_are_named(start):
    assert "not audio" in refusal(start + bytes(200))


def test_playlist_is_never_followed():
    assert "not audio: text" in refusal(b"#EXTM3U\n#EXTINF:10,\nhttp://host.invalid/a.wav\n")


def test_film_without_sound_says_what_it_has(encoded):
    assert "no audio track: it has video" in refusal(encoded("mp4", "", pictures=10))


def test_film_with_sound_is_heard(encoded):
    samples, warnings = heard(encoded("mp4", "aac", pictures=25))
    assert len(samples) >= 16000
    assert warnings == ()


@pytest.mark.parametrize(
    ("container", "codec"), [("mp3", "libmp3lame"), ("flac", "flac"), ("webm", "libopus")]
)
def test_truncated_recording_is_heard_up_to_there_with_a_warning(encoded, container, codec):
    raw = encoded(container, codec, rate=48000, seconds=5)
    samples, warnings = heard(raw[: len(raw) // 2])
    assert 1.5 * 16000 < len(samples) < 3.5 * 16000
    assert "truncated" in warnings[-1]


def test_damaged_middle_does_not_lose_the_rest(encoded):
    raw = bytearray(encoded("flac", "flac", seconds=4))
    middle = len(raw) // 2
    raw[middle : middle + 3000] = bytes(3000)
    samples, warnings = heard(bytes(raw))
    assert len(samples) > 3 * 16000
    assert warnings


def test_truncated_mp4_without_its_index_is_refused(encoded):
    raw = encoded("mp4", "aac", seconds=2)
    assert "cannot be decoded (MP4)" in refusal(raw[: len(raw) // 2])


@pytest.mark.parametrize("container", ["wav", "flac", "ogg", "matroska"])
def test_noise_behind_a_signature_is_refused(container):
    start = {
        "wav": b"RIFF\xff\xff\xff\x7fWAVE",
        "flac": b"fLaC",
        "ogg": b"OggS",
        "matroska": b"\x1aE\xdf\xa3",
    }
    noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    assert "cannot be decoded" in refusal(start[container] + noise)


def test_every_cut_of_a_recording_is_heard_or_refused(encoded):
    for container, codec in (("wav", "pcm_s16le"), ("mp3", "libmp3lame"), ("mp4", "aac")):
        raw = encoded(container, codec, seconds=0.2)
        for size in range(1, len(raw), len(raw) // 25):
            try:
                samples, _ = heard(raw[:size])
            except InvalidMediaError:
                continue
            assert np.isfinite(samples).all()


def test_recording_without_samples_is_refused():
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1, 2, 16000, 0, "NONE", ""))
    assert "no samples" in refusal(file.getvalue())
    assert "no samples" in refusal(np.zeros(0, np.float32), sample_rate=16000)


def test_float_recording_with_nan_is_refused(encoded):
    values = np.zeros(16000, np.float32)
    values[12000] = np.nan
    assert "not finite" in refusal(encoded("wav", "pcm_f32le", rate=16000, channels=1, samples=values))


@pytest.mark.parametrize("value", [1.5, -1.001, np.nan, np.inf])
def test_array_beyond_one_is_refused(value):
    values = np.zeros(100_000, np.float32)
    values[99_000] = value
    assert "sample 99000" in refusal(values, sample_rate=16000)


def test_array_slightly_beyond_one_is_rounding():
    samples, _ = heard(np.array([1.0000005, -1.0000005], np.float64), sample_rate=16000)
    assert len(samples) == 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros((2, 100), np.float32), "average the channels"),
        (np.zeros(10, bool), "bool"),
        (np.zeros(10, complex), "complex128"),
        (np.array(["a"]), "floats within"),
        (torch.zeros(3, device="meta"), "meta"),
    ],
)
def test_array_of_another_kind_is_refused(values, reason):
    assert reason in refusal(values, sample_rate=16000)


@pytest.mark.parametrize("rate", [None, 0, -8000, 999, 10**6, 16000.0, "16000", True])
def test_array_needs_a_sample_rate(rate):
    with pytest.raises(InvalidRequestError, match="sample_rate"):
        open_audio(np.zeros(10, np.float32), sample_rate=rate)


def test_encoded_recording_takes_no_sample_rate(encoded):
    with pytest.raises(InvalidRequestError, match="Leave it out"):
        open_audio(encoded("wav", "pcm_s16le"), sample_rate=16000)


@pytest.mark.parametrize("source", [None, 7, object(), ["a.wav"], 0.5])
def test_other_objects_are_refused(source):
    assert "is no recording" in refusal(source)


def test_paths_that_hold_nothing_are_refused(tmp_path):
    (tmp_path / "empty.wav").touch()
    assert "does not exist" in refusal(tmp_path / "absent.wav")
    assert "is not a file" in refusal(tmp_path)
    assert "0 bytes" in refusal(tmp_path / "empty.wav")
    assert "NUL" in refusal("a\0b")
    assert "0 bytes" in refusal(b"")


@pytest.mark.parametrize("address", ["http://host.invalid/a.wav", "concat://a|b", "file:///a.wav"])
def test_addresses_are_not_fetched(address):
    assert "address" in refusal(address)


def test_file_object_is_read_up_to_its_limit_in_steps():
    sizes = []

    class Endless:
        def read(self, size, /):
            sizes.append(size)
            return bytes(size)

    assert "more than" in refusal(Endless())
    assert max(sizes) == 2**20
    assert sum(sizes) == source_module.MAX_STREAM_BYTES + 1


def test_text_file_object_is_refused():
    assert "binary mode" in refusal(io.StringIO("RIFF"))


def test_bytes_beyond_the_limit_are_refused(encoded):
    assert "max_media_bytes" in refusal(encoded("wav", "pcm_s16le"), limits=MediaLimits(max_media_bytes=1000))


def test_more_than_a_day_is_refused():
    day = np.lib.stride_tricks.as_strided(np.zeros(1, np.int16), (24 * 3600 * 1000 + 1000,), (0,))
    assert "24 h are the most" in refusal(day, sample_rate=1000)


def test_absent_pyav_says_what_to_install(encoded, monkeypatch):
    raw = encoded("wav", "pcm_s16le")
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "av":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install" in refusal(raw)


def test_file_is_closed_whatever_happens(encoded, tmp_path):
    opened = []
    original = io.open

    def remember(*args, **kwargs):
        opened.append(original(*args, **kwargs))
        return opened[-1]

    good, bad = tmp_path / "good.wav", tmp_path / "bad.wav"
    good.write_bytes(encoded("wav", "pcm_s16le"))
    bad.write_bytes(b"RIFF\x00\x00\x00\x00WAVE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", remember)
        with open_audio(good) as stream:
            next(iter(stream.blocks()))
        refusal(bad)
    assert len(opened) == 2
    assert all(file.closed for file in opened)
