"""The audio encoder: two convolutions, stored sinusoids, pre-norm transformer blocks.

Differs from the textbook: keys have no bias (a row of zeros here, so that queries, keys and values are one product).

Letters: N windows, S positions of a window, F = 2·S frames, M mel bins, C width, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kestrel.layers import AddNorm, Embedding, Linear, Packed, VisionAttention
from kestrel.spi import OpTableLike
from kestrel_speech.whisper.config import WhisperConfig

__all__ = ["Encoder"]

EPS = 1e-5  # of every norm

EPS = 1e-5  # of every norm


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
        self.out_proj = Linear(ops, dim, dim, dtype=dtype)
        self.attend = VisionAttention(ops, self.heads, dim // self.heads, dtype=dtype)

    def forward(self, h_NSC: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(h_NSC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out: torch.Tensor = self.out_proj(self.attend(q, k, v).flatten(2))
        return out


class EncoderBlock(nn.Module):
    """x + attn(ln x), then x + mlp(ln x). ``delta`` is what the part before has yet to add to x."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn_layer_norm = AddNorm(ops, config.dim, EPS, kind="layer", dtype=dtype)
        self.self_attn = EncoderAttention(config, ops, dtype)
        self.final_layer_norm = AddNorm(ops, config.dim, EPS, kind="layer", dtype=dtype)
        self.fc1 = Linear(ops, config.dim, config.encoder_ffn, epilogue="gelu", dtype=dtype)
        self.fc2 = Linear(ops, config.encoder_ffn, config.dim, dtype=dtype)

    def forward(
        self, x_NSC: torch.Tensor, delta_NSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_NSC, h_NSC = self.self_attn_layer_norm(x_NSC, delta_NSC)
        x_NSC, h_NSC = self.final_layer_norm(x_NSC, self.self_attn(h_NSC))
        return x_NSC, self.fc2(self.fc1(h_NSC))


class Encoder(nn.Module):
    """Features of windows to what the decoder attends to."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.conv1 = Conv(config.num_mels, config.dim, 1, dtype)
        self.conv2 = Conv(config.dim, config.dim, 2, dtype)
        self.embed_positions = Embedding(config.audio_context, config.dim, dtype=dtype)
        self.layers = nn.ModuleList(EncoderBlock(config, ops, dtype) for _ in range(config.encoder_layers))
        self.layer_norm = AddNorm(ops, config.dim, EPS, kind="layer", dtype=dtype)

    def forward(self, features_NMF: torch.Tensor) -> torch.Tensor:
        """[N, S, C] of features [N, M, F]; each window on its own."""
        x_NCF = self.conv2(self.conv1(features_NMF.to(self.dtype)))
        x_NSC = x_NCF.transpose(1, 2) + self.embed_positions.weight
        delta_NSC = None
        for block in self.layers:
            x_NSC, delta_NSC = block(x_NSC, delta_NSC)
        encoded_NSC: torch.Tensor = self.layer_norm(x_NSC, delta_NSC)[1]
        return encoded_NSC
