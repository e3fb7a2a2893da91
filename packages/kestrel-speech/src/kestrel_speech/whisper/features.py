"""PCM to Whisper's log-mel features. Behind the end of the sound they are 0, as in the original's last window.

Letters: F frames of a window, M mel bins.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.errors import InvalidMediaError
from kestrel.ops.log_mel import log_mel as reference
from kestrel.spi import AudioItem, OpCall, OpQuery
from kestrel.types import Prepared
from kestrel_speech.mel import mel_filters
from kestrel_speech.whisper.config import WhisperConfig

__all__ = [
    "AUDIO", "FRAMES_PER_SECOND", "HOP", "SAMPLE_RATE", "log_mel", "log_mels", "prepare_audio", "query_of",
]  # fmt: skip

AUDIO = "audio"
SAMPLE_RATE = 16_000
N_FFT, HOP = 400, 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
VERSION = b"kestrel-speech/whisper/2"  # raised when preparation changes what the encoder sees


def prepare_audio(
    item: AudioItem, config: WhisperConfig, *, by_device: bool = False, call: OpCall = reference
) -> Prepared:
    """The features of a window by ``call`` (see ``log_mels``), or with ``by_device`` the sound that a device makes them
    of.

    InvalidMediaError for what is no mono 16 kHz clip of at most one window.
    """
    samples, longest = item.samples, config.num_frames * HOP
    if item.sample_rate != SAMPLE_RATE or samples.ndim != 1 or samples.dtype != np.float32:
        raise InvalidMediaError(
            f"a clip of {samples.dtype} {samples.shape} at {item.sample_rate} Hz; Whisper takes mono float32 at "
            f"{SAMPLE_RATE} Hz. Resample it."
        )
    if not 0 < len(samples) <= longest:
        raise InvalidMediaError(
            f"a clip of {len(samples) / SAMPLE_RATE:g} s; one window of Whisper takes more than 0 and at most "
            f"{longest / SAMPLE_RATE:g} s. Use transcribe, which cuts longer audio."
        )
    shape = (config.num_mels, config.num_frames)
    if by_device:
        tensors = {"sound": _padded(samples, config.num_frames)[None], "frames": _whole_frames(samples)}
        content: NDArray[np.float32] = np.ascontiguousarray(samples)
    else:
        tensors = {"features": log_mel(samples, *shape, call)[None]}
        content = tensors["features"].numpy()
    digest = hashlib.sha256(VERSION + repr((tuple(tensors), shape, len(samples))).encode())
    digest.update(content)
    return Prepared(
        kind=AUDIO,
        digest=digest.digest(),
        num_positions=0,
        tensors=tensors,
        meta={"duration_seconds": len(samples) / SAMPLE_RATE},
        cross_positions=config.audio_context,
    )


def log_mel(
    samples: NDArray[np.float32], num_mels: int, num_frames: int, call: OpCall = reference
) -> torch.Tensor:
    """Features [M, F] float32 of ``samples``, at most F frames of them, as ``log_mels`` says."""
    return log_mels(_padded(samples, num_frames)[None], _whole_frames(samples), num_mels, call)[0]


def log_mels(
    sound_NS: torch.Tensor, frames_N: torch.Tensor, num_mels: int, call: OpCall = reference
) -> torch.Tensor:
    """Features [N, M, F] float32 of windows of sound [N, F · HOP], of whose frames the first ``frames_N`` count, by
    ``call``, a provider of ``ops.log_mel``.

    Frames that begin behind the last whole one of the sound are 0: openai-whisper and faster-whisper pad the features
    of a short window so, and transcripts of real speech differ where they are silence instead.
    """
    features: torch.Tensor = call(sound_NS, frames_N, _filters(num_mels, sound_NS.device), HOP)
    return features


def query_of(num_mels: int) -> OpQuery:
    """What a provider is asked for."""
    return OpQuery.of("log_mel", bands=num_mels, size=N_FFT, hop=HOP, dtype="float32")


def _padded(samples: NDArray[np.float32], num_frames: int) -> torch.Tensor:
    is_whole = len(samples) == num_frames * HOP
    if is_whole and samples.flags.writeable:  # torch warns of memory that it may not write to
        return torch.from_numpy(np.ascontiguousarray(samples))
    padded = np.empty(num_frames * HOP, dtype=np.float32)
    padded[: len(samples)] = samples
    padded[len(samples) :] = 0.0
    return torch.from_numpy(padded)


def _whole_frames(samples: NDArray[np.float32]) -> torch.Tensor:
    return torch.tensor([len(samples) // HOP])


@lru_cache(maxsize=4)
def _filters(num_mels: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(mel_filters(num_mels, N_FFT).copy()).to(device)
