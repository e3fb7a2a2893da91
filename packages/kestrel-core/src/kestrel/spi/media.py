"""Media items as a driver's ``prepare`` receives them, and what a model declares that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["AudioItem", "FloatsItem", "FrameSampling", "ImageItem", "MediaItem", "MediaSpec", "VideoItem"]


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
class FrameSampling:
    """Which frames of a clip a driver wants: ``fps`` per second, at least ``min_frames`` (as far as the clip has
    them) and at most ``max_frames``, evenly spread from the first to the last."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def indices(self, total: int, rate: float) -> tuple[int, ...]:
        """Places of the wanted frames among ``total`` frames of ``rate`` per second; halves round to even."""
        wanted = min(max(int(total / rate * self.fps), self.min_frames), self.max_frames, total)
        if wanted < 2:
            return (0,) if wanted else ()
        step = (total - 1) / (wanted - 1)
        return (*(round(i * step) for i in range(wanted - 1)), total - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpec:
    """A kind of media that a driver takes: ``into`` sequence positions or cross-attention states; at most
    ``max_items`` per prompt (None: no limit of its own). ``max_cost`` bounds one encoder launch, in units of
    ``Prepared.cost``. ``sampling``: of a "video" kind, None for ``FrameSampling``'s own numbers."""

    kind: str
    into: Literal["positions", "cross"] = "positions"
    max_items: int | None = None
    max_cost: int = 16
    sampling: FrameSampling | None = None
