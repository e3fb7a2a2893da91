"""The one way in for clips: a list of pictures, or a file through PyAV, as frames of one size with their times.

Of a file, only the frames that a model wants are kept. Order: bytes within the byte limit, recognised by content, size
of the picture within the pixel limit, frames counted without decoding, memory reserved, decoded, turned upright.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import InvalidMediaError, KestrelError
from kestrel.media.image import ImageSource, normalise_image
from kestrel.media.limits import MediaLimits
from kestrel.media.remote import Fetcher
from kestrel.media.sniff import describe
from kestrel.media.source import Encoded, read_encoded
from kestrel.spi.media import FrameSampling, VideoItem

__all__ = ["NormalisedVideo", "VideoSource", "load_video"]

VideoSource: TypeAlias = "Encoded | list[ImageSource] | tuple[ImageSource, ...]"
Frame: TypeAlias = "NDArray[np.uint8]"

SUPPORTED = "MP4, MOV, WebM, Matroska, AVI, GIF"
# FFmpeg's demuxer by content, a dot for any byte; formats that name other files or addresses are never tried.
_DEMUXERS = {
    b"....ftyp": "mov",
    b"....moov": "mov",
    b"....mdat": "mov",
    b"....wide": "mov",
    b"\x1aE\xdf\xa3": "matroska",
    b"RIFF....AVI ": "avi",
    b"GIF8": "gif",
}
_USUAL_RATE = 24.0  # frames per second of a file that does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalisedVideo:
    """A clip ready for a driver. ``warnings`` are for the user (frames that could not be decoded)."""

    item: VideoItem
    warnings: tuple[str, ...] = ()


def load_video(
    source: VideoSource,
    limits: MediaLimits,
    sampling: FrameSampling,
    *,
    reserve: Callable[[int], None] = lambda nbytes: None,
    fetcher: Fetcher | None = None,
) -> NormalisedVideo:
    """The frames of ``source`` that ``sampling`` wants, upright 8-bit RGB, with times from 0 s.

    ``source``: a list of pictures, taken as they are at ``sampling.fps`` (evenly thinned out above ``max_frames``); or
    a path, encoded bytes, a binary file, a data URI or a URL (when allowed) of a video file. ``reserve`` is called
    with the bytes that decoding takes, before it starts. Raises InvalidMediaError for all that is wrong with the clip.
    """
    if isinstance(source, list | tuple):
        return _from_pictures(source, limits, sampling, reserve, fetcher)
    raw, label = read_encoded(source, limits, fetcher or Fetcher(), what="video")
    file = _File(raw, _recognise(raw, label), label, _pyav())
    try:
        return _from_file(file, limits, sampling, reserve)
    except KestrelError:
        raise
    except Exception as error:  # decoders raise anything; only this clip is at fault
        raise InvalidMediaError(
            f"{label} cannot be decoded ({file.demuxer}): {str(error) or type(error).__name__}. "
            "It may be truncated or damaged; send it again or save it anew"
        ) from error


def _from_pictures(
    pictures: Sequence[Any],
    limits: MediaLimits,
    sampling: FrameSampling,
    reserve: Callable[[int], None],
    fetcher: Fetcher | None,
) -> NormalisedVideo:
    if not pictures:
        raise InvalidMediaError("the video has 0 frames. Give at least one")
    total = len(pictures)
    places = FrameSampling(fps=1.0, min_frames=1, max_frames=sampling.max_frames).indices(total, 1.0)
    images = [normalise_image(pictures[i], limits, reserve=reserve, fetcher=fetcher) for i in places]
    frames = tuple(image.pixels for image in images)
    _check_equal("the list of frames", frames)
    warnings = dict.fromkeys(note for image in images for note in image.warnings)
    return NormalisedVideo(
        item=_item(frames, [i / sampling.fps for i in places], total), warnings=tuple(warnings)
    )


@dataclass(frozen=True, slots=True)
class _File:
    """An encoded clip. PyAV's objects are ``Any``: its type stubs change between releases."""

    raw: bytes
    demuxer: str
    label: str
    av: Any

    @contextmanager
    def track(self) -> Iterator[tuple[Any, Any]]:
        """The open container and its first track of pictures."""
        with self.av.open(
            io.BytesIO(self.raw), mode="r", format=self.demuxer, metadata_errors="ignore"
        ) as container:
            if not container.streams.video:
                raise InvalidMediaError(
                    f"{self.label} has no track of pictures: it is cut off, or holds sound alone. Give a whole video"
                )
            yield container, container.streams.video[0]

    def frames(self) -> Iterator[Any]:
        """Frames in the order in which they are shown; what is damaged is left out."""
        with self.track() as (container, stream):
            for packet in container.demux(stream):
                try:
                    yield from packet.decode()
                except self.av.error.InvalidDataError:
                    continue


def _from_file(
    file: _File, limits: MediaLimits, sampling: FrameSampling, reserve: Callable[[int], None]
) -> NormalisedVideo:
    total, rate, frame_bytes = _counted(file, limits)
    wanted = sampling.indices(total, rate)
    reserve(len(wanted) * frame_bytes)
    frames, times, shown = _picked(file, wanted, rate)
    notes: tuple[str, ...] = ()
    if len(frames) < len(wanted):  # damaged, or of a codec with frames that are not shown
        notes = (f"{file.label}: {total - shown} of its {total} frames cannot be decoded or are not shown",)
        frames, times, _ = _picked(file, sampling.indices(shown, rate), rate)
    if not frames:
        raise InvalidMediaError(f"{file.label} has 0 frames that can be decoded. Give a complete video")
    _check_equal(file.label, frames)
    return NormalisedVideo(item=_item(tuple(frames), times, shown), warnings=notes)


def _counted(file: _File, limits: MediaLimits) -> tuple[int, float, int]:
    """Frames of the clip, frames per second, and bytes of one frame, without decoding."""
    with file.track() as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > limits.max_image_pixels:
            raise InvalidMediaError(
                f"{file.label} is {width} × {height} = {width * height} pixels; max_image_pixels is "
                f"{limits.max_image_pixels}. Scale it down or raise the limit"
            )
        total = sum(packet.size > 0 for packet in container.demux(stream))
        rate = float(stream.average_rate or stream.guessed_rate or 0) or _USUAL_RATE
    if not total:
        raise InvalidMediaError(f"{file.label} has 0 frames. Give a complete video")
    return total, rate, width * height * 3


def _picked(file: _File, wanted: Sequence[int], rate: float) -> tuple[list[Frame], list[float], int]:
    """The frames at ``wanted`` (ascending) with their times from 0 s, and how many frames were seen."""
    frames: list[Frame] = []
    times: list[float] = []
    start, seen = 0.0, 0
    for frame in file.frames():
        time = seen / rate if frame.time is None else float(frame.time)
        start = time if not seen else start
        if len(frames) < len(wanted) and seen == wanted[len(frames)]:
            frames.append(_upright(frame))
            times.append(time - start)
        seen += 1
        if len(frames) == len(wanted):
            break
    return frames, times, seen


def _upright(frame: Any) -> Frame:
    """``frame`` [H, W, 3] as it is meant to be seen."""
    turns = round(frame.rotation / 90) % 4  # counter-clockwise
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))


def _item(frames: tuple[Frame, ...], times_s: Sequence[float], total: int) -> VideoItem:
    height, width = frames[0].shape[:2]
    meta = {"width": width, "height": height, "frames": total}
    return VideoItem(frames=frames, times_s=tuple(times_s), meta=meta)


def _check_equal(label: str, frames: Sequence[Frame]) -> None:
    for place, frame in enumerate(frames):
        if frame.shape != frames[0].shape:
            sizes = [f"{f.shape[1]} × {f.shape[0]}" for f in (frames[0], frame)]
            raise InvalidMediaError(
                f"{label}: frame 0 is {sizes[0]} and frame {place} is {sizes[1]}. Give frames of one size"
            )


def _recognise(raw: bytes, label: str) -> str:
    for magic, demuxer in _DEMUXERS.items():
        if len(raw) >= len(magic) and all(m in (r, ord(".")) for m, r in zip(magic, raw, strict=False)):
            return demuxer
    raise InvalidMediaError(f"{label} is not a video: {describe(raw)}. Supported: {SUPPORTED}")


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise InvalidMediaError(
            "decoding a video needs PyAV, which is not installed. Run: pip install 'kestrel-core[video]' "
            "(or give a list of pictures)"
        ) from error
    return av
