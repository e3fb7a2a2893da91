"""The audio encoder: two convolutions, stored sinusoids, pre-norm transformer blocks.

Differs from the textbook: keys have no bias (a row of zeros here, so that queries, keys and values are one product).

Letters: N windows, S positions of a window, F = 2·S frames, M mel bins, C width, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kestrel.layers import Embedding, LayerNorm, Linear, Packed, VisionAttention
from kestrel.spi import OpTableLike
from kestrel_speech.whisper.config import WhisperConfig

__all__ = ["Encoder"]


class Conv(nn.Module):
    """A convolution of width 3 over time, then GELU."""

    def __init__(self, ins: int, outs: int, stride: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(outs, ins, 3, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outs, dtype=dtype), requires_grad=False)

    def forward(self, x_NCF: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.conv1d(x_NCF, self.weight, self.bias, stride=self.stride, padding=1))


class EncoderAttention(nn.Module):
    """Every position sees every position of its window."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.encoder_heads
        self.qkv = Packed(ops, dim, {"q": dim, "k": dim, "v": dim}, dtype=dtype)
        self.out_proj = Linear(ops, dim, dim, epilogue="residual", dtype=dtype)
        self.attend = VisionAttention(ops, self.heads, dim // self.heads, dtype=dtype)

    def forward(self, h_NSC: torch.Tensor, residual_NSC: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(h_NSC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out_proj(self.attend(q, k, v).flatten(2), residual_NSC)


class EncoderBlock(nn.Module):
    """Pre-norm attention, then a pre-norm MLP."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(ops, config.dim, dtype=dtype)
        self.self_attn = EncoderAttention(config, ops, dtype)
        self.final_layer_norm = LayerNorm(ops, config.dim, dtype=dtype)
        self.fc1 = Linear(ops, config.dim, config.encoder_ffn, epilogue="gelu", dtype=dtype)
        self.fc2 = Linear(ops, config.encoder_ffn, config.dim, epilogue="residual", dtype=dtype)

    def forward(self, x_NSC: torch.Tensor) -> torch.Tensor:
        x_NSC = self.self_attn(self.self_attn_layer_norm(x_NSC), x_NSC)
        return self.fc2(self.fc1(self.final_layer_norm(x_NSC)), x_NSC)


class Encoder(nn.Module):
    """Features of windows to what the decoder attends to."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.conv1 = Conv(config.num_mels, config.dim, 1, dtype)
        self.conv2 = Conv(config.dim, config.dim, 2, dtype)
        self.embed_positions = Embedding(config.audio_context, config.dim, dtype=dtype)
        self.layers = nn.ModuleList(EncoderBlock(config, ops, dtype) for _ in range(config.encoder_layers))
        self.layer_norm = LayerNorm(ops, config.dim, dtype=dtype)

    def forward(self, features_NMF: torch.Tensor) -> torch.Tensor:
        """[N, S, C] of features [N, M, F]; each window on its own."""
        x_NCF = self.conv2(self.conv1(features_NMF.to(self.dtype)))
        x_NSC = x_NCF.transpose(1, 2) + self.embed_positions.weight
        for block in self.layers:
            x_NSC = block(x_NSC)
        return self.layer_norm(x_NSC)
