"""Every way to give a recording ends as the same mono float32 at 16 kHz."""

import io
import tracemalloc

import numpy as np
import pytest
import torch

from kestrel.errors import InvalidRequestError
from kestrel.media import SAMPLE_RATE, open_audio

CONTAINERS = {  # how far the codec may be from the tone; LAME, for one, scales by 0.95
    "WAV 16 bit": ("wav", "pcm_s16le", {}, 5e-5),
    "WAV 8 bit": ("wav", "pcm_u8", {}, 1e-2),
    "WAV 24 bit at 192 kHz": ("wav", "pcm_s24le", {"rate": 192000}, 1e-5),
    "WAV 32 bit": ("wav", "pcm_s32le", {"rate": 48000}, 1e-5),
    "WAV float64": ("wav", "pcm_f64le", {"rate": 22050}, 1e-5),
    "WAV float32": ("wav", "pcm_f32le", {"rate": 11025}, 1e-5),
    "WAV µ-law at 8 kHz": ("wav", "pcm_mulaw", {"rate": 8000, "channels": 1}, 2e-2),
    "WAV A-law at 8 kHz": ("wav", "pcm_alaw", {"rate": 8000, "channels": 1}, 2e-2),
    "WAV with 6 channels": ("wav", "pcm_s16le", {"channels": 6}, 5e-5),
    "FLAC": ("flac", "flac", {}, 5e-5),
    "MP3": ("mp3", "libmp3lame", {}, 5e-2),
    "Opus in Ogg": ("ogg", "libopus", {"rate": 48000}, 2e-2),
    "Opus in WebM": ("webm", "libopus", {"rate": 48000}, 2e-2),
    "AAC in MP4": ("mp4", "aac", {}, 2e-2),
    "PCM in MOV": ("mov", "pcm_s16le", {}, 5e-5),
    "AIFF": ("aiff", "pcm_s16be", {}, 5e-5),
}


def samples(source, **given) -> np.ndarray:
    with open_audio(source, **given) as stream:
        return np.concatenate(list(stream.blocks()))


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_tone_at_16_khz(encoded, sine, name):
    container, codec, made, tolerance = CONTAINERS[name]
    heard = samples(encoded(container, codec, **made))
    expected = sine(SAMPLE_RATE, 1.0)
    assert heard.dtype == np.float32
    assert len(expected) <= len(heard) <= len(expected) + 500  # codecs pad the last frame
    np.testing.assert_allclose(heard[2000:14000], expected[2000:14000], atol=tolerance)


def test_all_entry_paths_give_the_same_samples(encoded, tmp_path):
    raw = encoded("flac", "flac")
    file = tmp_path / "speech.wav"  # the label lies; the content counts
    file.write_bytes(raw)
    with file.open("rb") as opened:
        sources = [str(file), file, raw, bytearray(raw), memoryview(raw), io.BytesIO(raw), opened]
        heard = [samples(source) for source in sources]
    for one in heard[1:]:
        np.testing.assert_array_equal(one, heard[0])


def test_file_object_is_read_from_where_it_stands(encoded):
    raw = encoded("wav", "pcm_s16le")
    file = io.BytesIO(b"something before" + raw)
    file.seek(len(b"something before"))
    np.testing.assert_array_equal(samples(file), samples(raw))


def test_channels_are_averaged(encoded):
    both = np.stack([np.full(8000, 0.75), np.full(8000, -0.25)], axis=1).astype(np.float32)
    heard = samples(encoded("wav", "pcm_f32le", rate=16000, samples=both))
    np.testing.assert_array_equal(heard, np.full(8000, 0.25, np.float32))


def test_arrays_of_every_type_give_what_the_floats_give(sine):
    floats = sine(SAMPLE_RATE, 0.1)
    values = {
        "float64": (floats.astype(np.float64), 0.0),
        "float16": (floats.astype(np.float16), 3e-4),
        "int8": ((floats * 127).astype(np.int8), 2e-2),
        "int16": (np.round(floats * 32768).astype(np.int16), 2e-5),
        "int32": (np.round(floats.astype(np.float64) * 2**31).astype(np.int32), 1e-7),
        "uint8": (np.round(floats * 128 + 128).astype(np.uint8), 5e-3),
        "uint16": (np.round(floats * 32768 + 32768).astype(np.uint16), 2e-5),
        "every second of twice as many": (np.repeat(floats, 2)[::2], 0.0),
        "tensor": (torch.from_numpy(floats).requires_grad_(), 0.0),
        "bfloat16 tensor": (torch.from_numpy(floats).bfloat16(), 3e-3),
    }
    for name, (given, tolerance) in values.items():
        heard = samples(given, sample_rate=SAMPLE_RATE)
        assert heard.dtype == np.float32
        np.testing.assert_allclose(heard, floats, atol=tolerance, rtol=0, err_msg=name)


def test_full_scale_integers_stay_within_one():
    heard = samples(np.array([-32768, 32767, 0], np.int16), sample_rate=SAMPLE_RATE)
    np.testing.assert_array_equal(heard, np.array([-1.0, 32767 / 32768, 0.0], np.float32))


def test_blocks_last_a_second_and_the_length_is_known_at_the_end(encoded):
    with open_audio(encoded("ogg", "libopus", rate=48000, seconds=2.5)) as stream:
        blocks = list(stream.blocks())
        assert [len(block) for block in blocks] == [16000, 16000, 8000]
        assert stream.duration_s == 2.5
        assert stream.warnings == ()


def test_pieces_are_the_blocks_as_they_come_out_of_the_decoder(encoded):
    raw = encoded("flac", "flac")
    with open_audio(raw) as stream:
        pieces = list(stream.pieces())
        assert stream.duration_s == pytest.approx(sum(map(len, pieces)) / SAMPLE_RATE)
    assert len(pieces) > 1
    assert np.array_equal(np.concatenate(pieces), samples(raw))


def test_pieces_of_floats_at_16_khz_are_the_callers_own_memory():
    given = np.linspace(-1, 1, 3 * SAMPLE_RATE, dtype=np.float32)
    with open_audio(given, sample_rate=SAMPLE_RATE) as stream:
        pieces = list(stream.pieces())
    assert np.array_equal(np.concatenate(pieces), given)
    assert all(np.shares_memory(piece, given) for piece in pieces)


def test_one_sample_is_enough():
    assert len(samples(np.zeros(1, np.float32), sample_rate=SAMPLE_RATE)) == 1


def test_fifty_milliseconds_are_enough(encoded):
    assert len(samples(encoded("wav", "pcm_s16le", rate=16000, channels=1, seconds=0.05))) == 800


def test_clip_is_a_part_of_the_whole(encoded):
    raw = encoded("wav", "pcm_s16le", rate=16000, seconds=3)
    whole = samples(raw)
    for start, end in ((0.0, 0.5), (0.25, 2.75), (1.0, 2.0), (2.9, None), (0.0, 99.0)):
        with open_audio(raw) as stream:
            part = np.concatenate(list(stream.blocks(start, end)))
        np.testing.assert_array_equal(
            part, whole[round(start * 16000) : None if end is None else round(end * 16000)]
        )


@pytest.mark.parametrize(
    ("start", "end"), [(1.0, 1.0), (2.0, 1.0), (-1.0, None), (0.0, float("nan")), (5.0, None), (1.0, None)]
)
def test_clip_without_length_is_refused(encoded, start, end):
    with (
        open_audio(encoded("wav", "pcm_s16le", seconds=1)) as stream,
        pytest.raises(InvalidRequestError, match="clip"),
    ):
        list(stream.blocks(start, end))


def test_sound_of_a_film_keeps_the_films_clock(encoded, sine):
    raw = encoded("matroska", "pcm_s16le", rate=16000, channels=1, pictures=50, starts_at=0.5)
    heard = samples(raw)
    np.testing.assert_array_equal(heard[:8000], np.zeros(8000, np.float32))
    np.testing.assert_allclose(heard[8000:24000], sine(16000, 1.0), atol=1e-4)


def test_memory_does_not_grow_with_the_length(tmp_path):
    import wave

    file = tmp_path / "long.wav"
    with wave.open(str(file), "wb") as output:
        output.setparams((1, 2, 16000, 0, "NONE", ""))
        for _ in range(120):
            output.writeframes(bytes(2 * 16000))
    pytest.importorskip("av")
    tracemalloc.start()
    try:
        with open_audio(file) as stream:
            count = sum(len(block) for block in stream.blocks())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 120 * SAMPLE_RATE
    assert peak < 2e6  # two minutes are 7.7 MB as float32


def test_long_array_is_converted_block_by_block():
    values = np.zeros(120 * 48000, np.int16)
    tracemalloc.start()
    try:
        with open_audio(values, sample_rate=48000) as stream:
            count = sum(len(block) for block in stream.blocks())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 120 * SAMPLE_RATE
    assert peak < 6e6  # 23 MB as float32
