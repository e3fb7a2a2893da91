"""Temporal slices of a prepared video: each is a media item of its own, since attention never crosses them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kestrel.types import Prepared

__all__ = ["IMAGE", "PATCHES_PER_UNIT", "VIDEO", "slices_of", "units"]

IMAGE, VIDEO = "image", "video"
PATCHES_PER_UNIT = 1024  # a unit of encoder cost: a picture of 512 × 512


def units(patches: int) -> int:
    """The encoder cost of so many patches, rounded up."""
    return max(1, math.ceil(patches / PATCHES_PER_UNIT))


def slices_of(video: Prepared) -> Iterator[tuple[float, Prepared]]:
    """The slices of a video that ``prepare_video`` made: the middle of each in seconds, and its media item.

    A slice has the tensors of an image: ``patches`` [h · w, C · T · p · p] (a view) and ``grid`` (1, h, w).
    """
    times_s, digests = video.meta["slice_times_s"], video.meta["slice_digests"]
    count = len(times_s)
    grid = video.tensors["grid"].clone()
    grid[0, 0] = 1
    for seconds, digest, patches in zip(times_s, digests, video.tensors["patches"].chunk(count), strict=True):
        yield (
            seconds,
            Prepared(
                kind=VIDEO,
                digest=digest,
                num_positions=video.num_positions // count,
                tensors={"patches": patches, "grid": grid},
                meta={"seconds": seconds, "width": video.meta["width"], "height": video.meta["height"]},
                cost=units(len(patches)),
            ),
        )
