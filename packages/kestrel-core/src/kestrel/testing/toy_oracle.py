"""What ``ToyHybrid`` computes, said again: whole sequences at once, in float64, knowing nothing of pages or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

__all__ = ["HIDDEN", "ToyWeights", "oracle"]

HIDDEN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyWeights:
    """A few hundred seeded numbers. ``full``, ``local``, ``cross``: query, key, value and output [4, C, C]."""

    embedding: torch.Tensor
    frequencies: torch.Tensor
    bins: torch.Tensor
    media: torch.Tensor
    full: torch.Tensor
    local: torch.Tensor
    cross: torch.Tensor
    memory_in: torch.Tensor
    memory_out: torch.Tensor
    decay: torch.Tensor
    unembedding: torch.Tensor
    aux_head: torch.Tensor

    def to(self, device: torch.device) -> ToyWeights:
        """These weights on ``device``."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return ToyWeights(**moved)

    @classmethod
    def make(cls, seed: int, vocab_size: int, dtype: torch.dtype, *, nan_id: int) -> ToyWeights:
        """The weights of ``seed``. Logits are scaled so that the best two are rarely within 1e-3."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        embedding = draw(vocab_size, HIDDEN)
        embedding[nan_id] = torch.nan
        unembedding = draw(HIDDEN, vocab_size, scale=8.0)
        unembedding[:, nan_id] = 0.0  # never the best, so that only a prompt brings it in
        return cls(
            embedding=embedding,
            frequencies=torch.linspace(0.05, 1.5, HIDDEN).to(dtype),
            bins=draw(2, HIDDEN, scale=0.3),
            media=draw(3, HIDDEN),
            full=draw(4, HIDDEN, HIDDEN, scale=0.5),
            local=draw(4, HIDDEN, HIDDEN, scale=0.5),
            cross=draw(4, HIDDEN, HIDDEN, scale=0.5),
            memory_in=draw(HIDDEN, HIDDEN, scale=0.5),
            memory_out=draw(HIDDEN, HIDDEN, scale=0.5),
            decay=torch.linspace(0.2, 0.9, HIDDEN).to(dtype),
            unembedding=unembedding,
            aux_head=draw(HIDDEN, 16, scale=8.0),
        )


def oracle(
    w: ToyWeights,
    tokens: Sequence[int],
    *,
    bins: Sequence[Sequence[int]],
    media: Sequence[tuple[int, torch.Tensor]],
    cross: torch.Tensor | None,
    ranges: Sequence[tuple[int, int]],
    positions: Sequence[int] | None,
    window: int | None,
    recurrent: bool,
) -> torch.Tensor:
    """Normalised hidden states [n, C] after every position; logits and bins are read from them."""
    n, dtype = len(tokens), w.embedding.dtype
    x = w.embedding[torch.tensor(tokens)]
    if bins:
        x = x + torch.tensor(bins, dtype=dtype) @ w.bins
    for start, rows in media:
        x[start : start + len(rows)] = rows.to(dtype) @ w.media
    place = torch.tensor(range(n) if positions is None else positions, dtype=dtype)
    x = x + torch.sin(place[:, None] * w.frequencies)
    row, column = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    seen = column <= row
    for start, end in ranges:
        seen[start:end, start:end] = True
    x = x + _attention(x, x, w.full, seen)
    if window is not None:
        x = x + _attention(x, x, w.local, seen & (row - column < window))
    if recurrent:
        x = x + _memory(torch.tanh(x @ w.memory_in), w.decay) @ w.memory_out
    if cross is not None:
        x = x + _attention(x, cross.to(dtype) @ w.media, w.cross, torch.ones(n, len(cross), dtype=torch.bool))
    scale = (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x / scale


def _attention(x: torch.Tensor, over: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    scores = (x @ w[0]) @ (over @ w[1]).T / HIDDEN**0.5
    out: torch.Tensor = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ (over @ w[2]) @ w[3]
    return out


def _memory(inputs: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Each position's sum of earlier inputs, faded by how long ago they were."""
    n = len(inputs)
    ago = torch.arange(n)[:, None] - torch.arange(n)
    fade = torch.where((ago >= 0)[..., None], decay ** ago.clamp(min=0)[..., None], 0.0)
    summed: torch.Tensor = torch.einsum("ijc,jc->ic", fade, inputs)
    return summed
