"""What cannot be used is refused with the reason, before it costs anything."""

import base64
import io
import os
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from kestrel.errors import InvalidMediaError
from kestrel.media import MediaLimits, normalise_image

LIMITS = MediaLimits()


def png(width: int, height: int, body: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(body))
        + chunk(b"IEND", b"")
    )


def picture(format: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, format)
    return file.getvalue()


def assert_refused(source, match, limits=LIMITS):
    with pytest.raises(InvalidMediaError, match=match) as caught:
        normalise_image(source, limits)
    return str(caught.value)


def test_empty_sources_are_named():
    assert_refused(b"", r"given bytes is empty \(0 bytes\)")
    assert_refused(io.BytesIO(), "file object is empty")
    assert_refused("data:image/png;base64,", "data URI is empty")


def test_paths_that_lead_to_no_picture_are_named(tmp_path):
    (tmp_path / "empty.png").touch()
    assert_refused(tmp_path / "empty.png", r"empty\.png is empty")
    assert_refused(tmp_path / "absent.png", r"absent\.png does not exist")
    assert_refused(str(tmp_path), "is not a file")
    assert_refused("picture\0.png", "NUL")
    assert_refused(base64.b64encode(bytes(5000)).decode(), "characters")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "is not a file")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"hello, I am text\n", "text"),
        ("héllo wörld ".encode() * 100, "text"),
        (b"<!DOCTYPE html><html></html>", "markup"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "markup"),
        (b"%PDF-1.7 ...", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        (b"PK\x03\x04....", "ZIP"),
        (b"\0\0\0\x18ftypmp42....", "MP4"),
        (b"\0\0\0\x18ftypheic....", "HEIC"),
        (b"RIFF....WAVEfmt ", "RIFF"),
        (bytes(range(7, 40)), "unknown data beginning with 07 08"),
    ],
)
def test_other_kinds_of_file_are_told_apart(tmp_path, content, what):
    file = tmp_path / "picture.png"
    file.write_bytes(content)
    message = assert_refused(file, "is not a picture")
    assert what in message
    assert "picture.png" in message
    assert "Supported: JPEG, PNG" in message


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_truncated_pictures_are_refused(format, share):
    raw = picture(format)
    assert_refused(raw[: int(len(raw) * share)], "truncated|not a picture")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_damaged_pictures_decode_or_are_refused(format):
    random = np.random.default_rng(0)
    raw = np.frombuffer(picture(format), np.uint8)
    refusals = 0
    for _ in range(60):
        damaged = raw.copy()
        damaged[random.integers(0, min(len(raw), 300), 5)] = random.integers(0, 256, 5)
        try:  # decoders may repair what they read; whatever else they raise fails the test
            normalise_image(damaged.tobytes(), MediaLimits(max_image_pixels=10**6))
        except InvalidMediaError:
            refusals += 1
    assert refusals > 0


def test_huge_header_is_refused_before_decoding():
    start = time.perf_counter()
    message = assert_refused(
        png(20_000, 20_000), "20000 × 20000 = 400000000 pixels; max_image_pixels is 100000000"
    )
    assert "raise the limit" in message
    assert time.perf_counter() - start < 1


def test_decompression_bomb_costs_no_memory():
    bomb = png(12_000, 12_000, bytes(12_000 * 3 + 1) * 300)
    assert len(bomb) < 100_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_refused(bomb, "144000000 pixels")


def test_pixel_limit_may_lie_above_pillows_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_refused(png(20_000, 20_000), "truncated or damaged", MediaLimits(max_image_pixels=500_000_000))


@pytest.mark.parametrize("source", [np.zeros((11, 10, 3), np.uint8), Image.new("RGB", (10, 11))])
def test_pixel_limit_holds_for_decoded_sources(source):
    assert_refused(source, "10 × 11 = 110 pixels", MediaLimits(max_image_pixels=109))


def test_byte_limit_holds_for_every_source(tmp_path):
    raw = picture("PNG")
    file = tmp_path / "picture.png"
    file.write_bytes(raw)
    small = MediaLimits(max_media_bytes=len(raw) - 1)
    uri = "data:image/png;base64," + base64.b64encode(raw).decode()
    for source in (raw, file, str(file), io.BytesIO(raw), uri):
        assert_refused(source, "max_media_bytes", small)
        assert normalise_image(file, MediaLimits(max_media_bytes=len(raw))).pixels.shape == (40, 40, 3)


def test_endless_file_object_is_cut_at_the_limit():
    class Endless:
        given = 0

        def read(self, size):
            self.given += size
            return bytes(size)

    source = Endless()
    assert_refused(source, "max_media_bytes", MediaLimits(max_media_bytes=1000))
    assert source.given <= 1001


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((4, 4, 3), np.float32), "float32"),
        (np.zeros((4, 4, 3), np.int64), "int64"),
        (np.zeros((4, 4), np.uint8), r"uint8 \[4 × 4\]"),
        (np.zeros((3, 4, 4), np.uint8)[:, :, :0], r"\[3 × 4 × 0\]"),
        (np.zeros((3, 8, 8), np.uint8), r"\[3 × 8 × 8\]"),
        (np.zeros((1, 4, 4, 3), np.uint8), r"\[1 × 4 × 4 × 3\]"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.zeros((4, 0, 3), np.uint8), "no pixels"),
    ],
)
def test_array_layout_is_never_guessed(array, found):
    assert_refused(array, found)


@pytest.mark.parametrize("source", [None, 3, [1, 2], {"image": 1}, io.StringIO("text")])
def test_other_objects_are_refused_saying_what_to_give(source):
    assert_refused(source, "Give|binary mode")


def test_closed_file_object_is_refused():
    closed = io.BytesIO(picture("PNG"))
    closed.close()
    assert_refused(closed, "closed file")


def test_pil_image_that_cannot_be_decoded_is_refused():
    raw = picture("PNG")
    assert_refused(Image.open(io.BytesIO(raw[:-900])), "given PIL image cannot be decoded")


@pytest.mark.parametrize("mode", ["F", "I"])
def test_modes_without_a_known_range_are_refused(mode):
    assert_refused(Image.new(mode, (2, 2)), f"colour mode '{mode}' has no known range")


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64,AAA", "not base64"),
        ("data:text/plain,hello", "is not a picture: text"),
    ],
)
def test_bad_data_uris_are_refused(uri, text):
    assert_refused(uri, text)


def test_other_schemes_are_refused():
    assert_refused("ftp://host/picture.png", "ftp: addresses are not supported")
    assert_refused("file:///etc/passwd", "file: addresses are not supported")


class Reads:
    """A file object of somebody else's making."""

    def __init__(self, read):
        self.read = read


def no_size():
    return b""


def broken(size):
    raise RuntimeError("the wire is cut")


@pytest.mark.parametrize("read", [broken, no_size, "no function", lambda size: 1, lambda size: "text"])
def test_file_objects_that_fail_in_any_way_are_named(read):
    assert_refused(Reads(read), "file object")


class Leads:
    """A path object of somebody else's making."""

    def __init__(self, to):
        self.to = to

    def __fspath__(self):
        if isinstance(self.to, Exception):
            raise self.to
        return self.to


@pytest.mark.parametrize("path", [Leads(RuntimeError("nowhere")), Leads(3), "\ud800.png"])
def test_paths_that_are_none_are_named(path):
    assert_refused(path, "is not a path")


def test_path_objects_may_give_bytes(tmp_path):
    (tmp_path / "a.png").write_bytes(picture("PNG"))
    assert normalise_image(Leads(os.fsencode(tmp_path / "a.png")), LIMITS).pixels.shape == (40, 40, 3)


def test_released_memory_is_named():
    view = memoryview(picture("PNG"))
    view.release()
    assert_refused(view, "released")


def test_data_uris_beyond_ascii_are_named():
    assert_refused("data:image/png;base64,\ud800", "beyond ASCII")
    assert_refused("data:image/png,\xe9", "beyond ASCII")
