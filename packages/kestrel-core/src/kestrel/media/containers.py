"""Encoded audio: which container the bytes are, and PCM out of it by PyAV (FFmpeg), packet by packet.

The demuxer is chosen here, by content, and reads a file that is already open: formats that name other files or
addresses (playlists) are never tried. PyAV's objects are ``Any`` here: its type stubs change between releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from kestrel.errors import InvalidMediaError
from kestrel.media.pcm import MAX_RATE, MIN_RATE, Feed, Samples, as_float
from kestrel.media.sniff import describe

__all__ = ["ContainerFeed"]

SUPPORTED = "WAV, FLAC, MP3, Ogg (Vorbis, Opus), WebM, M4A, MP4, MOV, AAC, AIFF, AVI"

# FFmpeg's demuxer, and what people call the format. A dot stands for any byte.
_BY_MAGIC = {
    b"RIFF....WAVE": ("wav", "WAV"),
    b"RF64....WAVE": ("wav", "WAV"),
    b"BW64....WAVE": ("wav", "WAV"),
    b"RIFF....AVI ": ("avi", "AVI"),
    b"FORM....AIFF": ("aiff", "AIFF"),
    b"FORM....AIFC": ("aiff", "AIFF"),
    b"fLaC": ("flac", "FLAC"),
    b"OggS": ("ogg", "Ogg"),
    b"\x1aE\xdf\xa3": ("matroska", "WebM or Matroska"),
    b"....ftyp": ("mov", "MP4"),
    b"....moov": ("mov", "MOV"),
    b"....mdat": ("mov", "MOV"),
    b"....wide": ("mov", "MOV"),
}
_EXACT = ("wav", "aiff", "flac", "mov", "matroska")  # the length that these state is right
_HEAD = 4096

_FIRST_GAP_S = 0.01  # silence before sound that starts later than the picture
_GAP_S = 0.1  # more than codecs' priming and the rounding of time stamps
_LONGEST_GAP_S = 600.0  # beyond it the clock was reset, nothing is missing


class ContainerFeed(Feed):
    """The audio track of an encoded file. ``file`` is closed with the feed; ``label`` is how messages name it."""

    def __init__(self, file: BinaryIO, label: str) -> None:
        super().__init__()
        self._file = file
        self._label = label
        self._seconds = 0.0
        self._faults: list[Exception] = []
        demuxer, self._name, has_length = _recognise(file, label)
        self._container = self._open(demuxer)
        self._stream = self._audio_track()
        start = self._container.start_time
        self._start_s = 0.0 if start is None else start / 1e6  # in FFmpeg's AV_TIME_BASE
        self.duration_s = self._length()
        self.is_exact = has_length

    def _open(self, demuxer: str) -> Any:
        open_container = _pyav_open(self._name)
        try:
            return open_container(self._file, mode="r", format=demuxer, metadata_errors="ignore")
        except Exception as error:  # decoders raise anything; only this recording is at fault
            raise self._undecodable(error) from error

    def _audio_track(self) -> Any:
        tracks = self._container.streams
        if not tracks.audio:
            others = ", ".join(sorted({track.type for track in tracks})) or "no tracks at all"
            raise InvalidMediaError(
                f"{self._label} ({self._name}) has no audio track: it has {others}. Give a file with sound"
            )
        return tracks.audio[0]

    def _length(self) -> float | None:
        stream = self._stream
        if stream.duration is not None and stream.time_base is not None:
            return float(stream.duration * stream.time_base)
        whole = self._container.duration
        return None if whole is None else whole / 1e6

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """As ``Feed.blocks``. Damaged packets are skipped with a warning as long as there is sound beside them."""
        for packet in self._packets():
            for frame in self._decoded(packet):
                yield from self._placed(frame)
        if not self._faults:
            return
        if not self._seconds:
            raise self._undecodable(self._faults[0]) from self._faults[0]
        self.warnings.append(
            f"{self._label}: damaged or incomplete, {len(self._faults)} of its packets could not be decoded "
            f"({_reason(self._faults[0])})"
        )

    def _packets(self) -> Iterator[Any]:
        """The track's packets, as far as the container can be read; the last one is empty and flushes the decoder."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
            except Exception as error:  # as in _open
                self._faults.append(error)
                return
            if packet is None:
                return
            yield packet

    def _decoded(self, packet: Any) -> list[Any]:
        try:
            return list(packet.decode())
        except Exception as error:  # as in _open
            self._faults.append(error)
            return []

    def _placed(self, frame: Any) -> Iterator[tuple[int, Samples]]:
        """The frame, behind silence where its time stamp says that something is missing."""
        rate = frame.sample_rate
        if not MIN_RATE <= rate <= MAX_RATE:
            raise InvalidMediaError(
                f"{self._label}: its sample rate is {rate} Hz; {MIN_RATE} to {MAX_RATE} are supported. Resample it"
            )
        if not frame.samples:
            return
        late_s = 0.0 if frame.time is None else frame.time - self._start_s - self._seconds
        if (_GAP_S if self._seconds else _FIRST_GAP_S) < late_s <= _LONGEST_GAP_S:
            if self._seconds:
                self.warnings.append(
                    f"{self._label}: nothing is recorded from {self._seconds:.1f} s on for {late_s:.1f} s; "
                    "silence stands there"
                )
            yield from _silence(round(late_s * rate), rate)
            self._seconds += late_s
        self._seconds += frame.samples / rate
        yield rate, self._mono(frame)

    def _mono(self, frame: Any) -> Samples:
        values = as_float(frame.to_ndarray().reshape(-1))
        channels = frame.layout.nb_channels
        shaped = values.reshape(channels, -1) if frame.format.is_planar else values.reshape(-1, channels).T
        mono: Samples = shaped[0] if channels == 1 else shaped.mean(axis=0, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise InvalidMediaError(
                f"{self._label} holds samples that are not finite, at {self._seconds:.1f} s. Save it anew"
            )
        return mono

    def close(self) -> None:
        """Give back the decoder and the file."""
        self._container.close()
        self._file.close()

    def _undecodable(self, error: Exception) -> InvalidMediaError:
        return InvalidMediaError(
            f"{self._label} cannot be decoded ({self._name}): {_reason(error)}. "
            "It may be truncated or damaged; send it again or save it anew"
        )


def _recognise(file: BinaryIO, label: str) -> tuple[str, str, bool]:
    """Demuxer, name, and whether the file states its exact length. InvalidMediaError for what is no audio."""
    head = file.read(_HEAD)
    file.seek(0)
    for magic, (demuxer, name) in _BY_MAGIC.items():
        if len(head) >= len(magic) and all(w in (h, ord(".")) for w, h in zip(magic, head, strict=False)):
            return demuxer, name, demuxer in _EXACT
    frame = _after_id3(file, head)
    if frame[:4] == b"fLaC":
        return "flac", "FLAC", True
    if len(frame) >= 4 and frame[0] == 0xFF and frame[1] & 0xE0 == 0xE0:
        if frame[1] & 0xF6 == 0xF0:  # the layer bits of MPEG audio are 0 in AAC alone
            return "aac", "AAC", False
        return "mp3", "MP3", b"Xing" in frame[:200] or b"Info" in frame[:200]
    if head[:3] == b"ID3":
        return "mp3", "MP3", False
    raise InvalidMediaError(f"{label} is not audio: {describe(head)}. Supported: {SUPPORTED}")


def _after_id3(file: BinaryIO, head: bytes) -> bytes:
    """What follows an ID3 tag (which may be megabytes of cover art), or the head itself."""
    if head[:3] != b"ID3" or len(head) < 10:
        return head
    size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    file.seek(10 + size + (10 if head[5] & 0x10 else 0))
    frame = file.read(_HEAD)
    file.seek(0)
    return frame


def _pyav_open(name: str) -> Callable[..., Any]:
    try:
        import av
    except ImportError as error:
        raise InvalidMediaError(
            f"decoding {name} needs PyAV, which is not installed. Run: pip install 'kestrel-core[audio]' "
            "(or give raw PCM and its sample_rate)"
        ) from error
    return av.open


def _silence(num_samples: int, rate: int) -> Iterator[tuple[int, Samples]]:
    while num_samples > 0:
        size = min(num_samples, rate)
        yield rate, np.zeros(size, np.float32)
        num_samples -= size


def _reason(error: Exception) -> str:
    import av

    text = error.strerror if isinstance(error, av.error.FFmpegError | OSError) else str(error)
    return (text or str(error) or type(error).__name__).rstrip(". ")
