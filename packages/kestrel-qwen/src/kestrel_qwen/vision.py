"""The vision tower: a transformer over the patches of each picture at its own size, then 2 × 2 patches merged into one.

Differs from the textbook ViT: a patch spans two frames; learned positions are sampled from a square table at the
picture's own grid; rotary embedding turns heads by row and column. Attention stays inside one temporal slice.
Patches come block by merged block: (block row, block column, row in block, column in block).

Letters: N patches of all items, C width of the tower, H heads, D head dim, G side of the table of positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kestrel.layers import MLP, AddNorm, Angles, Linear, Rope, VisionAttention
from kestrel.spi import OpTableLike
from kestrel_qwen.config import VisionConfig

__all__ = ["Grid", "VisionTower", "patch_positions"]

Grid = tuple[int, int, int]  # temporal slices, rows and columns of patches
EPS = 1e-6


class SelfAttention(nn.Module):
    """Every patch sees every patch of its slice."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        dim, self.heads = config.hidden_size, config.heads
        self.qkv = Linear(ops, dim, 3 * dim, dtype=dtype)
        self.proj = Linear(ops, dim, dim, dtype=dtype)
        self.attend = VisionAttention(ops, self.heads, config.head_dim, dtype=dtype)

    def forward(
        self,
        h_NC: torch.Tensor,
        rope: Rope,
        angles: Angles,
        slices: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        q, k, v = self.qkv(h_NC).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = rope.rotate(q, angles), rope.rotate(k, angles)
        outs, start = [], 0
        for count, size in slices:
            mine = slice(start, start + count * size)
            start = mine.stop
            outs.append(self.attend(*(x[mine].unflatten(0, (count, size)) for x in (q, k, v))).flatten(0, 1))
        out: torch.Tensor = self.proj(torch.cat(outs).flatten(1))
        return out


class VisionBlock(nn.Module):
    """Pre-norm attention, then pre-norm MLP. What either adds to the stream is added by the norm behind it."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.hidden_size
        self.norm1 = AddNorm(ops, dim, EPS, kind="layer", dtype=dtype)
        self.attn = SelfAttention(config, ops, dtype)
        self.norm2 = AddNorm(ops, dim, EPS, kind="layer", dtype=dtype)
        self.mlp = MLP(ops, dim, config.intermediate_size, dtype=dtype)

    def forward(
        self,
        x_NC: torch.Tensor,
        delta_NC: torch.Tensor | None,
        rope: Rope,
        angles: Angles,
        slices: Sequence[tuple[int, int]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream and what is to be added to it; ``delta_NC``: what the block before left to add."""
        x_NC, h_NC = self.norm1(x_NC, delta_NC)
        x_NC, h_NC = self.norm2(x_NC, self.attn(h_NC, rope, angles, slices))
        return x_NC, self.mlp(h_NC)


class PatchMerger(nn.Module):
    """The patches of a block side by side, mapped to the decoder's width."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = config.spatial_merge_size**2
        wide = config.hidden_size * self.block
        self.norm = AddNorm(ops, config.hidden_size, EPS, kind="layer", dtype=dtype)
        self.mlp = MLP(ops, wide, wide, out=config.out_hidden_size, activation="gelu", dtype=dtype)

    def forward(self, x_NC: torch.Tensor, delta_NC: torch.Tensor | None) -> torch.Tensor:
        """Of ``x_NC`` and what is still to be added to it."""
        _, h_NC = self.norm(x_NC, delta_NC)
        return self.mlp(h_NC.view(len(h_NC) // self.block, -1))


class VisionTower(nn.Module):
    """Patches to the embeddings of pictures and clips."""

    def __init__(self, config: VisionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = Linear(ops, config.patch_values, config.hidden_size, dtype=dtype)
        self.pos_embed = nn.Parameter(
            torch.empty(config.num_position_embeddings, config.hidden_size, dtype=dtype), requires_grad=False
        )
        self.blocks = nn.ModuleList(VisionBlock(config, ops, dtype) for _ in range(config.depth))
        self.merger = PatchMerger(config, ops, dtype)
        quarter = config.head_dim // 4
        steps = torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter
        inv_freq = (config.rope_theta**-steps).to(torch.float32)
        self.rope = Rope(
            ops, config.head_dim, inv_freq=inv_freq.repeat(2), rows=[0] * quarter + [1] * quarter, dtype=dtype
        )

    def forward(self, patches_NP: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Embeddings [N / 4, out_hidden_size] of items whose patches [N, C · T · p · p], −1 … 1, follow each other."""
        merge, device = self.config.spatial_merge_size, patches_NP.device
        x_NC = self.patch_embed(patches_NP.to(self.pos_embed.dtype))
        places = [patch_positions(grid, merge, device) for grid in grids]
        learned = [self._learned(grid, place) for grid, place in zip(grids, places, strict=True)]
        x_NC = x_NC + torch.cat(learned).to(x_NC.dtype)
        angles = self.rope(torch.cat(places, dim=1))
        slices = _slices(grids)
        delta_NC = None
        for block in self.blocks:
            x_NC, delta_NC = block(x_NC, delta_NC, self.rope, angles, slices)
        return self.merger(x_NC, delta_NC)

    def _learned(self, grid: Grid, place_2N: torch.Tensor) -> torch.Tensor:
        """Positions [N, C] at the rows and columns of ``place_2N``: the table, its corners on the grid's, sampled."""
        side = self.config.grid_side
        low, high, share = [], [], []
        for at, size in zip(place_2N, grid[1:], strict=True):
            points = torch.linspace(0, side - 1, size, dtype=torch.float32, device=at.device)[at]
            floor = points.floor()
            low.append(floor.long())
            high.append((low[-1] + 1).clamp(max=side - 1))
            share.append((points - floor).unsqueeze(1))
        (top, left), (bottom, right), (down, across) = low, high, share
        table = self.pos_embed.float()
        above = table[top * side + left] * (1 - across) + table[top * side + right] * across
        below = table[bottom * side + left] * (1 - across) + table[bottom * side + right] * across
        return above * (1 - down) + below * down


def patch_positions(grid: Grid, merge: int, device: torch.device | None = None) -> torch.Tensor:
    """Row and column of each patch, int64 [2, t · h · w], in the order of merged blocks; the same for every slice."""
    slices, rows, columns = grid
    row = torch.arange(rows, device=device).view(-1, 1, merge, 1).expand(-1, columns // merge, -1, merge)
    column = torch.arange(columns, device=device).view(1, -1, 1, merge).expand(rows // merge, -1, merge, -1)
    return torch.stack((row.flatten(), column.flatten())).repeat(1, slices)


def _slices(grids: Sequence[Grid]) -> list[tuple[int, int]]:
    """Runs of slices with equally many patches: (slices, patches of each), attended to in one call."""
    runs: list[tuple[int, int]] = []
    for count, rows, columns in grids:
        size = rows * columns
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + count, size)
        else:
            runs.append((count, size))
    return runs
