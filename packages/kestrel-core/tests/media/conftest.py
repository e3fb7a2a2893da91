"""Recordings made on the spot: a tone in any container, codec, rate and number of channels."""

import io
from collections.abc import Callable

import numpy as np
import pytest

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def tone(rate: int, seconds: float, frequency: float = 440.0) -> np.ndarray:
    """A sine of amplitude 0.5, float32."""
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def encode(
    container: str, codec: str, *, rate: int = 44100, channels: int = 2, seconds: float = 1.0,
    samples: np.ndarray | None = None, pictures: int = 0, starts_at: float = 0.0,
) -> bytes:  # fmt: skip
    """An encoded recording; ``samples`` [n] or [n, channels] instead of a tone; ``pictures``: frames of video."""
    av = pytest.importorskip("av")
    values = tone(rate, seconds) if samples is None else samples
    if values.ndim == 1:
        values = np.repeat(values[:, None], channels, axis=1)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        sound = output.add_stream(codec, rate=rate, layout=LAYOUTS[channels]) if codec else None
        if pictures:
            _add_pictures(av, output, pictures)
        if sound is not None:
            _add_sound(av, output, sound, values, round(starts_at * rate))
    return file.getvalue()


def _add_pictures(av, output, count):
    stream = output.add_stream("mpeg4", rate=25, width=32, height=32, pix_fmt="yuv420p")
    for index in range(count):
        frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), index % 256, np.uint8), format="rgb24")
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def _add_sound(av, output, stream, values, first):
    rate, layout = stream.rate, stream.layout.name
    fitted = av.AudioResampler(
        format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or None
    )
    for at in range(0, len(values), 1024):
        packed = np.ascontiguousarray(values[at : at + 1024]).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate = rate
        frame.pts = first + at
        for piece in fitted.resample(frame):
            output.mux(stream.encode(piece))
    for piece in fitted.resample(None):
        output.mux(stream.encode(piece))
    output.mux(stream.encode(None))


@pytest.fixture(scope="session")
def encoded() -> Callable[..., bytes]:
    """``encode``: a recording as bytes."""
    return encode


@pytest.fixture(scope="session")
def sine() -> Callable[..., np.ndarray]:
    """``tone``: samples of a sine."""
    return tone
