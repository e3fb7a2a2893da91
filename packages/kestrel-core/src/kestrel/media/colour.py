"""Any of Pillow's colour modes as 8-bit RGB, converted by value, on white where transparent."""

from __future__ import annotations

import numpy as np
from PIL import Image

from kestrel.errors import InvalidMediaError

__all__ = ["to_rgb"]

_OPAQUE = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
_ALPHA = ("LA", "PA", "RGBA", "La", "RGBa")
_KEYED = ("1", "L", "P", "RGB")  # one colour, or palette entries, may be declared transparent
_DEEP_FORMATS = ("PNG", "PPM")  # their 32-bit mode holds 16-bit values


def to_rgb(image: Image.Image) -> Image.Image:
    """``image`` (decoded) as mode RGB. InvalidMediaError for modes whose range is not known (floats, 32-bit)."""
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in _DEEP_FORMATS):
        return _from_16_bit(image)
    if mode not in (*_OPAQUE, *_ALPHA):
        raise InvalidMediaError(
            f"its colour mode {mode!r} has no known range. Convert it to 8-bit RGB (img.convert or a scaled array)"
        )
    if mode == "La":
        image = image.convert("LA")
    if mode in _ALPHA or (mode in _KEYED and image.info.get("transparency") is not None):
        return _on_white(image.convert("RGBA"))
    return image if mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _from_16_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    see_through = image.info.get("transparency")
    if isinstance(see_through, int):
        grey[values == see_through] = 255
    return Image.fromarray(grey).convert("RGB")
