"""The vision encoder: a SigLIP-style transformer over crops, their features stitched, pooled and projected.

Differs from the textbook ViT: every crop is encoded on its own; the local ones overlap, so that each patch of the
stitched map has seen its surroundings; an image ends as the features of its global crop beside the pooled map.

Letters: N crops, I images, S patches of a crop, G = √S, C width of the encoder, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from kestrel.layers import MLP, LayerNorm, Linear, Stored, VisionAttention, multiplies_in_8_bits
from kestrel.spi import OpTableLike
from kestrel_moondream.config import VisionConfig
from kestrel_moondream.eight_bits import EightBits
from kestrel_moondream.pooling import Pooling

__all__ = ["VisionEncoder"]

EPS = 1e-5  # of every norm
ALIGNED = 8  # numbers of 16 bits in a wide read: products are far slower over rows that begin between two


class PatchEmbedding(Stored):
    """Pixels to embeddings: a product over the pixels −1 … 1 of each patch, by channel, row and column.

    With pixels p of 0 … 255 it is computed over p − 128, which is exact in 16 bits, and over rows that are filled up:
    w · ((p / 255 − ½) / ½) + b = (w / 127.5) · (p − 128) + ½ Σ (w / 127.5) + b.
    """

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, values = config.enc_patch_size, config.in_channels * config.enc_patch_size**2
        self.weight = nn.Parameter(torch.empty(config.enc_dim, values, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(config.enc_dim, dtype=dtype), requires_grad=False)
        filled = -(-values // ALIGNED) * ALIGNED
        self._product = [
            Linear(ops, filled, config.enc_dim, dtype=dtype)
        ]  # listed: no checkpoint holds its weights

    def pack(self) -> None:
        """Make the product's weights, of those that were loaded."""
        product, weight = self._product[0], self.weight.float() / 127.5
        bias = self.bias.float() + weight.sum(1) / 2
        filled = F.pad(weight, (0, product.in_features - weight.shape[1]))
        product.weight = nn.Parameter(filled.to(self.weight.dtype), requires_grad=False)
        product.bias = nn.Parameter(bias.to(self.bias.dtype), requires_grad=False)
        product.pack()

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """[N, S, C] of crops [N, G·p, G·p, 3] uint8; patches row by row."""
        product, size, values = self._product[0], self.size, self.weight.shape[1]
        pixels = (crops ^ 128).view(torch.int8)  # p − 128
        tiles = pixels.unflatten(2, (-1, size)).unflatten(1, (-1, size)).permute(0, 1, 3, 5, 2, 4)
        count, high, wide, channels = tiles.shape[:4]
        patches = self.weight.new_zeros(count, high, wide, product.in_features)
        patches[..., :values].unflatten(-1, (channels, size, size)).copy_(tiles)
        out: torch.Tensor = product(patches.flatten(1, 2))
        return out


class VisionSelfAttention(nn.Module):
    """Every patch sees every patch of its crop."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        dim, self.heads = config.enc_dim, config.enc_n_heads
        self.qkv = Linear(ops, dim, 3 * dim, dtype=dtype)
        self.proj = Linear(ops, dim, dim, epilogue="accumulate", adds_bias=False, dtype=dtype)
        self.attend = VisionAttention(ops, self.heads, dim // self.heads, dtype=dtype)

    def forward(self, h_NSC: torch.Tensor, x_NSC: torch.Tensor) -> torch.Tensor:
        """``x_NSC`` with the output, but for its bias, added in place."""
        out: torch.Tensor = self.proj(self.attended(self.qkv(h_NSC)), x_NSC)
        return out

    def attended(self, qkv: torch.Tensor) -> torch.Tensor:
        """What ``proj`` gets [N, S, C], of what ``qkv`` made."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)
        out: torch.Tensor = self.attend(q, k, v)
        return out.flatten(2)


class VisionBlock(Stored):
    """x + attn(ln x), then x + mlp(ln x), in place. The biases of both sums are left out of x: the norms add them."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.ln1 = LayerNorm(ops, config.enc_dim, EPS, offset=True, dtype=dtype)
        self.attn = VisionSelfAttention(config, ops, dtype)
        self.ln2 = LayerNorm(ops, config.enc_dim, EPS, offset=True, dtype=dtype)
        self.mlp = MLP(ops, config.enc_dim, config.enc_ff_dim, accumulate=True, adds_bias=False, dtype=dtype)
        self._eight: EightBits | None = None
        if multiplies_in_8_bits(ops):
            self._eight = EightBits(
                ops, [self.ln1, self.ln2], self.attn.qkv, self.attn.proj, self.mlp,
                values=config.enc_dim, offset=True, adds_biases=False,
            )  # fmt: skip

    def pack(self) -> None:
        """Make the weights of 8 bits, of those that were loaded."""
        if self._eight is not None:
            self._eight.fill()

    @property
    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What x lacks after either sum, [C] float32."""
        first, second = self.attn.proj.bias, self.mlp.fc2.bias
        assert first is not None
        assert second is not None
        return first.float(), second.float()

    def forward(self, x_NSC: torch.Tensor, before_C: torch.Tensor, between_C: torch.Tensor) -> torch.Tensor:
        """``before_C`` is what x lacks so far, ``between_C`` what it lacks after the first sum."""
        x_NSC = self.attn(self.ln1(x_NSC, before_C), x_NSC)
        out: torch.Tensor = self.mlp(self.ln2(x_NSC, between_C), x_NSC)
        return out

    def in_8_bits(
        self,
        x_NSC: torch.Tensor,
        delta_NSC: torch.Tensor | None,
        before_C: torch.Tensor,
        between_C: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``forward`` of x + delta, but the last sum is left to what follows: x, and what to add to it."""
        eight = self._eight
        assert eight is not None
        x_NSC, values = eight.norms[0](x_NSC, delta_NSC, before_C)
        attended = eight.attended(self.attn.attended(eight.qkv(values)))
        x_NSC, values = eight.norms[1](x_NSC, eight.proj(attended), between_C)
        return x_NSC, eight.mlp(values)


class VisionEncoder(Stored):
    """Crops to the embeddings of an image."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype, self._in_8_bits = config, dtype, multiplies_in_8_bits(ops)
        self.patch_emb = PatchEmbedding(config, ops, dtype)
        self.pos_emb = nn.Parameter(
            torch.empty(1, config.num_positions, config.enc_dim, dtype=dtype), requires_grad=False
        )
        self.blocks = nn.ModuleList(VisionBlock(config, ops, dtype) for _ in range(config.enc_n_layers))
        self.post_ln = LayerNorm(ops, config.enc_dim, EPS, offset=True, dtype=dtype)
        self._lacks: Sequence[torch.Tensor] = ()
        self._pool = Pooling(config.grid, config.overlap_margin)
        self.proj_mlp = MLP(
            ops, 2 * config.enc_dim, config.proj_inner_dim, out=config.proj_out_dim, dtype=dtype
        )

    def pack(self) -> None:
        """Sum up the biases that each norm adds, of those that were loaded."""
        biases = [bias for block in self.blocks for bias in block.biases]
        self._lacks = list(torch.stack([torch.zeros_like(biases[0]), *biases]).cumsum(0))

    def forward(self, crops: torch.Tensor, tilings: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Embeddings [I, S, proj_out_dim] of images whose ``crops`` [N, G·p, G·p, 3] uint8 lie one after the other.

        An image of ``tilings`` r × c has its global crop and r · c local ones; of 1 × 1, the global crop alone.
        """
        features_NSC = self.encode(crops)
        pairs, start = [], 0
        for rows, columns in tilings:
            count = 1 if rows * columns == 1 else 1 + rows * columns
            pairs.append(self._pair(features_NSC[start : start + count], rows, columns))
            start += count
        return self.proj_mlp(torch.stack(pairs))

    def encode(self, crops: torch.Tensor) -> torch.Tensor:
        """Features [N, S, C] of crops, each on its own."""
        x_NSC = self.patch_emb(crops) + self.pos_emb
        lacks = list(zip(self._lacks[::2], self._lacks[1::2], strict=False))
        if self._in_8_bits:
            delta_NSC: torch.Tensor | None = None
            for block, lack in zip(self.blocks, lacks, strict=True):
                x_NSC, delta_NSC = block.in_8_bits(x_NSC, delta_NSC, *lack)
            x_NSC = x_NSC if delta_NSC is None else x_NSC.add_(delta_NSC)
        else:
            for block, lack in zip(self.blocks, lacks, strict=True):
                x_NSC = block(x_NSC, *lack)
        features_NSC: torch.Tensor = self.post_ln(x_NSC, self._lacks[-1])
        return features_NSC

    def _pair(self, features_NSC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[S, 2C]: the global crop's features beside those of the stitched and pooled local crops."""
        whole_SC = features_NSC[0]
        if (
            rows * columns == 1
        ):  # its local crop is the global one again; pooling G × G to G × G changes nothing
            return torch.cat([whole_SC, whole_SC], dim=-1)
        pooled_SC = self._pool(features_NSC[1:], rows, columns)
        return torch.cat([whole_SC, pooled_SC], dim=-1)
