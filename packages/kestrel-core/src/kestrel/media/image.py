"""The one image normaliser: every way to give a picture ends here as upright 8-bit RGB.

Order: bytes within the byte limit, type and size from the header, size within the pixel limit, decode, colours to RGB
on white, orientation. PIL images and arrays join where bytes are decoded, so the same picture gives the same array.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kestrel.errors import InvalidMediaError
from kestrel.media.colour import to_rgb
from kestrel.media.limits import MediaLimits
from kestrel.media.remote import Fetcher
from kestrel.media.sniff import describe
from kestrel.media.source import BinaryFile, Encoded, read_encoded

__all__ = [
    "FORMATS",
    "Decode",
    "ImageSource",
    "NormalisedImage",
    "decode_image",
    "load_decoders",
    "normalise_image",
]

ImageSource = Encoded | Image.Image | NDArray[np.uint8]

# Formats with a signature that Pillow decodes by itself; EPS, for one, would start another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "QOI")

_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_BYTES_PER_PIXEL = 7  # at the peak: Pillow's 4 beside the array's 3
_BLOCKS_KEPT = 8  # of the size that pictures had lately, at most 16 MiB each
_PIECE_BYTES = 1 << 16  # of packed pixels: they stay in the processor's cache until they are copied
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

_one_catches_warnings = threading.Lock()  # the warnings module has one state per process
_one_loads = threading.Lock()  # a PIL image may be given to several requests, and decodes itself in place


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalisedImage:
    """An upright picture: ``pixels`` [H, W, 3] uint8. ``original_size`` is (width, height) as stored, before it was
    turned upright. ``warnings`` are for the user (first frame of an animation, unreadable EXIF)."""

    pixels: NDArray[np.uint8]
    warnings: tuple[str, ...] = ()
    original_size: tuple[int, int]


Decode = Callable[[bytes, str, MediaLimits, Callable[[int], None]], NormalisedImage]
"""``decode_image``, wherever it happens: (encoded bytes, label, limits, reserve)."""


def normalise_image(
    source: ImageSource,
    limits: MediaLimits,
    *,
    reserve: Callable[[int], None] = lambda nbytes: None,
    fetcher: Fetcher | None = None,
    decode: Decode | None = None,
) -> NormalisedImage:
    """``source`` as upright 8-bit RGB, on white where it is transparent.

    ``source``: a path, encoded bytes, a binary file, a data URI, a URL (when allowed), a PIL image, or an array
    [H, W, C] uint8 with 1, 3 or 4 channels. ``reserve`` is called with the bytes that decoding takes, before it
    starts; what it raises passes through. ``decode``: where encoded pictures are decoded; None: here. Raises
    InvalidMediaError for everything that is wrong with the picture.
    """
    if isinstance(source, Image.Image):
        return _normalised(source, "the given PIL image", limits, reserve, is_given=True)
    if isinstance(source, np.ndarray):
        return _normalised(_from_array(source, limits), "the given array", limits, reserve, is_given=False)
    if not isinstance(source, str | os.PathLike | bytes | bytearray | memoryview | BinaryFile):
        raise InvalidMediaError(
            f"a {type(source).__name__} is not a picture. Give a path, bytes, a binary file, a data URI, a PIL image "
            "or an array [height, width, channels] of uint8"
        )
    raw, label = read_encoded(source, limits, fetcher or Fetcher())
    return (
        decode_image(raw, label, limits, reserve) if decode is None else decode(raw, label, limits, reserve)
    )


def decode_image(
    raw: bytes, label: str, limits: MediaLimits, reserve: Callable[[int], None]
) -> NormalisedImage:
    """The picture that ``raw`` encodes, as ``normalise_image`` says; ``label``: how messages name it."""
    return _normalised(_parsed_header(raw, label), label, limits, reserve, is_given=False)


def _normalised(
    image: Image.Image, label: str, limits: MediaLimits, reserve: Callable[[int], None], *, is_given: bool
) -> NormalisedImage:
    width, height = image.size
    _check_size(label, width, height, limits)
    reserve(width * height * _BYTES_PER_PIXEL)
    notes: list[str] = []
    try:
        upright = _decoded(image, notes, is_given=is_given)
        pixels = _pixels(upright)
    except InvalidMediaError as error:
        raise InvalidMediaError(f"{label}: {error}") from error
    except Exception as error:  # decoders raise anything; only this picture is at fault
        raise InvalidMediaError(
            f"{label} cannot be decoded ({image.format or 'PIL image'}, {width} × {height}): {_reason(error)}. "
            "It may be truncated or damaged; send it again or save it anew"
        ) from error
    return NormalisedImage(pixels=pixels, warnings=tuple(notes), original_size=(width, height))


def _pixels(rgb: Image.Image) -> NDArray[np.uint8]:
    """The pixels [H, W, 3] of ``rgb``, piece by piece into one array. ``tobytes`` joins them in fresh memory first,
    which may cost more than decoding."""
    width, height = rgb.size
    pixels = np.empty(height * width * 3, dtype=np.uint8)
    encoder = Image.core.raw_encoder("RGB", "RGB")  # type: ignore[attr-defined]
    encoder.setimage(rgb.im, (0, 0, width, height))
    at = status = 0
    while not status:
        _, status, piece = encoder.encode(max(_PIECE_BYTES, 4 * width))
        pixels[at : at + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        at += len(piece)
    assert at == len(pixels), f"Pillow packed {at} bytes of a picture of {width} × {height} (status {status})"
    return pixels.reshape(height, width, 3)


def load_decoders() -> None:
    """Load the decoders of common formats, so that the first picture need not wait for them, and let Pillow keep a few
    blocks of memory: the system's fresh pages cost a photograph more than its decoding."""
    with _one_catches_warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.preinit()
    memory = Image.core  # type: ignore[attr-defined]
    memory.set_blocks_max(max(_BLOCKS_KEPT, memory.get_blocks_max()))


def _from_array(array: NDArray[Any], limits: MediaLimits) -> Image.Image:
    shape = " × ".join(map(str, array.shape))
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] not in _MODES:
        raise InvalidMediaError(
            f"the array is {array.dtype} [{shape}]. Give uint8 [height, width, channels] with 1, 3 or 4 channels; "
            "the layout is never guessed"
        )
    _check_size("the given array", array.shape[1], array.shape[0], limits)
    solid = np.ascontiguousarray(array[..., 0] if array.shape[-1] == 1 else array)
    size = (array.shape[1], array.shape[0])
    return Image.frombytes(_MODES[array.shape[-1]], size, solid.tobytes())


def _parsed_header(raw: bytes, label: str) -> Image.Image:
    with _one_catches_warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load in (Image.preinit, Image.init):  # all decoders only for what the common ones do not know
            load()
            for name in FORMATS:
                factory, accepts = Image.OPEN.get(name, (None, None))
                if factory is None or accepts is None or accepts(raw[:16]) is not True:
                    continue
                try:
                    return factory(io.BytesIO(raw), "")
                except Exception as error:  # decoders raise anything; only this picture is at fault
                    raise InvalidMediaError(
                        f"{label} begins as {name} but its header cannot be read: {_reason(error)}. "
                        "It may be truncated or damaged; send it again or save it anew"
                    ) from error
    raise InvalidMediaError(f"{label} is not a picture: {describe(raw)}. Supported: {', '.join(FORMATS)}")


def _check_size(label: str, width: int, height: int, limits: MediaLimits) -> None:
    if width < 1 or height < 1:
        raise InvalidMediaError(f"{label} is {width} × {height}: it has no pixels. Give a picture")
    if width * height > limits.max_image_pixels:
        raise InvalidMediaError(
            f"{label} is {width} × {height} = {width * height} pixels; max_image_pixels is {limits.max_image_pixels}. "
            "Scale it down or raise the limit"
        )


def _decoded(image: Image.Image, notes: list[str], *, is_given: bool) -> Image.Image:
    with _one_loads if is_given else nullcontext():
        # An attribute of some PIL classes only. MPO: a photograph with its preview, no animation.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            notes.append("the picture has several frames; the first one is used")
        image.load()
    return _upright(image, to_rgb(image), notes)


def _upright(image: Image.Image, rgb: Image.Image, notes: list[str]) -> Image.Image:
    """``rgb`` turned as ``image``'s EXIF says. Read after decoding: some decoders turn the picture themselves."""
    try:
        with _one_catches_warnings, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # damaged EXIF does not spoil the picture
        notes.append("the picture's EXIF data cannot be read; it is used as stored")
        return rgb
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return rgb if turn is None else rgb.transpose(turn)


def _reason(error: Exception) -> str:
    return f"{str(error) or type(error).__name__}".rstrip(". ")
