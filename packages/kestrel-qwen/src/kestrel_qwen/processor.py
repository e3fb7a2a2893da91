"""How a checkpoint's pictures and clips are sized and scaled: its preprocessor files, with the published numbers where
they are silent. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel.errors import LoadError

__all__ = ["ImageConfig", "VideoConfig"]

RESCALE = 1 / 255
# Settings of the preprocessor files that change what the tower sees, and the values that are implemented.
IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_center_crop": (False,),
    "do_pad": (False,),
    "resample": (3, "bicubic"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Pixels of a resized picture, and what scales them: (value / 255 − ``mean``) / ``std`` per channel."""

    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ImageConfig:
        """From a parsed preprocessor_config.json. LoadError for a value that is none, or not implemented."""
        _check(values)
        low, high = _budget(values)
        default = cls()
        return cls(
            min_pixels=low or default.min_pixels,
            max_pixels=high or default.max_pixels,
            mean=_channels(values, "image_mean") or default.mean,
            std=_channels(values, "image_std", above=0.0) or default.std,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoConfig:
    """Pixels of all frames of a clip together, and which frames are taken."""

    min_pixels: int = 4_096
    max_pixels: int = 25_165_824
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> VideoConfig:
        """From a parsed video_preprocessor_config.json. LoadError as for pictures."""
        _check(values)
        low, high = _budget(values)
        default = cls()
        return cls(
            min_pixels=low or default.min_pixels,
            max_pixels=high or default.max_pixels,
            fps=float(_number(values, "fps") or default.fps),
            min_frames=int(_number(values, "min_frames", least=1) or default.min_frames),
            max_frames=int(_number(values, "max_frames", least=1) or default.max_frames),
        )


def _check(values: Mapping[str, Any]) -> None:
    for key, allowed in IMPLEMENTED.items():
        value = values.get(key)
        if value is not None and value not in allowed:
            raise _wrong(key, value, f"Kestrel implements {' or '.join(repr(a) for a in allowed)}")
    factor = values.get("rescale_factor")
    if factor is not None and not (_is_number(factor) and math.isclose(factor, RESCALE, rel_tol=1e-6)):
        raise _wrong("rescale_factor", factor, "Kestrel implements 1/255")


def _budget(values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Least and most pixels, under either of their spellings; the edges of ``size`` are counts of pixels too."""
    size = values.get("size") or {}
    if not isinstance(size, Mapping):
        raise _wrong("size", size, "it must be an object of shortest_edge and longest_edge")
    low = values.get("min_pixels") or size.get("shortest_edge")
    high = values.get("max_pixels") or size.get("longest_edge")
    for value in (low, high):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise _wrong("size", value, "it must be a whole number of pixels")
    if low is not None and high is not None and low > high:
        raise _wrong("size", [low, high], "the least must not be above the most pixels")
    return low, high


def _channels(values: Mapping[str, Any], key: str, above: float | None = None) -> tuple[float, ...] | None:
    """A number for each of three channels, or None where ``key`` is absent."""
    found = values.get(key)
    if found is None:
        return None
    numbers = found if isinstance(found, list) else []
    if len(numbers) != 3 or any(not _is_number(n) or (above is not None and n <= above) for n in numbers):
        raise _wrong(key, found, "it must be three numbers" + ("" if above is None else f" above {above:g}"))
    return tuple(float(n) for n in numbers)


def _number(values: Mapping[str, Any], key: str, least: float = 0.0) -> float | None:
    """A number above 0 and not below ``least``, or None where ``key`` is absent."""
    found: float | None = values.get(key)
    if found is not None and not (_is_number(found) and found > 0 and found >= least):
        raise _wrong(key, found, f"it must be a number {f'of at least {least:g}' if least else 'above 0'}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(key: str, value: Any, what: str) -> LoadError:
    return LoadError(f"the checkpoint's preprocessor files say {key} is {value!r}; {what}. Correct the file.")
