"""Media items as a driver's ``prepare`` receives them, and what a model declares that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["AudioItem", "FloatsItem", "ImageItem", "MediaItem", "MediaSpec", "VideoItem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageItem:
    """An upright 8-bit RGB picture: ``pixels`` [H, W, 3] uint8, as ``kestrel.media`` normalises every input."""

    pixels: NDArray[np.uint8]
    kind: str = "image"
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoItem:
    """Frames of a clip, each [H, W, 3] uint8 and of one size, with their times in seconds."""

    frames: tuple[NDArray[np.uint8], ...]
    times_s: tuple[float, ...]
    kind: str = "video"
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioItem:
    """Mono PCM: ``samples`` [N] float32 in −1 … 1 at ``sample_rate`` Hz."""

    samples: NDArray[np.float32]
    sample_rate: int
    kind: str = "audio"
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatsItem:
    """Exact numbers given by the caller (a spatial reference), under a kind that the family names."""

    values: tuple[float, ...]
    kind: str
    meta: Mapping[str, Any] = field(default_factory=dict)


MediaItem = ImageItem | VideoItem | AudioItem | FloatsItem


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpec:
    """A kind of media that a driver takes: ``into`` sequence positions or cross-attention states; at most
    ``max_items`` per prompt (None: no limit of its own). ``max_cost`` bounds one encoder launch, in units of
    ``Prepared.cost``."""

    kind: str
    into: Literal["positions", "cross"] = "positions"
    max_items: int | None = None
    max_cost: int = 16
