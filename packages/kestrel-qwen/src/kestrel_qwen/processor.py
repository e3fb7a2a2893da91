"""How a checkpoint's pictures and clips are sized and scaled: its preprocessor files, with the published numbers where
they are silent. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel.errors import LoadError

__all__ = ["ImageConfig", "VideoConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Pixels of a resized picture, and what scales them: (value / 255 − ``mean``) / ``std`` per channel."""

    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ImageConfig:
        """From a parsed preprocessor_config.json."""
        low, high = _budget(values, cls.__name__)
        default = cls()
        return cls(
            min_pixels=low or default.min_pixels,
            max_pixels=high or default.max_pixels,
            mean=tuple(values.get("image_mean") or default.mean),
            std=tuple(values.get("image_std") or default.std),
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
        """From a parsed video_preprocessor_config.json."""
        low, high = _budget(values, cls.__name__)
        default = cls()
        return cls(
            min_pixels=low or default.min_pixels,
            max_pixels=high or default.max_pixels,
            fps=float(values.get("fps") or default.fps),
            min_frames=int(values.get("min_frames") or default.min_frames),
            max_frames=int(values.get("max_frames") or default.max_frames),
        )


def _budget(values: Mapping[str, Any], what: str) -> tuple[int | None, int | None]:
    """Least and most pixels, under either of their spellings; the edges of ``size`` are counts of pixels too."""
    size = values.get("size") or {}
    low = values.get("min_pixels") or size.get("shortest_edge")
    high = values.get("max_pixels") or size.get("longest_edge")
    for value in (low, high):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise LoadError(f"the preprocessor files give {what} a size of {value!r} pixels. Correct them.")
    return low, high
