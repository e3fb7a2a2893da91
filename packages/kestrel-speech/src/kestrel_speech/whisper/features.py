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
from kestrel.spi import AudioItem
from kestrel.types import Prepared
from kestrel_speech.mel import mel_filters
from kestrel_speech.whisper.config import WhisperConfig

__all__ = ["AUDIO", "FRAMES_PER_SECOND", "HOP", "SAMPLE_RATE", "log_mel", "prepare_audio"]

AUDIO = "audio"
SAMPLE_RATE = 16_000
N_FFT, HOP = 400, 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
FLOOR = 1e-10  # of a power, before its logarithm
RANGE = 8.0  # decades below the loudest of the window that are kept
VERSION = b"kestrel-speech/whisper/2"  # raised when preparation changes what the encoder sees


def prepare_audio(item: AudioItem, config: WhisperConfig) -> Prepared:
    """The features of a window. InvalidMediaError for what is no mono 16 kHz clip of at most one window."""
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
    features_MF = log_mel(samples, config.num_mels, config.num_frames)
    digest = hashlib.sha256(VERSION + repr(tuple(features_MF.shape)).encode())
    digest.update(features_MF.numpy().tobytes())
    return Prepared(
        kind=AUDIO,
        digest=digest.digest(),
        num_positions=0,
        tensors={"features": features_MF},
        meta={"duration_seconds": len(samples) / SAMPLE_RATE},
        cross_positions=config.audio_context,
    )


def log_mel(samples: NDArray[np.float32], num_mels: int, num_frames: int) -> torch.Tensor:
    """Features [M, F] float32 of ``samples``, at most F frames of them.

    Hann windows of 25 ms every 10 ms, centred, the edges reflected, silence behind the end; power, mel, decades. What
    lies more than eight decades below the loudest value is raised to there; then (x + 4) / 4. Frames that begin behind
    the last whole one of the sound are 0, neither loud nor silent: openai-whisper and faster-whisper pad the features
    of a short window so, and transcripts of real speech differ where they are silence instead.
    """
    padded = torch.zeros(num_frames * HOP)
    padded[: len(samples)] = torch.from_numpy(np.ascontiguousarray(samples))
    spectrum = torch.stft(
        padded, N_FFT, HOP, window=_hann(), center=True, pad_mode="reflect", return_complex=True
    )
    power = spectrum.real[:, :-1].square() + spectrum.imag[:, :-1].square()
    decades = (_filters(num_mels) @ power).clamp_(min=FLOOR).log10_()
    features = decades.clamp_(min=decades.max() - RANGE).add_(4.0).div_(4.0)
    features[:, len(samples) // HOP :] = 0.0
    return features


@lru_cache(maxsize=1)
def _hann() -> torch.Tensor:
    return torch.hann_window(N_FFT, device="cpu")


@lru_cache(maxsize=4)
def _filters(num_mels: int) -> torch.Tensor:
    return torch.from_numpy(mel_filters(num_mels, N_FFT).copy())
