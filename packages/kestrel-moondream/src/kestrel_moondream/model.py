"""Moondream 2: a vision encoder, a text decoder, and a region module between them."""

from __future__ import annotations

import torch
from torch import nn

from kestrel.spi import OpTableLike
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.region import Region
from kestrel_moondream.text import TextDecoder
from kestrel_moondream.vision import VisionEncoder

__all__ = ["MoondreamModel"]


class MoondreamModel(nn.Module):
    """The three parts, under the names that the Hugging Face layout gives them (without its ``model.``)."""

    def __init__(self, config: MoondreamConfig, ops: OpTableLike, dtype: torch.dtype, page_size: int) -> None:
        super().__init__()
        self.vision = VisionEncoder(config.vision, ops, dtype)
        self.text = TextDecoder(config.text, ops, dtype, page_size)
        self.region = Region(config.region, ops, dtype)
