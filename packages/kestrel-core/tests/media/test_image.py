"""Every way to give a picture ends as the same upright 8-bit RGB array."""

import base64
import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote_from_bytes

import numpy as np
import pytest
from PIL import Image

from kestrel.media import MediaLimits, load_decoders, normalise_image

LIMITS = MediaLimits()


@pytest.fixture
def rgb():
    """A picture [5, 7, 3] in which every pixel differs."""
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def saved(image, format="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def pixels(source, limits=LIMITS):
    return normalise_image(source, limits).pixels


def with_orientation(image, orientation) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, exif=exif)


def test_all_entry_paths_give_the_same_array(rgb, tmp_path):
    raw = saved(Image.fromarray(rgb))
    file = tmp_path / "picture.jpg"  # the label lies; the content counts
    file.write_bytes(raw)
    encoded = base64.b64encode(raw).decode()
    with file.open("rb") as opened:
        sources = [
            str(file),
            file,
            raw,
            bytearray(raw),
            memoryview(raw),
            io.BytesIO(raw),
            opened,
            Image.fromarray(rgb),
            Image.open(io.BytesIO(raw)),
            rgb,
            rgb[::-1][::-1],
            f"data:image/png;base64,{encoded}",
            f"DATA:;base64,{encoded}",
            f"data:image/webp,{quote_from_bytes(raw)}",
        ]
        for source in sources:
            found = pixels(source)
            assert found.dtype == np.uint8
            assert np.array_equal(found, rgb)


@pytest.mark.parametrize("size", [(3, 40_000), (219, 100), (301, 200), (40_000, 2)])
def test_pictures_of_several_pieces_are_whole(size):
    wanted = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    assert np.array_equal(pixels(saved(Image.fromarray(wanted))), wanted)


def test_result_does_not_change_with_the_array_it_came_from(rgb):
    found = pixels(rgb)
    before = found.copy()
    rgb[:] = 0
    assert np.array_equal(found, before)
    assert found.flags.writeable


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(rgb, orientation):
    turned = {
        1: rgb, 2: rgb[:, ::-1], 3: rgb[::-1, ::-1], 4: rgb[::-1], 5: rgb.swapaxes(0, 1),
        6: np.rot90(rgb, -1), 7: np.rot90(rgb, 2).swapaxes(0, 1), 8: np.rot90(rgb),
    }[orientation]  # fmt: skip
    raw = with_orientation(Image.fromarray(rgb), orientation)
    found = normalise_image(raw, LIMITS)
    assert np.array_equal(found.pixels, turned)
    assert found.original_size == (7, 5)
    assert np.array_equal(pixels(Image.open(io.BytesIO(raw))), turned)


def test_orientation_of_a_tiff_is_applied_once(rgb):
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = saved(Image.fromarray(rgb), "TIFF", exif=exif)
    assert np.array_equal(pixels(raw), np.rot90(rgb, -1))


def test_unreadable_exif_is_a_warning(rgb):
    raw = saved(Image.fromarray(rgb), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pixels(raw).shape == rgb.shape


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_transparent_pixels_are_white(mode):
    transparent = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image = {
        "RGBA": lambda: transparent,
        "RGBa": lambda: transparent.convert("RGBa"),
        "LA": lambda: transparent.convert("LA"),
        "La": lambda: transparent.convert("LA").convert("La"),
        "PA": lambda: Image.new("PA", (2, 1), (0, 0)),
    }[mode]()
    assert image.mode == mode
    assert (pixels(image) == 255).all()


def test_half_transparency_is_blended_with_white():
    assert pixels(np.array([[[200, 100, 0, 128]]], np.uint8)).tolist() == [[[227, 177, 127]]]


@pytest.mark.parametrize(
    ("mode", "transparency", "expected"),
    [
        ("L", 0, [255, 9]),
        ("P", 0, [255, 9]),
        ("P", bytes([0, 255]), [255, 9]),
        ("RGB", (0, 0, 0), [255, 9]),
        ("1", 0, [255, 255]),
    ],
)
def test_declared_transparent_colour_is_white(mode, transparency, expected):
    values = np.array([[0, 9]], np.uint8)
    if mode == "P":
        image = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("L")
        image = Image.frombytes("P", (2, 1), image.tobytes())
        image.putpalette([0, 0, 0, 9, 9, 9])
    else:
        image = Image.fromarray(values).convert(mode) if mode != "1" else Image.fromarray(values > 0)
    raw = saved(image, transparency=transparency)
    assert pixels(raw)[0, :, 0].tolist() == expected
    assert np.array_equal(pixels(Image.open(io.BytesIO(raw))), pixels(raw))


def test_palette_grey_and_bilevel_pictures_become_rgb(rgb):
    grey = Image.fromarray(rgb[..., 0])
    assert np.array_equal(pixels(saved(grey)), np.repeat(rgb[..., :1], 3, axis=-1))
    assert np.array_equal(pixels(rgb[..., :1]), pixels(grey))
    quantised = Image.fromarray(rgb).quantize(8)
    assert np.array_equal(pixels(saved(quantised)), np.asarray(quantised.convert("RGB")))
    bilevel = Image.fromarray(rgb[..., 0] > 127)
    assert bilevel.mode == "1"
    assert np.array_equal(pixels(saved(bilevel))[..., 0], np.where(rgb[..., 0] > 127, 255, 0))


def test_cmyk_is_converted_by_value():
    inks = Image.new("CMYK", (1, 1), (0, 255, 128, 0))
    assert pixels(inks).tolist() == [[[255, 0, 127]]]
    assert np.abs(pixels(saved(inks, "JPEG", quality=100)).astype(int) - [255, 0, 127]).max() <= 3


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_16_bit_grey_is_scaled_and_not_clamped(dtype):
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    image = Image.frombytes({"<u2": "I;16", ">u2": "I;16B"}[dtype], (4, 1), values.astype(dtype).tobytes())
    expected = [0, 1, 128, 255]
    assert pixels(image)[0, :, 0].tolist() == expected
    if dtype == "<u2":
        assert pixels(saved(image))[0, :, 0].tolist() == expected
        assert pixels(saved(image, "TIFF"))[0, :, 0].tolist() == expected


def test_16_bit_colour_is_scaled_and_not_clamped():
    row = b"\0" + struct.pack(">6H", 0, 32768, 65535, 65535, 257, 0)
    raw = png_header(2, 1, depth=16, colour=2) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    assert pixels(raw).tolist() == [[[0, 128, 255], [255, 1, 0]]]


def test_first_frame_of_an_animation_is_used_and_said_so(rgb):
    frames = [Image.fromarray(rgb), Image.fromarray(255 - rgb)]
    for format, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        raw = saved(frames[0], format, save_all=True, append_images=frames[1:], **options)
        found = normalise_image(raw, LIMITS)
        assert found.warnings == ("the picture has several frames; the first one is used",)
        assert np.array_equal(found.pixels, np.asarray(Image.open(io.BytesIO(raw)).convert("RGB")))
    assert not normalise_image(saved(frames[0], "GIF"), LIMITS).warnings


def test_pil_images_and_bytes_agree_in_every_format(rgb):
    picture = Image.fromarray(np.kron(rgb, np.ones((8, 8, 1), np.uint8)))
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        raw = saved(picture, format)
        assert np.array_equal(pixels(raw), pixels(Image.open(io.BytesIO(raw))))


def test_pictures_decode_in_several_threads_at_once(rgb):
    raw = saved(Image.fromarray(np.kron(rgb, np.ones((16, 16, 1), np.uint8))), "JPEG", exif=b"Exif\0\0broken")
    shared = Image.open(io.BytesIO(raw))
    expected = pixels(raw)
    filters = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(pixels, [raw, shared] * 32):
            assert np.array_equal(found, expected)
    assert warnings.filters == filters


def test_reservation_comes_before_decoding_and_may_refuse(rgb):
    class Full(Exception):
        pass

    def refuse(nbytes):
        asked.append(nbytes)
        raise Full

    asked = []
    with pytest.raises(Full):
        normalise_image(saved(Image.fromarray(rgb))[:-20], LIMITS, reserve=refuse)
    assert asked[0] >= rgb.nbytes


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", width, height, depth, colour, 0, 0, 0))


def test_pillow_keeps_memory_once_decoders_are_loaded():
    load_decoders()
    assert Image.core.get_blocks_max() >= 8
    Image.core.set_blocks_max(20)
    load_decoders()
    assert Image.core.get_blocks_max() == 20
    Image.core.set_blocks_max(8)
