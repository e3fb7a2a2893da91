"""Whisper as one module: encoder, decoder and the head, which is the token table."""

from __future__ import annotations

import torch
from torch import nn

from kestrel.layers import Linear
from kestrel.spi import OpTableLike
from kestrel_speech.whisper.config import WhisperConfig
from kestrel_speech.whisper.decoder import Decoder
from kestrel_speech.whisper.encoder import Encoder

__all__ = ["WhisperModel"]


class WhisperModel(nn.Module):
    """Build it under ``torch.device("meta")``; ``weights.load`` fills it."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype, page_size: int) -> None:
        super().__init__()
        self.encoder = Encoder(config, ops, dtype)
        self.decoder = Decoder(config, ops, dtype, page_size)
        self.proj_out = Linear(ops, config.dim, config.vocab_size, bias=False, norm="layer", dtype=dtype)

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states before the final norm."""
        logits: torch.Tensor = self.proj_out(self.decoder.layer_norm.defer(h_NC))
        return logits
