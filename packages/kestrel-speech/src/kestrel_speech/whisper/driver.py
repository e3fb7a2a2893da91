"""Whisper as the token lane runs it: what it declares, how windows become tensors, the forward pass.

Letters: T tokens, N rows, S encoder positions of a window, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kestrel.errors import InvalidRequestError
from kestrel.spi import (
    AudioItem,
    Batch,
    CrossKV,
    CrossView,
    MediaItem,
    MediaSpec,
    OpTableLike,
    PagedKV,
    TextTokenizer,
    TokenDriver,
    TokenSpec,
)
from kestrel.types import Prepared
from kestrel_speech.whisper.config import WhisperConfig
from kestrel_speech.whisper.decoder import AUDIO_STATE, TEXT_STATE
from kestrel_speech.whisper.features import AUDIO, log_mels, prepare_audio, query_of
from kestrel_speech.whisper.model import WhisperModel

__all__ = ["WhisperDriver", "spec_of"]

MAX_WINDOWS = 8  # of one encoder launch: 0.5 GiB of activations in large models at float32


def spec_of(config: WhisperConfig, eot: int) -> TokenSpec:
    """What a checkpoint of ``config`` needs and makes; ``eot`` ends a text."""
    layers, heads = config.decoder_layers, config.decoder_heads
    head_dim = config.dim // heads
    return TokenSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        max_positions=config.text_context,
        eos_ids=frozenset({eot}),
        states=(
            PagedKV(name=TEXT_STATE, layers=layers, kv_heads=heads, head_dim=head_dim),
            CrossKV(
                name=AUDIO_STATE,
                layers=layers,
                kv_heads=heads,
                head_dim=head_dim,
                max_len=config.audio_context,
            ),
        ),
        media=(MediaSpec(kind=AUDIO, into="cross", max_items=1, max_cost=MAX_WINDOWS),),
    )


class WhisperDriver(TokenDriver):
    """A loaded Whisper."""

    def __init__(
        self,
        config: WhisperConfig,
        model: WhisperModel,
        tokenizer: TextTokenizer,
        device: torch.device,
        eot: int,
        ops: OpTableLike,
    ) -> None:
        self.spec = spec_of(config, eot)
        self.tokenizer = tokenizer
        self.config = config
        self.model = model
        self.device = device
        # a pool thread needs 10 ms for a window's features, a GPU 0.1
        self._by_device = device.type == "cuda"
        self._log_mel = ops.resolve(query_of(config.num_mels))

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        if isinstance(item, AudioItem):
            return prepare_audio(item, self.config, by_device=self._by_device, call=self._log_mel)
        raise InvalidRequestError(f"Whisper takes audio; it was given {item.kind!r}")

    def pack(self, kind: str, packed: Sequence[Prepared]) -> Sequence[Sequence[torch.Tensor]]:
        names = ("sound", "frames") if self._by_device else ("features",)
        return [[item.tensors[name] for item in packed] for name in names]

    def features(self, kind: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._by_device:
            sound_NS, frames_N = inputs
            windows_NMF = log_mels(sound_NS, frames_N, self.config.num_mels, self._log_mel)
        else:
            (windows_NMF,) = inputs
        if self.device.type == "cpu":  # one window fills a CPU; its activations stay in the caches
            return torch.cat([self.model.encoder(window[None])[0] for window in windows_NMF])
        encoded: torch.Tensor = self.model.encoder(windows_NMF).flatten(0, 1)
        return encoded

    def write_cross(
        self, encoded: torch.Tensor, packed: Sequence[Prepared], views: Mapping[str, CrossView]
    ) -> None:
        self.model.decoder.write_cross(encoded, [self.config.audio_context] * len(packed), views)

    def embed(self, batch: Batch) -> torch.Tensor:
        return self.model.decoder.embed(batch.ids_T, batch.positions_PT[0])

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        x_TC, _ = self.model.decoder(x_TC, batch)
        return x_TC

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        return self.model.logits(h_NC)
