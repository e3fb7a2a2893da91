"""Qwen 3.5: a decoder, its head, and (unless it is a text-only model) a vision tower."""

from __future__ import annotations

import torch
from torch import nn

from kestrel.layers import Linear
from kestrel.spi import OpTableLike
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.text import TextDecoder
from kestrel_qwen.vision import VisionTower

__all__ = ["QwenModel"]


class QwenModel(nn.Module):
    """The parts, under the names of the released layout without its ``model.``. ``scaled``: the products of the
    decoder's layers are with 8-bit floats (``layers.scaled``)."""

    def __init__(
        self,
        config: QwenConfig,
        ops: OpTableLike,
        dtype: torch.dtype,
        page_size: int,
        *,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        text = config.text
        self.visual = None if config.vision is None else VisionTower(config.vision, ops, dtype)
        self.language_model = TextDecoder(text, ops, dtype, page_size, scaled)
        self.lm_head = Linear(
            ops, text.hidden_size, text.vocab_size, bias=False, norm="rms_plus_one", dtype=dtype
        )

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states before the final norm."""
        return self.lm_head(self.language_model.norm.defer(h_NC))
