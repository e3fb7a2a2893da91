"""Clips from lists of pictures and from files: which frames, at which times, and what is refused."""

import builtins
import io
import struct
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from kestrel.errors import CapacityError, InvalidMediaError
from kestrel.media import MediaBudget, MediaLimits, load_video
from kestrel.spi import FrameSampling

LIMITS = MediaLimits()
DENSE = FrameSampling(fps=1000.0, max_frames=1000)


def shade(index, size=(64, 48)):
    """A grey picture whose level tells its index; its upper left quarter is white."""
    width, height = size
    pixels = np.full((height, width, 3), 12 * index, np.uint8)
    pixels[: height // 2, : width // 2] = 255
    return pixels


def film(count=10, *, rate=10, container="mp4", codec="mpeg4", size=(64, 48), start=0):
    """An encoded clip of ``count`` shades."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, width=size[0], height=size[1], pix_fmt="yuv420p")
        stream.bit_rate = 4_000_000
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(shade(index, size), format="rgb24")
            frame.pts, frame.time_base = start + index, Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def turned(raw, matrix):
    """An MP4 whose picture is to be shown through ``matrix`` (the track header's, 16.16 and 2.30 fixed point)."""
    at = raw.index(b"tkhd") + 4
    assert raw[at] == 0, "a version 0 track header"
    return raw[: at + 40] + struct.pack(">9i", *matrix) + raw[at + 76 :]


def levels(video):
    return [round(float(frame[-4, -4].mean()) / 12) for frame in video.item.frames]


def png(index):
    file = io.BytesIO()
    Image.fromarray(shade(index)).save(file, "PNG")
    return file.getvalue()


def test_a_list_of_pictures_is_taken_at_the_rate_it_is_given_with():
    video = load_video([shade(0), Image.fromarray(shade(1)), png(2)], LIMITS, FrameSampling(fps=4.0))
    assert video.item.times_s == (0.0, 0.25, 0.5)
    assert levels(video) == [0, 1, 2]


def test_a_long_list_is_thinned_out_evenly_and_keeps_its_times():
    video = load_video([shade(i) for i in range(9)], LIMITS, FrameSampling(fps=2.0, max_frames=3))
    assert (levels(video), video.item.times_s) == ([0, 4, 8], (0.0, 2.0, 4.0))


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4"), ("mov", "mpeg4")]
)
def test_every_frame_of_a_file_comes_in_order_with_its_time(container, codec):
    video = load_video(film(container=container, codec=codec), LIMITS, DENSE)
    assert levels(video) == list(range(10))
    assert video.item.times_s == pytest.approx([i / 10 for i in range(10)], abs=1e-3)
    assert video.warnings == ()


def test_frames_are_sampled_evenly_at_the_wanted_rate():
    video = load_video(film(21), LIMITS, FrameSampling(fps=2.0))
    assert levels(video) == [0, 7, 13, 20]
    assert video.item.times_s == pytest.approx([0, 0.7, 1.3, 2.0], abs=1e-3)


def test_the_budget_of_frames_bounds_them():
    assert len(load_video(film(20), LIMITS, FrameSampling(fps=10.0, max_frames=3)).item.frames) == 3


@pytest.mark.parametrize("total", [0, 1, 2, 5, 48, 1000])
@pytest.mark.parametrize("fps", [0.5, 2.0, 24.0, 60.0])
def test_sampled_places_are_those_of_the_published_rule(total, fps):
    sampling = FrameSampling(fps=fps, min_frames=4, max_frames=100)
    count = min(max(int(total / 24.0 * fps), 4), 100, total)
    expected = np.linspace(0, total - 1, count).round().astype(int).tolist() if total else []
    assert list(sampling.indices(total, 24.0)) == expected


def test_times_count_from_the_first_frame():
    video = load_video(film(4, container="matroska", start=50), LIMITS, DENSE)
    assert video.item.times_s == pytest.approx([0, 0.1, 0.2, 0.3], abs=1e-3)


ONE = 1 << 16
QUARTERS = {
    "clockwise": ((0, ONE, 0, -ONE, 0, 0, 0, 0, 1 << 30), (slice(None, 4), slice(-4, None))),
    "half": ((-ONE, 0, 0, 0, -ONE, 0, 0, 0, 1 << 30), (slice(-4, None), slice(-4, None))),
    "counter": ((0, -ONE, 0, ONE, 0, 0, 0, 0, 1 << 30), (slice(-4, None), slice(None, 4))),
}


@pytest.mark.parametrize("turn", QUARTERS)
def test_a_turned_film_is_upright(turn):
    matrix, white = QUARTERS[turn]
    video = load_video(turned(film(2), matrix), LIMITS, DENSE)
    frame = video.item.frames[0]
    assert frame.shape == ((48, 64, 3) if turn == "half" else (64, 48, 3))
    assert frame[white].min() > 200
    assert (frame < 100).mean() > 0.6


def test_a_path_a_file_object_and_bytes_are_the_same(tmp_path):
    raw = film(4)
    path = tmp_path / "clip.mp4"
    path.write_bytes(raw)
    clips = [load_video(source, LIMITS, DENSE) for source in (raw, path, str(path), io.BytesIO(raw))]
    assert all(np.array_equal(c.item.frames, clips[0].item.frames) for c in clips)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ([], "0 frames"),
        ([shade(0), shade(1, (32, 48))], "frame 1 is 32 × 48"),
        ([shade(0), b"no picture"], "not a picture"),
        (b"", "0 bytes"),
        (b"nothing of the kind", "is not a video: text"),
        (png(0), "is not a video: a PNG picture"),
        ("no/such/clip.mp4", "does not exist"),
    ],
)
def test_what_is_no_clip_is_refused(source, match):
    with pytest.raises(InvalidMediaError, match=match):
        load_video(source, LIMITS, DENSE)


def test_a_file_that_is_cut_off_is_refused_or_read_as_far_as_it_goes():
    with pytest.raises(InvalidMediaError, match="cut off"):
        load_video(film(10)[:700], LIMITS, DENSE)
    with pytest.raises(InvalidMediaError, match="cannot be decoded"):
        load_video(film(10, container="matroska")[:20], LIMITS, DENSE)
    whole = film(10, container="matroska")
    video = load_video(whole[: len(whole) * 2 // 3], LIMITS, FrameSampling(fps=1000.0))
    assert 0 < len(video.item.frames) < 10


def test_a_recording_without_pictures_is_refused(encoded):
    with pytest.raises(InvalidMediaError, match="no track of pictures"):
        load_video(encoded("mp4", "aac"), LIMITS, DENSE)


def test_limits_hold_before_anything_is_decoded():
    raw = film(4)
    with pytest.raises(InvalidMediaError, match="max_image_pixels is 100"):
        load_video(raw, MediaLimits(max_image_pixels=100), DENSE)
    with pytest.raises(InvalidMediaError, match="max_media_bytes"):
        load_video(raw, MediaLimits(max_media_bytes=100), DENSE)
    budget = MediaBudget(4 * 64 * 48 * 3 - 1)
    with budget.hold() as hold, pytest.raises(CapacityError, match="max_decoded_media_bytes"):
        load_video(raw, LIMITS, DENSE, reserve=hold.grow)


def test_memory_of_the_kept_frames_is_reserved():
    taken = []
    load_video(film(20), LIMITS, FrameSampling(fps=10.0, max_frames=3), reserve=taken.append)
    assert taken == [3 * 64 * 48 * 3]


def test_without_pyav_files_are_refused_and_lists_work(monkeypatch):
    raw = film(2)
    genuine = builtins.__import__

    def without_av(name, *args, **options):
        if name == "av":
            raise ImportError("no PyAV")
        return genuine(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(InvalidMediaError, match=r"kestrel-core\[video\]"):
        load_video(raw, LIMITS, DENSE)
    assert len(load_video([shade(0)], LIMITS, DENSE).item.frames) == 1
