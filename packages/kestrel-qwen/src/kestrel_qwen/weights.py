"""Fills ``QwenModel`` from a checkpoint: released or ``save_pretrained`` names, experts fused or one by one, FP8."""

from __future__ import annotations

from functools import partial

import torch

from kestrel.layers import pack_weights
from kestrel.loading import load_weights
from kestrel.spi import WeightReader
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.fp8 import EIGHT_BITS, PUBLISHED_BLOCK, BlockFloats, is_kept
from kestrel_qwen.model import QwenModel
from kestrel_qwen.names import IGNORED, parameter_name

__all__ = ["load"]

TRANSFORMS = {
    "visual.patch_embed.weight": partial(
        torch.flatten, start_dim=1
    ),  # a convolution whose stride is its size
    "*.linear_attn.conv1d": partial(torch.squeeze, dim=1),  # depthwise: [channels, 1, taps]
    "*.experts.gate_up_proj": partial(torch.flatten, start_dim=0, end_dim=1),
    "*.experts.down_proj": partial(torch.flatten, start_dim=0, end_dim=1),
    "*.experts.gate_up_proj_scale_inv": partial(torch.flatten, start_dim=0, end_dim=1),
    "*.experts.down_proj_scale_inv": partial(torch.flatten, start_dim=0, end_dim=1),
}
# Released in float32 beside bfloat16 weights: a decay's rounding error grows with the length of the text.
FLOAT32 = {
    "*.linear_attn.A_log": torch.float32, "*.linear_attn.norm": torch.float32, "*_scale_inv": torch.float32,
}  # fmt: skip


def load(
    model: QwenModel,
    config: QwenConfig,
    reader: WeightReader,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scaled: bool = False,
) -> None:
    """Fill ``model``. LoadError unless every tensor has its place and shape, and every place its tensor. ``scaled``: as
    the model was built with."""
    if any(info.dtype in EIGHT_BITS for info in reader.tensors.values()):
        kept = [name for name in reader.tensors if scaled and is_kept(name)]
        reader = BlockFloats(reader, config.quantised_block or PUBLISHED_BLOCK, kept)
    load_weights(
        model,
        reader,
        device=device,
        dtype=dtype,
        rename=partial(parameter_name, scaled=scaled),
        ignore=IGNORED,
        transforms=TRANSFORMS,
        tied={"lm_head.weight": "language_model.embed_tokens.weight"} if config.tied else {},
        dtypes=FLOAT32,
    )
    pack_weights(model)
