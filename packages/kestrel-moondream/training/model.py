"""The nano model as one plain torch module: Moondream 2 mathematics, parameters named as its checkpoints name them.

Letters: B pictures, T packed task tokens, P prefix positions (BOS and image), C text width.
Training sends the prefix and all tasks through the decoder together; ``Decoder`` below answers one prompt greedily.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import layout
from .pieces import COORD, SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoConfig:
    """Sizes, in the words of Moondream's config."""

    dim: int = 256
    ff_dim: int = 1024
    n_layers: int = 6
    n_heads: int = 4
    vocab_size: int = 768
    max_context: int = 512
    rope_theta: float = 10000.0
    enc_dim: int = 192
    enc_ff_dim: int = 768
    enc_n_layers: int = 8
    enc_n_heads: int = 6
    enc_patch_size: int = 14
    crop_size: int = 196
    max_crops: int = 2
    overlap_margin: int = 2
    proj_inner_dim: int = 768
    coord_feat_dim: int = 128
    coord_out_dim: int = 256
    size_feat_dim: int = 128
    size_out_dim: int = 512
    inner_dim: int = 384

    @property
    def grid(self) -> int:
        return self.crop_size // self.enc_patch_size

    @property
    def prefix(self) -> int:
        return 1 + self.grid**2

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class MLP(nn.Module):
    def __init__(self, dim: int, inner: int, out: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return y


class Attention(nn.Module):
    """Fused projections; who sees whom is the caller's business."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values [B, heads, T, head dim]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def merge(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x.transpose(1, 2).flatten(2))
        return y


class VisionBlock(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.enc_dim), nn.LayerNorm(c.enc_dim)
        self.attn, self.mlp = Attention(c.enc_dim, c.enc_n_heads), MLP(c.enc_dim, c.enc_ff_dim, c.enc_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn.merge(F.scaled_dot_product_attention(*self.attn.split(self.ln1(x))))
        y: Tensor = x + self.mlp(self.ln2(x))
        return y


class Vision(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.config = c
        self.patch_emb = nn.Linear(3 * c.enc_patch_size**2, c.enc_dim)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, c.grid**2, c.enc_dim))
        self.blocks = nn.ModuleList([VisionBlock(c) for _ in range(c.enc_n_layers)])
        self.post_ln = nn.LayerNorm(c.enc_dim)
        self.proj_mlp = MLP(2 * c.enc_dim, c.proj_inner_dim, c.dim)

    def encode(self, crops: Tensor) -> Tensor:
        """Features [N, grid², enc_dim] of crops [N, 3, side, side] in -1..1."""
        p = self.config.enc_patch_size
        x = (
            crops.unflatten(3, (-1, p))
            .unflatten(2, (-1, p))
            .permute(0, 2, 4, 1, 3, 5)
            .flatten(3)
            .flatten(1, 2)
        )
        x = self.patch_emb(x) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.post_ln(x)
        return y

    def forward(self, crops: Tensor, tiling: tuple[int, int]) -> Tensor:
        """Image embeddings [B, grid², C] of [B, 1 + tiles, 3, side, side].

        With one tile the local crop equals the global one and may be left out: [B, 1, 3, side, side].
        """
        b, n = crops.shape[:2]
        features = self.encode(crops.flatten(0, 1)).unflatten(0, (b, n))
        local = features[:, :1] if n == 1 else features[:, 1:]
        stitched = stitch(local, tiling, self.config.grid, self.config.overlap_margin)
        pooled = F.adaptive_avg_pool2d(stitched.float(), self.config.grid).to(features.dtype)
        y: Tensor = self.proj_mlp(torch.cat([features[:, 0], pooled.flatten(2).transpose(1, 2)], -1))
        return y


def stitch(local: Tensor, tiling: tuple[int, int], grid: int, margin: int) -> Tensor:
    """One feature map [B, D, rows, columns] of tiles [B, th·tw, grid², D], margins dropped where tiles touch."""
    maps = local.transpose(2, 3).unflatten(3, (grid, grid))
    rows = []
    for i in range(tiling[0]):
        top, bottom = margin * (i > 0), grid - margin * (i < tiling[0] - 1)
        cells = []
        for j in range(tiling[1]):
            left, right = margin * (j > 0), grid - margin * (j < tiling[1] - 1)
            cells.append(maps[:, i * tiling[1] + j, :, top:bottom, left:right])
        rows.append(torch.cat(cells, -1))
    return torch.cat(rows, -2)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, head_dim / 4] for the first half of each head."""
    pairs = head_dim // 4
    frequency = theta ** (-torch.arange(pairs, device=positions.device, dtype=torch.float32) / pairs)
    angle = positions.float()[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n = cos.shape[-1]
    a, b, rest = x[..., :n].float(), x[..., n : 2 * n].float(), x[..., 2 * n :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype), rest], -1)


class TextBlock(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.prefix = c.prefix
        self.ln = nn.LayerNorm(c.dim)
        self.attn, self.mlp = Attention(c.dim, c.n_heads), MLP(c.dim, c.ff_dim, c.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """The prefix sees itself; task tokens see what ``mask`` [tasks, P + tasks] adds up to."""
        h = self.ln(x)
        q, k, v = self.attn.split(h)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        p = self.prefix
        prefix = F.scaled_dot_product_attention(q[:, :, :p], k[:, :, :p], v[:, :, :p])
        tasks = F.scaled_dot_product_attention(q[:, :, p:], k, v, attn_mask=mask)
        y: Tensor = x + self.attn.merge(torch.cat([prefix, tasks], 2)) + self.mlp(h)
        return y

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None,
             is_causal: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Hidden states of further tokens and the grown keys and values; for decoding."""
        h = self.ln(x)
        q, k, v = self.attn.split(h)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        t, total = q.shape[2], k.shape[2]
        mask = torch.ones(t, total, dtype=torch.bool, device=x.device)
        mask = mask.tril(total - t) if is_causal else mask
        y = x + self.attn.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)) + self.mlp(h)
        return y, (k, v)


class Text(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.wte = nn.Parameter(0.02 * torch.randn(c.vocab_size, c.dim))
        self.blocks = nn.ModuleList([TextBlock(c) for _ in range(c.n_layers)])
        self.post_ln = nn.LayerNorm(c.dim)
        self.lm_head = nn.Linear(c.dim, c.vocab_size)


class Region(nn.Module):
    """Coordinates and sizes in and out; ``coord_features`` and ``size_features`` are fixed random frequencies."""

    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.coord_features = nn.Parameter(2.0 * torch.randn(1, c.coord_feat_dim // 2), requires_grad=False)
        self.size_features = nn.Parameter(1.5 * torch.randn(2, c.size_feat_dim // 2), requires_grad=False)
        self.coord_encoder = nn.Linear(c.coord_feat_dim, c.dim)
        self.size_encoder = nn.Linear(c.size_feat_dim, c.dim)
        self.coord_decoder = MLP(c.dim, c.inner_dim, c.coord_out_dim)
        self.size_decoder = MLP(c.dim, c.inner_dim, c.size_out_dim)

    def encode_coord(self, x: Tensor) -> Tensor:
        y: Tensor = self.coord_encoder(_fourier(x, self.coord_features))
        return y

    def encode_size(self, x: Tensor) -> Tensor:
        y: Tensor = self.size_encoder(_fourier(x, self.size_features))
        return y


def _fourier(x: Tensor, w: Tensor) -> Tensor:
    phase = 2 * math.pi * (x.float()[..., None] * w.float()).sum(-2)  # no matmul: autocast would round it
    return torch.cat([phase.cos(), phase.sin()], -1)


def coord_bin(value: Tensor, bins: int) -> Tensor:
    return (value * bins).round().clamp(0, bins - 1)


def size_bin(value: Tensor, bins: int) -> Tensor:
    """Bin (a real number) of sizes in 0..1: logarithmic over ten octaves."""
    return (value.clamp(min=1 / 1024).log2() + 10) / 10 * (bins - 1)


def bin_size(index: Tensor, bins: int) -> Tensor:
    return torch.exp2(index / (bins - 1) * 10 - 10)


class NanoModel(nn.Module):
    mask: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.vision, self.text, self.region = Vision(config), Text(config), Region(config)
        self._initialise()
        slots, positions = layout()
        see = (slots[:, None] == slots[None]) & (positions[:, None] >= positions[None])
        see = F.pad(see, (config.prefix, 0), value=True)
        mask = torch.zeros(see.shape).masked_fill(~see, float("-inf"))
        positions = torch.cat([torch.arange(config.prefix), config.prefix + positions])
        cos, sin = rotary(positions, config.dim // config.n_heads, config.rope_theta)
        self.register_buffer("mask", F.pad(mask, (0, -mask.shape[1] % 8)), persistent=False)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith(("attn.proj", "mlp.fc2"))
                std = 1 / math.sqrt(module.in_features) / (math.sqrt(2 * self.config.n_layers) if last else 1)
                nn.init.trunc_normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)

    def embed(self, tokens: Tensor, values: Tensor) -> Tensor:
        """Token embeddings, with coordinates and sizes in place of tokens 5 and 6."""
        x = F.embedding(tokens, self.text.wte)
        coordinates, sizes = self.region.encode_coord(values[..., :1]), self.region.encode_size(values)
        x = torch.where((tokens == COORD)[..., None], coordinates.to(x.dtype), x)
        return torch.where((tokens == SIZE)[..., None], sizes.to(x.dtype), x)

    def prefix(self, crops: Tensor, tiling: tuple[int, int]) -> Tensor:
        image = self.vision(crops, tiling)
        return torch.cat([self.text.wte[:1].to(image.dtype).expand(len(image), 1, -1), image], 1)

    def forward(self, crops: Tensor, tiling: tuple[int, int], tokens: Tensor, values: Tensor) -> Tensor:
        """Hidden states [B, T, C] of packed tasks, before ``post_ln``."""
        image = self.prefix(crops, tiling)
        x = torch.cat([image.float(), self.embed(tokens, values).float()], 1)
        mask = self.mask.to(image.dtype)[:, : x.shape[1]]
        for block in self.text.blocks:
            x = block(x, self.cos, self.sin, mask)
        return x[:, self.config.prefix :]

    def logits(self, hidden: Tensor) -> Tensor:
        y: Tensor = self.text.lm_head(self.text.post_ln(hidden))
        return y
