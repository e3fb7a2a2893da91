"""cross_attention: queries against the keys and values of an encoded media item. write_cross: fills an entry.

Letters: B sequences, T tokens, H query heads, K key/value heads, D head dim, J positions of an entry, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.padding import padding_once
from kestrel.ops.pages import once_per_launch
from kestrel.ops.random import normal
from kestrel.spi.batch import CrossView, Limits, RowExtent

__all__ = ["CROSS_ATTENTION", "WRITE_CROSS", "cross_attention", "write_cross"]


def cross_attention(q_THD: torch.Tensor, view: CrossView, layer: int, scale: float) -> torch.Tensor:
    """Attention outputs [T, H, D]: every token of sequence b sees the first ``lens_B[b]`` positions of its entry.

    Scores are q·k · ``scale``, softmax in float32. Query head h reads key/value head h // (H / K). What lies behind
    an entry's length cannot reach the output, even if it is NaN. Rows of sequences of length 0 are undefined.
    """
    if q_THD.shape[0] == 0:
        return torch.empty_like(q_THD)
    if view.extents is not None and q_THD.device.type == "cpu":
        return _by_sequence(q_THD, view, layer, scale)
    return _padded(q_THD, view, layer, scale)


def _by_sequence(q_THD: torch.Tensor, view: CrossView, layer: int, scale: float) -> torch.Tensor:
    """Each sequence against its entry in place, uncopied: on a CPU, reading entries and lengths is no sync."""
    out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    start = 0
    assert view.extents is not None
    for row, (entry, length) in zip(
        view.extents, once_per_launch(view, layer, "entries", _stage), strict=True
    ):
        tokens = slice(start, start + row.query_len)
        start = tokens.stop
        if row.query_len and length:
            k, v = (pool[layer, entry, :, :length].to(q_THD.dtype) for pool in (view.k_LEKSD, view.v_LEKSD))
            out_THD[tokens] = _attend(q_THD[tokens], k, v, scale)
    return out_THD


def _stage(view: CrossView) -> list[tuple[int, int]]:
    return list(zip(view.entries_B.tolist(), view.lens_B.tolist(), strict=True))


def _attend(q_THD: torch.Tensor, k_KJD: torch.Tensor, v_KJD: torch.Tensor, scale: float) -> torch.Tensor:
    """[T, H, D]; the queries of all heads that share a key/value head form one block."""
    tokens, num_heads, dim = q_THD.shape
    num_kv = k_KJD.shape[0]
    q = q_THD.reshape(tokens, num_kv, num_heads // num_kv, dim).transpose(0, 1).reshape(num_kv, -1, dim)
    if (
        tokens == 1 and q.dtype == torch.float32
    ):  # two plain products are twice as fast as the fused op for one query
        out = torch.bmm(torch.softmax(torch.bmm(q * scale, k_KJD.transpose(1, 2)), -1), v_KJD)
    else:
        out = F.scaled_dot_product_attention(
            q.unsqueeze(0), k_KJD.unsqueeze(0), v_KJD.unsqueeze(0), scale=scale
        )[0]
    return out.view(num_kv, tokens, -1, dim).transpose(0, 1).reshape(tokens, num_heads, dim)


def _padded(q_THD: torch.Tensor, view: CrossView, layer: int, scale: float) -> torch.Tensor:
    """Every sequence padded to the launch's ceiling, from device tensors alone, as a captured program needs."""
    padding = padding_once(view, layer, q_THD.shape[0])
    length = view.lens_B.clamp(min=1).view(-1, 1, 1, 1)
    beyond_B11J = torch.arange(view.k_LEKSD.shape[3], device=q_THD.device) >= length
    k, v = (
        pool[layer]
        .index_select(0, view.entries_B)
        .to(q_THD.dtype)
        .masked_fill(beyond_B11J.transpose(2, 3), 0)
        for pool in (view.k_LEKSD, view.v_LEKSD)
    )
    q_BHQD = q_THD[padding.source_BQ].transpose(1, 2)
    grouped = q_BHQD.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q_BHQD, k, v, attn_mask=~beyond_B11J, scale=scale, enable_gqa=grouped
    )
    return padding.unpad(out.transpose(1, 2))


def write_cross(
    k_NKD: torch.Tensor, v_NKD: torch.Tensor, lengths: Sequence[int], view: CrossView, layer: int
) -> None:
    """Write projected encoder rows [N, K, D] to entries of ``view``: the next ``lengths[b]`` go to ``entries_B[b]``.

    What lies behind an entry's rows stays. Items of one length that follow one another are written together: launches
    are what this costs.
    """
    item, start = 0, 0
    for length, equal in groupby(lengths):
        count = len(list(equal))
        entries_B, end = view.entries_B[item : item + count], start + count * length
        for pool_LEKSD, new_NKD in ((view.k_LEKSD, k_NKD), (view.v_LEKSD, v_NKD)):
            block_BKSD = new_NKD[start:end].reshape(count, length, *new_NKD.shape[1:]).transpose(1, 2)
            pool_LEKSD[layer, :, :, :length].index_copy_(0, entries_B, block_BKSD.to(pool_LEKSD.dtype))
        item, start = item + count, end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A launch in numbers: new tokens and entry length per sequence."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    max_len: int = 12
    captured: bool = False
    spare_tokens: int = 0


_SHAPES = {
    "smallest": _Shape(rows=((1, 1),), heads=1, kv_heads=1, head_dim=2, max_len=1),
    "odd sizes": _Shape(rows=((3, 7), (1, 2), (5, 11)), heads=9, kv_heads=3, head_dim=10, max_len=11),
    "empty batch": _Shape(rows=()),
    "decode": _Shape(rows=((1, 12), (1, 5), (1, 1))),
    "decode, captured": _Shape(rows=((1, 12), (1, 5), (1, 1)), captured=True),
    "one long among short": _Shape(rows=((1, 3), (40, 100), (2, 7)), max_len=100),
    "captured": _Shape(rows=((3, 12), (1, 5)), captured=True, spare_tokens=2),
    "real head": _Shape(rows=((1, 150), (4, 40)), heads=6, kv_heads=6, head_dim=64, max_len=150),
    "largest head": _Shape(rows=((2, 9),), heads=2, kv_heads=1, head_dim=256),
}


def _make(shape: _Shape, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    batch = len(shape.rows)
    order = torch.randperm(batch + 1, generator=torch.Generator().manual_seed(seed), device="cpu") + 1
    pool_shape = (2, batch + 2, shape.kv_heads, shape.max_len, shape.head_dim)
    pools = [normal(seed + i, pool_shape, torch.device("cpu"), dtype) for i in (1, 2)]
    for pool in pools:
        for entry, (_, length) in zip(order.tolist(), shape.rows, strict=False):
            pool[:, entry, :, length:] = float("nan")
    lens = [new for new, _ in shape.rows]
    num_tokens = sum(lens)
    view = CrossView(
        k_LEKSD=pools[0].to(device),
        v_LEKSD=pools[1].to(device),
        entries_B=order[:batch].to(device),
        lens_B=torch.tensor([length for _, length in shape.rows], dtype=torch.int32, device=device),
        cu_seqlens=torch.tensor([sum(lens[:b]) for b in range(batch + 1)], dtype=torch.int32, device=device),
        limits=Limits(
            max_rows=max(1, batch),
            max_tokens=max(1, num_tokens + shape.spare_tokens),
            max_query_len=max([1, *lens]) + shape.spare_tokens,
            max_context_len=max([1, *lens]),
        ),
        extents=None if shape.captured else tuple(RowExtent(new, 0) for new in lens),
    )
    q = normal(seed, (num_tokens + shape.spare_tokens, shape.heads, shape.head_dim), device, dtype)
    return Inputs(args=(q, view, 1, shape.head_dim**-0.5), num_rows=num_tokens)


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="cross_attention",
            name=name,
            make=partial(_make, shape),
            facts={
                "mode": "decode" if all(new == 1 for new, _ in shape.rows) else "prefill",
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "max_len": shape.max_len,
            },
        )
        for name, shape in _SHAPES.items()
    ]


CROSS_ATTENTION = Op(
    name="cross_attention",
    reference=cross_attention,
    cases=_cases,
    tolerances={
        "float32": Tolerance(2e-5, 2e-5),
        "bfloat16": Tolerance(
            2e-2, 2e-2
        ),  # probabilities may be rounded to 16 bits before the second product
        "float16": Tolerance(3e-3, 3e-3),
    },
    facts={
        "mode": '"decode" or "prefill"',
        "heads": "H",
        "kv_heads": "K",
        "head_dim": "D",
        "max_len": "positions of an entry",
        "dtype": "of the queries",
    },
)


def _make_write(shape: _Shape, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    view = _make(shape, seed, device, dtype).args[1]
    lengths = [length for _, length in shape.rows]
    packed = normal(seed, (sum(lengths), 2, shape.kv_heads, shape.head_dim), device, dtype)
    pools = view.k_LEKSD.nan_to_num_(0.0), view.v_LEKSD.nan_to_num_(0.0)
    return Inputs(args=(*packed.unbind(1), lengths, view, 1), written=pools)


def _write_cases() -> Sequence[Case]:
    shapes = {**_SHAPES, "equal lengths": _Shape(rows=((1, 9), (1, 9), (1, 4)), kv_heads=5, head_dim=24)}
    return [
        Case(
            op="write_cross",
            name=name,
            make=partial(_make_write, shape),
            facts={"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "max_len": shape.max_len},
        )
        for name, shape in shapes.items()
    ]


WRITE_CROSS = Op(
    name="write_cross",
    reference=write_cross,
    cases=_write_cases,
    tolerances=dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(0.0, 0.0)),  # copies
    facts={
        "kv_heads": "K",
        "head_dim": "D",
        "max_len": "positions of an entry",
        "dtype": "of keys, values and entries",
    },
)
