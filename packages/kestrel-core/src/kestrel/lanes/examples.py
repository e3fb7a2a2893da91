"""Media items as launches are tried with before anybody asks: of the kinds that everybody knows, large and empty."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from kestrel.errors import KestrelError
from kestrel.spi.driver import TokenDriver
from kestrel.spi.media import AudioItem, ImageItem, MediaItem, VideoItem
from kestrel.types import Prepared

__all__ = ["example"]

log = logging.getLogger("kestrel.lanes")

PICTURE_PIXELS = 2048  # by as many: what a phone's photo is scaled to before families cut it up
SOUND_SECONDS = 30
SAMPLE_RATE = 16_000
CLIP_FRAMES = 16


def example(driver: TokenDriver, kind: str) -> Prepared | None:
    """A large item of ``kind``, prepared; None where the kind is another one or the driver refuses it."""
    for item in _items(kind):
        try:
            return driver.prepare(item, {})
        except KestrelError as error:
            log.debug("no %s to try the encoder with: %s", kind, error)
    return None


def _items(kind: str) -> Iterator[MediaItem]:
    picture = np.zeros((PICTURE_PIXELS, PICTURE_PIXELS, 3), dtype=np.uint8)
    match kind:
        case "image":
            yield ImageItem(pixels=picture)
        case "audio":
            samples = np.zeros(SOUND_SECONDS * SAMPLE_RATE, dtype=np.float32)
            yield AudioItem(samples=samples, sample_rate=SAMPLE_RATE)
        case "video":
            frame = np.ascontiguousarray(picture[::4, ::4])
            times = tuple(i / 2 for i in range(CLIP_FRAMES))
            yield VideoItem(frames=(frame,) * CLIP_FRAMES, times_s=times)
