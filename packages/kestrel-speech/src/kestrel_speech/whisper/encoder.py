"""The audio encoder: two convolutions, stored sinusoids, pre-norm transformer blocks.

Differs from the textbook: keys have no bias (a row of zeros here, so that queries, keys and values are one product).
Both convolutions are products over frames that lie one after the other, each window between two frames of zeros.

Letters: N windows, S positions of a window, F = 2·S frames, M mel bins, C width, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from kestrel.layers import Embedding, LayerNorm, Linear, Packed, Stored, VisionAttention
from kestrel.spi import OpTableLike
from kestrel_speech.whisper.config import WhisperConfig

__all__ = ["Encoder"]

EPS = 1e-5  # of every norm


class Conv(nn.Module):
    """The weights of a convolution of width 3 over time."""

    def __init__(self, ins: int, outs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outs, ins, 3, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outs, dtype=dtype), requires_grad=False)


class Frames(Conv):
    """GELU of a convolution with stride 1, of windows [N, M, F] to [N, F + 2, C]: a frame of zeros at either end."""

    def forward(self, x_NMF: torch.Tensor) -> torch.Tensor:
        count, bins, frames = x_NMF.shape
        triples = F.pad(x_NMF, (2, 2)).unfold(2, 3, 1).transpose(1, 2).reshape(-1, 3 * bins)
        x_NFC = F.gelu(F.linear(triples, self.weight.flatten(1), self.bias)).view(count, frames + 2, -1)
        x_NFC[:, 0].zero_()
        x_NFC[:, -1].zero_()
        return x_NFC


class Halved(Conv, Stored):
    """GELU of a convolution with stride 2, of what ``Frames`` gives, [N, 2 S + 2, C], to [N, S, C].

    A position's three frames are a pair, which lies in one row, and the first frame of the pair behind it: two
    products over what is there, without a copy. The last pair of a window makes a row too many.
    """

    def pack(self) -> None:
        """Lay the weights out by frames, of those that were loaded."""
        self._pair = self.weight[..., :2].transpose(1, 2).flatten(1)
        self._behind = self.weight[..., 2].contiguous()

    def forward(self, x_NFC: torch.Tensor) -> torch.Tensor:
        count, frames, dim = x_NFC.shape
        pairs = x_NFC.view(-1, 2 * dim)
        rows = F.linear(pairs, self._pair, self.bias)
        rows[:-1].addmm_(pairs[1:, :dim], self._behind.t())
        return F.gelu(rows).view(count, frames // 2, -1)[:, :-1]


class EncoderAttention(nn.Module):
    """Every position sees every position of its window."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.encoder_heads
        self.qkv = Packed(ops, dim, {"q": dim, "k": dim, "v": dim}, dtype=dtype)
        self.out_proj = Linear(ops, dim, dim, epilogue="accumulate", adds_bias=False, dtype=dtype)
        self.attend = VisionAttention(ops, self.heads, dim // self.heads, dtype=dtype)

    def forward(self, h_NSC: torch.Tensor, x_NSC: torch.Tensor) -> torch.Tensor:
        """``x_NSC`` with the output, but for its bias, added in place."""
        q, k, v = self.qkv(h_NSC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out: torch.Tensor = self.out_proj(self.attend(q, k, v).flatten(2), x_NSC)
        return out


class EncoderBlock(nn.Module):
    """x + attn(ln x), then x + mlp(ln x), in place. The biases of both sums are left out of x: the norms add them."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(ops, config.dim, EPS, offset=True, dtype=dtype)
        self.self_attn = EncoderAttention(config, ops, dtype)
        self.final_layer_norm = LayerNorm(ops, config.dim, EPS, offset=True, dtype=dtype)
        self.fc1 = Linear(ops, config.dim, config.encoder_ffn, epilogue="gelu", dtype=dtype)
        self.fc2 = Linear(
            ops, config.encoder_ffn, config.dim, epilogue="accumulate", adds_bias=False, dtype=dtype
        )

    @property
    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What x lacks after either sum, [C] float32."""
        first, second = self.self_attn.out_proj.bias, self.fc2.bias
        assert first is not None
        assert second is not None
        return first.float(), second.float()

    def forward(self, x_NSC: torch.Tensor, before_C: torch.Tensor, between_C: torch.Tensor) -> torch.Tensor:
        """``before_C`` is what x lacks so far, ``between_C`` what it lacks after the first sum."""
        x_NSC = self.self_attn(self.self_attn_layer_norm(x_NSC, before_C), x_NSC)
        out: torch.Tensor = self.fc2(self.fc1(self.final_layer_norm(x_NSC, between_C)), x_NSC)
        return out


class Encoder(Stored):
    """Features of windows to what the decoder attends to."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.conv1 = Frames(config.num_mels, config.dim, dtype)
        self.conv2 = Halved(config.dim, config.dim, dtype)
        self.embed_positions = Embedding(config.audio_context, config.dim, dtype=dtype)
        self.layers = nn.ModuleList(EncoderBlock(config, ops, dtype) for _ in range(config.encoder_layers))
        self.layer_norm = LayerNorm(ops, config.dim, EPS, offset=True, dtype=dtype)
        self._lacks: Sequence[torch.Tensor] = ()

    def pack(self) -> None:
        """Sum up the biases that each norm adds, of those that were loaded."""
        biases = [bias for block in self.layers for bias in block.biases]
        self._lacks = list(torch.stack([torch.zeros_like(biases[0]), *biases]).cumsum(0))

    def forward(self, features_NMF: torch.Tensor) -> torch.Tensor:
        """[N, S, C] of features [N, M, F]; each window on its own."""
        x_NSC = self.conv2(self.conv1(features_NMF.to(self.dtype))) + self.embed_positions.weight
        for i, block in enumerate(self.layers):
            x_NSC = block(x_NSC, *self._lacks[2 * i : 2 * i + 2])
        encoded_NSC: torch.Tensor = self.layer_norm(x_NSC, self._lacks[-1])
        return encoded_NSC
