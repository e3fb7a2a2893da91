"""Random paged views for cases: page tables in shuffled order, holes where a window has passed, stale numbers in
pages and offsets that nothing may read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kestrel.ops.random import normal
from kestrel.spi.batch import Limits, PagedView, RowExtent

__all__ = ["ATTENTION_FACTS", "VIEW_SHAPES", "ViewShape", "make_view"]

ATTENTION_FACTS = {
    "heads": "H",
    "kv_heads": "K",
    "head_dim": "D",
    "page": "positions per page",
    "window": "positions or None",
    "softcap": "whether one is given",
    "gated": "whether a gate for the output is given",
    "kv_dtype": "of pages, None where it is the same",
}
"""What queries of attention over pages say, whatever the op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewShape:
    """A launch in numbers. ``rows``: the extents of its sequences. ``captured``: no host copies, as in a captured
    program, with ``spare_tokens`` of padding behind the last sequence."""

    rows: tuple[RowExtent, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    layers: int = 2
    window: int | None = None
    softcap: float | None = None
    gated: bool = False
    captured: bool = False
    spare_tokens: int = 0

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return sum(row.query_len for row in self.rows) + self.spare_tokens

    @property
    def is_decode(self) -> bool:
        """Every sequence brings one token."""
        return all(row.query_len == 1 for row in self.rows) and not self.spare_tokens

    def facts(self) -> dict[str, Any]:
        """Facts of a query about keys and values in pages."""
        return {
            "head_dim": self.head_dim,
            "kv_heads": self.kv_heads,
            "page": self.page_size,
            "kv_dtype": None,
        }

    def attention_facts(self) -> dict[str, Any]:
        """Facts of a paged_attention query."""
        mode = "decode" if self.is_decode else "prefill"
        given = {"softcap": self.softcap is not None, "gated": self.gated}
        return {**self.facts(), "heads": self.heads, "mode": mode, "window": self.window, **given}


def make_view(shape: ViewShape, seed: int, device: torch.device, dtype: torch.dtype) -> PagedView:
    """A view of ``shape``. Pages that no sequence owns and offsets behind a sequence's end hold NaN, as faulty
    requests may have left them; the new tokens' own slots hold random numbers, as after write_kv."""
    size, rows = shape.page_size, shape.rows
    ends = [row.computed + row.query_len for row in rows]
    counts = [-(-end // size) for end in ends]
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randperm(sum(counts) + 1, generator=generator, device="cpu") + 1).tolist()
    pool_shape = (shape.layers, len(order) + 1, shape.kv_heads, size, shape.head_dim)
    k, v = (normal(seed + i, pool_shape, torch.device("cpu"), dtype) for i in (11, 12))
    table = torch.zeros(len(rows), max([1, *counts]), dtype=torch.int32, device="cpu")
    slots: list[int] = []
    stale = torch.ones(pool_shape[1], size, dtype=torch.bool, device="cpu")
    stale[0] = False
    for b, (row, end, count) in enumerate(zip(rows, ends, counts, strict=True)):
        pages, order = order[:count], order[count:]
        first = 0 if shape.window is None else max(0, row.computed - shape.window + 1) // size
        for page_idx in range(first, count):
            table[b, page_idx] = pages[page_idx]
            stale[pages[page_idx], : end - page_idx * size] = False
        slots += [pages[p // size] * size + p % size for p in range(row.computed, end)]
    for pool in (k, v):
        pool.masked_fill_(stale[None, :, None, :, None], float("nan"))
    slots += [0] * shape.spare_tokens
    return _view(shape, k.to(device), v.to(device), table.to(device), slots)


def _view(
    shape: ViewShape, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, slots: list[int]
) -> PagedView:
    rows, device = shape.rows, k.device
    starts, ends = [0], []
    for row in rows:
        starts.append(starts[-1] + row.query_len)
        for p in range(row.computed, row.computed + row.query_len):
            ends.append(next((e for s, e in row.bidirectional if s <= p < e), 0))
    limits = Limits(
        max_rows=max(1, len(rows)),
        max_tokens=max(1, shape.tokens),
        max_query_len=1 if shape.is_decode else max(2, *(row.query_len for row in rows)),
        max_context_len=max([1, *(row.computed + row.query_len for row in rows)]) + 3 * shape.captured,
    )
    return PagedView(
        k_LPKSD=k,
        v_LPKSD=v,
        page_table_BN=table,
        slots_T=torch.tensor(slots, dtype=torch.int64, device=device),
        computed_B=torch.tensor([row.computed for row in rows], dtype=torch.int32, device=device),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        limits=limits,
        page_size=shape.page_size,
        window=shape.window,
        extents=None if shape.captured else rows,
        bidirectional_end_T=torch.tensor(ends + [0] * shape.spare_tokens, dtype=torch.int32, device=device),
    )


def _rows(*extents: tuple[int, int]) -> tuple[RowExtent, ...]:
    return tuple(RowExtent(query_len, computed) for query_len, computed in extents)


_PREFILL = _rows((5, 0), (3, 6))
VIEW_SHAPES = {
    "smallest decode": ViewShape(rows=_rows((1, 0)), heads=1, kv_heads=1, head_dim=2, page_size=1),
    "decode, odd sizes": ViewShape(
        rows=_rows((1, 4), (1, 10), (1, 3)), heads=9, kv_heads=3, head_dim=10, page_size=7
    ),
    "decode, empty batch": ViewShape(rows=()),
    "decode, one long among short": ViewShape(rows=_rows((1, 1), (1, 150), (1, 0), (1, 16)), page_size=16),
    "decode, window": ViewShape(rows=_rows((1, 2), (1, 40), (1, 7)), window=8),
    "decode, softcap": ViewShape(rows=_rows((1, 5), (1, 9)), softcap=3.0),
    "decode, captured": ViewShape(rows=_rows((1, 5), (1, 21), (1, 0)), captured=True),
    "decode, captured window": ViewShape(rows=_rows((1, 5), (1, 21), (1, 0)), captured=True, window=6),
    "decode, largest head": ViewShape(
        rows=_rows((1, 33), (1, 17)), head_dim=512, page_size=16, heads=8, kv_heads=1
    ),
    "decode, head 256": ViewShape(
        rows=_rows((1, 33), (1, 17)), head_dim=256, page_size=16, heads=8, kv_heads=2
    ),
    "decode, head 64": ViewShape(
        rows=_rows((1, 33), (1, 64)), head_dim=64, page_size=16, heads=4, kv_heads=4
    ),
    "decode, gated": ViewShape(rows=_rows((1, 5), (1, 190), (1, 0)), gated=True, page_size=16, heads=8),
    "decode, head 72": ViewShape(rows=_rows((1, 70), (1, 3)), head_dim=72, page_size=16, kv_heads=4),
    "smallest prefill": ViewShape(rows=_rows((2, 0)), heads=1, kv_heads=1, head_dim=2, page_size=1),
    "prefill, odd sizes": ViewShape(
        rows=_rows((5, 2), (1, 7), (9, 0)), heads=3, kv_heads=3, head_dim=10, page_size=7
    ),
    "prefill, one long among short": ViewShape(rows=_rows((2, 1), (70, 61), (1, 0), (3, 0)), page_size=16),
    "prefill, window": ViewShape(rows=_rows((12, 9), (3, 2), (20, 0)), window=5),
    "prefill, softcap": ViewShape(rows=_PREFILL, softcap=3.0),
    "prefill, bidirectional from the start": ViewShape(rows=(RowExtent(9, 0, ((0, 7),)), RowExtent(3, 4))),
    "prefill, bidirectional later": ViewShape(rows=(RowExtent(11, 3, ((4, 8), (9, 12))), RowExtent(2, 0))),
    "prefill, bidirectional in a window": ViewShape(rows=(RowExtent(14, 3, ((6, 15),)),), window=4),
    "prefill, gated": ViewShape(rows=_PREFILL, gated=True),
    "prefill, with empty rows": ViewShape(
        rows=_rows((0, 0), (6, 2), (0, 8), (3, 0), (0, 0)), captured=True, spare_tokens=1
    ),
    "prefill, captured": ViewShape(rows=_PREFILL, captured=True, spare_tokens=3),
    "prefill, captured with everything": ViewShape(
        rows=(RowExtent(14, 3, ((6, 15),)), RowExtent(1, 9), RowExtent(2, 0)),
        window=4,
        captured=True,
        spare_tokens=2,
    ),
    "prefill, largest head": ViewShape(
        rows=_rows((5, 0), (4, 13)), head_dim=512, page_size=16, heads=4, kv_heads=1
    ),
    "prefill, head 256": ViewShape(
        rows=_rows((20, 0), (4, 13)), head_dim=256, page_size=16, heads=8, kv_heads=2
    ),
}
