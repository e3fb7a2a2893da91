"""Random recurrent views for cases: shuffled slots, checkpoints at odd places, NaN in slots that nothing may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kestrel.ops.random import normal
from kestrel.spi.batch import Limits, RecurrentView, RowExtent

__all__ = ["RECURRENT_SHAPES", "RecurrentShape", "make_recurrent_view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """A launch in numbers. ``lens``: new tokens per sequence; ``stores``: (row, count), one checkpoint each.
    ``captured`` and ``spare_tokens``: as ``ViewShape``'s."""

    lens: tuple[int, ...]
    stores: tuple[tuple[int, int], ...] = ()
    key_heads: int = 2
    heads: int = 4
    key_dim: int = 8
    value_dim: int = 6
    layers: int = 2
    captured: bool = False
    spare_tokens: int = 0

    @property
    def live_tokens(self) -> int:
        """Tokens of sequences."""
        return sum(self.lens)

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return self.live_tokens + self.spare_tokens

    @property
    def is_decode(self) -> bool:
        """Every sequence brings one token."""
        return all(n == 1 for n in self.lens) and not self.spare_tokens

    def facts(self) -> dict[str, Any]:
        """Facts of a gated_delta query."""
        return {
            "mode": "decode" if self.is_decode else "prefill",
            "key_heads": self.key_heads,
            "heads": self.heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
        }


def make_recurrent_view(
    shape: RecurrentShape,
    parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    seed: int,
    device: torch.device,
) -> RecurrentView:
    """A view of ``shape`` over pools of ``parts`` (name to shape per slot and dtype): live slots hold random states,
    the others NaN."""
    batch, count = len(shape.lens), len(shape.stores)
    order = torch.randperm(batch + count + 1, generator=torch.Generator().manual_seed(seed), device="cpu") + 1
    live, destinations = order[:batch], order[batch : batch + count]
    pools = {}
    for i, (name, (size, dtype)) in enumerate(parts.items()):
        pool = normal(
            seed + 20 + i, (shape.layers, batch + count + 2, *size), torch.device("cpu"), dtype, scale=0.5
        )
        pool[:, order[batch:]] = float("nan")
        pools[name] = pool.to(device)
    starts = [sum(shape.lens[:b]) for b in range(batch + 1)]
    stores = [(row, n, slot) for (row, n), slot in zip(shape.stores, destinations.tolist(), strict=True)]
    padded = stores + [(0, 0, 0)] * (2 * shape.captured)
    return RecurrentView(
        parts=pools,
        slots_B=live.to(device),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        stores=torch.tensor(padded, dtype=torch.int64, device=device).view(-1, 3),
        limits=Limits(
            max_rows=max(1, batch),
            max_tokens=max(1, shape.tokens),
            max_query_len=1 if shape.is_decode else max(2, *shape.lens) + 5 * shape.captured,
            max_context_len=max([1, *shape.lens]),
        ),
        extents=None if shape.captured else tuple(RowExtent(n, 0) for n in shape.lens),
        host_stores=() if shape.captured else tuple(stores),
    )


RECURRENT_SHAPES = {
    "smallest decode": RecurrentShape(lens=(1,), key_heads=1, heads=1, key_dim=2, value_dim=2),
    "decode, odd sizes": RecurrentShape(lens=(1, 1, 1), key_heads=3, heads=9, key_dim=5, value_dim=7),
    "decode, empty batch": RecurrentShape(lens=()),
    "decode, with a checkpoint": RecurrentShape(lens=(1, 1, 1), stores=((1, 1),)),
    "decode, captured": RecurrentShape(lens=(1, 1, 1), stores=((2, 1),), captured=True),
    "decode, largest head": RecurrentShape(lens=(1, 1), key_heads=1, heads=2, key_dim=128, value_dim=128),
    "smallest prefill": RecurrentShape(lens=(2,), key_heads=1, heads=1, key_dim=2, value_dim=2),
    "prefill, odd sizes": RecurrentShape(lens=(5, 1, 13), key_heads=3, heads=3, key_dim=5, value_dim=7),
    "prefill, one long among short": RecurrentShape(lens=(2, 150, 1, 3)),
    "prefill, checkpoints": RecurrentShape(
        lens=(70, 3, 129), stores=((0, 1), (0, 64), (0, 65), (0, 70), (1, 3), (2, 128), (2, 1))
    ),
    "prefill, captured": RecurrentShape(lens=(5, 1, 9), captured=True, spare_tokens=3),
    "prefill, captured with checkpoints": RecurrentShape(
        lens=(70, 3, 66),
        stores=((0, 1), (0, 64), (0, 65), (0, 70), (1, 3), (2, 66)),
        captured=True,
        spare_tokens=2,
    ),
    "prefill, largest head": RecurrentShape(lens=(9,), key_heads=1, heads=2, key_dim=128, value_dim=128),
}
