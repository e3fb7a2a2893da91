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

from kestrel.layers import MLP, AddNorm, Linear, VisionAttention
from kestrel.spi import OpTableLike
from kestrel_moondream.config import VisionConfig

__all__ = ["VisionEncoder", "stitch"]

EPS = 1e-5  # of every norm

EPS = 1e-5  # of every norm


class VisionSelfAttention(nn.Module):
    """Every patch sees every patch of its crop."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        dim, self.heads = config.enc_dim, config.enc_n_heads
        self.qkv = Linear(ops, dim, 3 * dim, dtype=dtype)
        self.proj = Linear(ops, dim, dim, dtype=dtype)
        self.attend = VisionAttention(ops, self.heads, dim // self.heads, dtype=dtype)

    def forward(self, h_NSC: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(h_NSC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out: torch.Tensor = self.proj(self.attend(q, k, v).flatten(2))
        return out


class VisionBlock(nn.Module):
    """x + attn(ln x), then x + mlp(ln x). ``delta`` is what the part before has yet to add to x."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.ln1 = AddNorm(ops, config.enc_dim, EPS, kind="layer", dtype=dtype)
        self.attn = VisionSelfAttention(config, ops, dtype)
        self.ln2 = AddNorm(ops, config.enc_dim, EPS, kind="layer", dtype=dtype)
        self.mlp = MLP(ops, config.enc_dim, config.enc_ff_dim, dtype=dtype)

    def forward(
        self, x_NSC: torch.Tensor, delta_NSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_NSC, h_NSC = self.ln1(x_NSC, delta_NSC)
        x_NSC, h_NSC = self.ln2(x_NSC, self.attn(h_NSC))
        return x_NSC, self.mlp(h_NSC)


class VisionEncoder(nn.Module):
    """Crops to the embeddings of an image."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        patch_values = config.in_channels * config.enc_patch_size**2
        self.patch_emb = Linear(ops, patch_values, config.enc_dim, dtype=dtype)
        self.pos_emb = nn.Parameter(
            torch.empty(1, config.num_positions, config.enc_dim, dtype=dtype), requires_grad=False
        )
        self.blocks = nn.ModuleList(VisionBlock(config, ops, dtype) for _ in range(config.enc_n_layers))
        self.post_ln = AddNorm(ops, config.enc_dim, EPS, kind="layer", dtype=dtype)
        self.proj_mlp = MLP(
            ops, 2 * config.enc_dim, config.proj_inner_dim, out=config.proj_out_dim, dtype=dtype
        )

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
        x_NSC = self.patch_emb(self.patches(crops)) + self.pos_emb
        delta_NSC = None
        for block in self.blocks:
            x_NSC, delta_NSC = block(x_NSC, delta_NSC)
        features_NSC: torch.Tensor = self.post_ln(x_NSC, delta_NSC)[1]
        return features_NSC

    def patches(self, crops: torch.Tensor) -> torch.Tensor:
        """Pixels −1 … 1 of each patch, [N, S, channel · row · column]; patches row by row."""
        size = self.config.enc_patch_size
        pixels = (crops.to(self.dtype) / 255 - 0.5) / 0.5
        tiles = pixels.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # [N, G, p, G, p, 3]
        return tiles.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)

    def _pair(self, features_NSC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[S, 2C]: the global crop's features beside those of the stitched and pooled local crops."""
        whole_SC = features_NSC[0]
        if (
            rows * columns == 1
        ):  # its local crop is the global one again; pooling G × G to G × G changes nothing
            return torch.cat([whole_SC, whole_SC], dim=-1)
        grid = self.config.grid
        local = features_NSC[1:].unflatten(1, (grid, grid)).unflatten(0, (rows, columns))
        stitched_CHW = stitch(local, self.config.overlap_margin).permute(2, 0, 1)
        pooled_CGG = F.adaptive_avg_pool2d(stitched_CHW.float(), grid).to(whole_SC.dtype)
        return torch.cat([whole_SC, pooled_CGG.flatten(1).T], dim=-1)


def stitch(tiles: torch.Tensor, margin: int) -> torch.Tensor:
    """One map [height, width, C] of ``tiles`` [rows, columns, G, G, C]; edges between tiles lose ``margin`` patches."""
    bands = [
        torch.cat([_kept(tile, j, len(row), margin, 1) for j, tile in enumerate(row)], 1) for row in tiles
    ]
    return torch.cat([_kept(band, i, len(bands), margin, 0) for i, band in enumerate(bands)], 0)


def _kept(tile: torch.Tensor, index: int, count: int, margin: int, dim: int) -> torch.Tensor:
    start = 0 if index == 0 else margin
    end = tile.shape[dim] - (0 if index == count - 1 else margin)
    return tile.narrow(dim, start, end - start)
