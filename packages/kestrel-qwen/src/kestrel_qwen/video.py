"""Clips as rows of patches, two frames to a temporal slice; every slice knows its time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kestrel.errors import InvalidMediaError
from kestrel.spi import VideoItem
from kestrel.types import Prepared
from kestrel_qwen.images import check_pixels, digest_of, patch_rows, resized, vision_of
from kestrel_qwen.resize import clip_size, pixel_budget
from kestrel_qwen.slices import VIDEO, units

if TYPE_CHECKING:
    from kestrel_qwen.config import QwenConfig

__all__ = ["prepare_video", "slice_times"]


def prepare_video(item: VideoItem, settings: Mapping[str, Any], config: QwenConfig) -> Prepared:
    """The patches of ``item``: uint8 [t · h · w, C · T · p · p] and its grid (t, h, w).

    All frames of the item are used; an odd last one is repeated. The pixel limits hold for all frames together.
    ``slices_of`` gives the slices, which are what stands in a prompt. InvalidMediaError for a clip of no frames, of
    frames that differ in size, or too long and thin.
    """
    vision = vision_of(config, VIDEO)
    _check_frames(item)
    low, high = pixel_budget(settings, config.videos.min_pixels, config.videos.max_pixels, vision.factor)
    height, width = item.frames[0].shape[:2]
    span = vision.temporal_patch_size
    size = clip_size(max(len(item.frames), span), height, width, vision.factor, low, high)
    frames = [resized(frame, size) for frame in item.frames]
    frames += [frames[-1]] * (-len(frames) % span)
    pixels = np.stack(frames)
    rows, columns = (side // vision.patch_size for side in size)
    count = len(frames) // span
    digests = tuple(digest_of(pixels[i * span : (i + 1) * span]) for i in range(count))
    times = slice_times(item.times_s, span)
    return Prepared(
        kind=VIDEO,
        digest=hashlib.sha256(b"".join(digests) + repr(times).encode()).digest(),
        num_positions=count * rows * columns // vision.spatial_merge_size**2,
        tensors={
            "patches": torch.from_numpy(patch_rows(pixels, vision)),
            "grid": torch.tensor([[count, rows, columns]]),
        },
        meta={
            "width": width,
            "height": height,
            "resized": (size[1], size[0]),
            "frames": len(item.frames),
            "slice_times_s": times,
            "slice_digests": digests,
        },
        cost=units(count * rows * columns),
    )


def slice_times(times_s: Sequence[float], span: int) -> tuple[float, ...]:
    """The middle of each slice: the mean of its first and last frame's times; the last frame fills an odd slice."""
    times = [*times_s, *[times_s[-1]] * (-len(times_s) % span)]
    return tuple((times[i] + times[i + span - 1]) / 2 for i in range(0, len(times), span))


def _check_frames(item: VideoItem) -> None:
    if not item.frames:
        raise InvalidMediaError("the video has 0 frames. Give at least one")
    if len(item.times_s) != len(item.frames):
        raise InvalidMediaError(
            f"the video has {len(item.frames)} frames and {len(item.times_s)} times. Give one time for each frame"
        )
    for frame in item.frames:
        check_pixels(frame)
        if frame.shape != item.frames[0].shape:
            sizes = [f"{f.shape[1]} × {f.shape[0]}" for f in (item.frames[0], frame)]
            raise InvalidMediaError(
                f"the video's frames differ in size: {' and '.join(sizes)}. Give frames of one size"
            )
