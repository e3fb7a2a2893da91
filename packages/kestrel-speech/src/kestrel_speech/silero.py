"""Speech by the Silero model for 16 kHz: frames of 32 ms through an STFT, four convolutions and an LSTM.

Parameter names are those of the published safetensors file.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from kestrel.errors import LoadError
from kestrel_speech.vad import FrameModel, Samples

__all__ = ["SileroModel"]

_HOP = 512
_CONTEXT = 64  # samples of the frame before that the model sees again
_TAIL = 64  # reflected at the end
_BINS = 129
_LAUNCH = 128  # frames encoded together: 4 s

_State = tuple[torch.Tensor, torch.Tensor]


class _Network(nn.Module):
    """Waveforms [N, 64 + 512] of consecutive frames to probabilities [N]; the LSTM's state goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * _BINS, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(_BINS, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, frames: torch.Tensor, state: _State) -> tuple[torch.Tensor, _State]:
        padded = F.pad(frames, (0, _TAIL), mode="reflect").unsqueeze(1)
        spectrum = self.stft_conv(padded)
        x = (spectrum[:, :_BINS] ** 2 + spectrum[:, _BINS:] ** 2).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = layer(x).relu()
        hidden = []
        for step in x.transpose(1, 2):  # [1, 128]: one frame after the other
            state = self.lstm_cell(step, state)
            hidden.append(state[0])
        y = self.final_conv(torch.cat(hidden).relu().unsqueeze(-1))
        return y.sigmoid().reshape(-1), state


class SileroModel(FrameModel):
    """Judges 4 s at a time, on the CPU, in float32."""

    hop = _HOP

    def __init__(self, path: str | Path) -> None:
        self._network = _load(str(path))
        self._state: _State = (torch.zeros(1, 128), torch.zeros(1, 128))
        self._pending: Samples = np.zeros(_CONTEXT, np.float32)

    def push(self, samples: Samples) -> NDArray[np.float32]:
        self._pending = np.concatenate([self._pending, samples])
        size = _LAUNCH * _HOP
        found = []
        while len(self._pending) >= _CONTEXT + size:
            found.append(self._judge(self._pending[: _CONTEXT + size]))
            self._pending = self._pending[size:]
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def flush(self) -> NDArray[np.float32]:
        missing = -(len(self._pending) - _CONTEXT) % _HOP
        rest = np.pad(self._pending, (0, missing))
        self._pending = self._pending[-_CONTEXT:]
        return self._judge(rest) if len(rest) > _CONTEXT else np.zeros(0, np.float32)

    def _judge(self, samples: Samples) -> NDArray[np.float32]:
        frames = torch.from_numpy(samples.copy()).unfold(0, _CONTEXT + _HOP, _HOP)
        with torch.inference_mode():
            probabilities, self._state = self._network(frames, self._state)
        return np.asarray(probabilities.numpy(), dtype=np.float32)


@lru_cache(maxsize=2)
def _load(path: str) -> _Network:
    """The model of the file at ``path``; LoadError when it is not Silero's 16 kHz model."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise LoadError(
            f"the VAD model at {path} cannot be read: {error}. Give Silero's safetensors file"
        ) from error
    network = _Network().eval().requires_grad_(False)
    expected = network.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys())
    misshapen = [
        f"{name}: {list(tensors[name].shape)} instead of {list(expected[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name].shape
    ]
    if missing or unexpected or misshapen:
        raise LoadError(
            f"{path} is not Silero's VAD model for 16 kHz: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}, misshapen {misshapen or 'nothing'}. Give silero_vad_16k.safetensors",
            missing=missing, unexpected=unexpected, misshapen=misshapen,
        )  # fmt: skip
    network.load_state_dict(tensors)
    return network
