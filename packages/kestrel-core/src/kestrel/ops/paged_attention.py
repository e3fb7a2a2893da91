"""paged_attention: queries of this launch against all keys and values of their sequences, in pages.

Letters: B sequences, T tokens, H query heads, K key/value heads, D head dim, J key positions, Q padded queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.extents import QueryBlock, blocks_of
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.output_gate import output_gate
from kestrel.ops.padding import Padding, padding_of
from kestrel.ops.pages import gather_rows, once_per_launch, rows_of_positions
from kestrel.ops.random import normal
from kestrel.ops.view_cases import ATTENTION_FACTS, VIEW_SHAPES, ViewShape, make_view
from kestrel.ops.write_kv import write_kv
from kestrel.spi.batch import PagedView

__all__ = ["PAGED_ATTENTION", "paged_attention"]

CACHE_NUMBERS = 2**18  # keys of one group: 1 MiB of float32, half of a common CPU core's second-level cache

Fresh = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [T, K, D] of a launch's own tokens."""

SPAN_STEP = 64  # of deterministic launches: few groups, and little that is computed for nothing


def paged_attention(
    q_THD: torch.Tensor,
    view: PagedView,
    layer: int,
    scale: float,
    softcap: float | None = None,
    gate_THD: torch.Tensor | None = None,
    k_TKD: torch.Tensor | None = None,
    v_TKD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention outputs [T, H, D] of queries over ``layer`` of the view, this launch's keys and values included.

    Token t of sequence b has position ``computed_B[b] + (t − cu_seqlens[b])``. It sees keys at positions up to its
    own, and up to ``bidirectional_end_T[t]`` (exclusive) when it lies in such a range, but none at or before its
    position − ``window``. Scores are q·k · ``scale``, then ``softcap`` · tanh(score / softcap), softmax in float32.
    Query head h reads key/value head h // (H / K). What a sequence may not see cannot reach its rows, even if it is
    NaN. With a gate, the outputs are let through by it as by ``output_gate``. Rows of dead or padding tokens are
    undefined.

    ``k_TKD`` and ``v_TKD``, both or none: this launch's keys (normed and rotated) and values, as ``write_kv`` had them.
    A prefill reads these instead of what pages hold of them, which may be fewer bits.
    """
    fresh = None if k_TKD is None or v_TKD is None else (k_TKD, v_TKD)
    out_THD = _outputs(q_THD, view, layer, scale, softcap, fresh)
    return out_THD if gate_THD is None else output_gate(out_THD, gate_THD)


def _outputs(
    q_THD: torch.Tensor, view: PagedView, layer: int, scale: float, softcap: float | None, fresh: Fresh | None
) -> torch.Tensor:
    if q_THD.shape[0] == 0:
        return torch.empty_like(q_THD)
    if view.limits.is_decode:
        return _decode(q_THD, view, layer, scale, softcap)
    if view.extents is not None:
        return _prefill(q_THD, view, layer, scale, softcap, fresh)
    return _padded(q_THD, view, layer, scale, softcap, fresh)


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode rows ``start`` to ``end``: pool rows [B, K, J] of their contexts, and which of these lie beyond a context
    ([B, J], None when none does)."""

    start: int
    end: int
    rows_BKJ: torch.Tensor
    hidden_BJ: torch.Tensor | None


def _decode(
    q_BHD: torch.Tensor, view: PagedView, layer: int, scale: float, softcap: float | None
) -> torch.Tensor:
    """One query per sequence: gather the contexts of a group into one block, then two batched products."""
    groups = once_per_launch(view, layer, "decode", _stage_decode)
    k_PKSD, v_PKSD = view.k_LPKSD[layer], view.v_LPKSD[layer]
    if len(groups) == 1:
        return _decode_group(q_BHD, k_PKSD, v_PKSD, groups[0], scale, softcap)
    outs = [
        _decode_group(q_BHD[group.start : group.end], k_PKSD, v_PKSD, group, scale, softcap)
        for group in groups
    ]
    return torch.cat(outs)


def _decode_group(
    q_BHD: torch.Tensor,
    k_PKSD: torch.Tensor,
    v_PKSD: torch.Tensor,
    group: _Group,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    batch, num_heads, dim = q_BHD.shape
    _, num_kv, span = group.rows_BKJ.shape
    wide = torch.promote_types(q_BHD.dtype, torch.float32)
    k = gather_rows(k_PKSD, group.rows_BKJ, wide).view(batch * num_kv, span, -1)
    v = gather_rows(v_PKSD, group.rows_BKJ, wide).view(batch * num_kv, span, -1)
    q = (q_BHD.to(wide) * scale).reshape(batch * num_kv, num_heads // num_kv, dim)
    scores = torch.bmm(q, k.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if group.hidden_BJ is not None:
        scores.view(batch, num_heads, span).masked_fill_(group.hidden_BJ.unsqueeze(1), float("-inf"))
    return torch.bmm(torch.softmax(scores, -1), v).view(batch, num_heads, -1).to(q_BHD.dtype)


def _stage_decode(view: PagedView) -> list[_Group]:
    """All rows in one group; on a CPU, which knows their lengths, in groups whose keys fit its cache."""
    if view.extents is None:
        return [_stage_group(view, 0, view.computed_B.shape[0], view.limits.max_context_len, None)]
    lengths = [row.computed + 1 for row in view.extents]
    assert len(lengths) == view.computed_B.shape[0], (
        "a decode launch has an extent per row, dead rows included"
    )
    if view.limits.is_deterministic:
        return _stage_by_own_length(view, lengths)
    per_position = view.k_LPKSD.shape[2] * view.k_LPKSD.shape[-1]
    budget = CACHE_NUMBERS // per_position if view.k_LPKSD.device.type == "cpu" else None
    groups, start = [], 0
    for end in _cuts(lengths, budget):
        part = lengths[start:end]
        groups.append(_stage_group(view, start, end, max(part), min(part)))
        start = end
    return groups


def _stage_by_own_length(view: PagedView, lengths: list[int]) -> list[_Group]:
    """Neighbours share a group where their rounded lengths agree: what a row sums over is its own affair."""
    spans = [-(-length // SPAN_STEP) * SPAN_STEP for length in lengths]
    groups, start = [], 0
    for span, rows in itertools.groupby(spans):
        end = start + len(list(rows))
        groups.append(_stage_group(view, start, end, span, None))
        start = end
    return groups


def _cuts(lengths: list[int], budget: int | None) -> list[int]:
    """Where groups of neighbouring rows end, so that rows times the longest of a group stays within ``budget``."""
    cuts, start, longest = [], 0, 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if budget is not None and i > start and longest * (i + 1 - start) > budget:
            cuts.append(i)
            start, longest = i, length
    return [*cuts, len(lengths)]


def _stage_group(view: PagedView, start: int, end: int, longest: int, shortest: int | None) -> _Group:
    """A place beyond a context repeats its newest position: whatever that holds reaches no other sequence."""
    span = longest if view.window is None else min(longest, view.window)
    newest = view.computed_B[start:end].to(torch.int64).unsqueeze(1)
    positions = (newest - (span - 1)).clamp_(min=0) + torch.arange(span, device=newest.device)
    table, held = view.page_table_BN[start:end], torch.minimum(positions, newest)
    rows = rows_of_positions(table, held, view.k_LPKSD.shape[2], view.page_size)
    all_full = shortest is not None and shortest >= span
    return _Group(start, end, rows, None if all_full else positions > newest)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a prefill: the token of its position 0 (maybe negative), how many positions come before its
    tokens, the pool rows [1, K, J] of the keys that these see, the first of which is at position ``low``, and its
    blocks with their masks."""

    origin: int
    computed: int
    low: int
    rows_1KJ: torch.Tensor
    blocks: tuple[tuple[QueryBlock, torch.Tensor | None], ...]


def _prefill(
    q_THD: torch.Tensor, view: PagedView, layer: int, scale: float, softcap: float | None, fresh: Fresh | None
) -> torch.Tensor:
    """Sequence by sequence, block by block, from the host's extents."""
    out_THD = q_THD.new_zeros(*q_THD.shape[:2], view.v_LPKSD.shape[-1])
    for sequence in once_per_launch(view, layer, "prefill", _stage_prefill):
        k_1KJD = gather_rows(view.k_LPKSD[layer], sequence.rows_1KJ, q_THD.dtype)
        v_1KJD = gather_rows(view.v_LPKSD[layer], sequence.rows_1KJ, q_THD.dtype)
        if fresh is not None:
            _freshen(sequence, k_1KJD, v_1KJD, fresh)
        for block, mask in sequence.blocks:
            tokens = slice(sequence.origin + block.start, sequence.origin + block.end)
            keys = slice(block.low - sequence.low, block.high - sequence.low)
            q_1HTD = q_THD[tokens].transpose(0, 1).unsqueeze(0)
            o_1HTD = _attend(
                q_1HTD, k_1KJD[:, :, keys], v_1KJD[:, :, keys], mask, block.is_causal, scale, softcap
            )
            out_THD[tokens] = o_1HTD[0].transpose(0, 1)
    return out_THD


def _freshen(sequence: _Sequence, k_1KJD: torch.Tensor, v_1KJD: torch.Tensor, fresh: Fresh) -> None:
    """Replace what was gathered of the sequence's own tokens."""
    first, end = max(sequence.computed, sequence.low), sequence.low + k_1KJD.shape[2]
    for gathered, own_TKD in zip((k_1KJD, v_1KJD), fresh, strict=True):
        own = own_TKD[sequence.origin + first : sequence.origin + end]
        gathered[0, :, first - sequence.low :] = own.transpose(0, 1)


def _stage_prefill(view: PagedView) -> list[_Sequence]:
    assert view.extents is not None
    device, sequences, start = view.slots_T.device, [], 0
    for b, row in enumerate(view.extents):
        if row.query_len:
            blocks = blocks_of(row, view.window)
            positions = torch.arange(blocks[0].low, row.computed + row.query_len, device=device).unsqueeze(0)
            rows = rows_of_positions(
                view.page_table_BN[b : b + 1], positions, view.k_LPKSD.shape[2], view.page_size
            )
            masked = tuple((block, block.mask(device)) for block in blocks)
            sequences.append(_Sequence(start - row.computed, row.computed, blocks[0].low, rows, masked))
        start += row.query_len
    return sequences


def _padded(
    q_THD: torch.Tensor, view: PagedView, layer: int, scale: float, softcap: float | None, fresh: Fresh | None
) -> torch.Tensor:
    """Every sequence padded to the launch's ceilings, from device tensors alone, as a captured program needs."""
    padding, rows_BKJ, seen_BQJ = once_per_launch(view, layer, "padded", _stage_padded)
    q_BHQD = q_THD[padding.source_BQ].transpose(1, 2)
    k_BKJD, v_BKJD = (
        gather_rows(pool[layer], rows_BKJ, q_THD.dtype) for pool in (view.k_LPKSD, view.v_LPKSD)
    )
    if fresh is not None:
        is_own_BJ, tokens_BJ = once_per_launch(view, layer, "own", _stage_own)
        k_BKJD, v_BKJD = (
            torch.where(is_own_BJ[:, None, :, None], own_TKD[tokens_BJ].transpose(1, 2), gathered)
            for own_TKD, gathered in zip(fresh, (k_BKJD, v_BKJD), strict=True)
        )
    out_BHQD = _attend(q_BHQD, k_BKJD, v_BKJD, seen_BQJ.unsqueeze(1), False, scale, softcap)
    return padding.unpad(out_BHQD.transpose(1, 2))


def _stage_own(view: PagedView) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions [B, J] are of this launch's own tokens, and of which (any token elsewhere)."""
    starts = view.cu_seqlens.to(torch.int64)
    own_BJ = torch.arange(view.limits.max_context_len, device=starts.device) - view.computed_B.unsqueeze(1)
    last = (starts[1:] - starts[:-1] - 1).clamp_(min=0).unsqueeze(1)
    tokens = (starts[:-1].unsqueeze(1) + own_BJ.clamp(min=0).minimum(last)).clamp_(
        max=view.slots_T.shape[0] - 1
    )
    return own_BJ >= 0, tokens


def _stage_padded(view: PagedView) -> tuple[Padding, torch.Tensor, torch.Tensor]:
    """The padding, the pool rows [B, K, J] of every context, and what each padded query sees [B, Q, J]."""
    width = view.limits.max_query_len
    padding = padding_of(view.cu_seqlens, view.slots_T.shape[0], width)
    computed = view.computed_B.to(torch.int64).unsqueeze(1)
    newest = (computed + padding.lens_B.unsqueeze(1) - 1).clamp_(min=0)
    at_BQ = torch.minimum(computed + torch.arange(width, device=computed.device), newest)
    end_BQ = at_BQ + 1
    if view.bidirectional_end_T is not None:
        end_BQ = torch.maximum(end_BQ, view.bidirectional_end_T[padding.source_BQ])
    key = torch.arange(view.limits.max_context_len, device=computed.device)
    seen_BQJ = key < torch.minimum(end_BQ, newest + 1).unsqueeze(-1)
    if view.window is not None:
        seen_BQJ &= key > (at_BQ - view.window).unsqueeze(-1)
    held = torch.minimum(key.unsqueeze(0), newest)
    rows = rows_of_positions(view.page_table_BN, held, view.k_LPKSD.shape[2], view.page_size)
    return padding, rows, seen_BQJ


def _attend(
    q_BHQD: torch.Tensor,
    k_BKJD: torch.Tensor,
    v_BKJD: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    grouped = q_BHQD.shape[1] != k_BKJD.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            q_BHQD, k_BKJD, v_BKJD, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    wide = torch.promote_types(q_BHQD.dtype, torch.float32)
    repeats = q_BHQD.shape[1] // k_BKJD.shape[1]
    k, v = (x.to(wide).repeat_interleave(repeats, 1) for x in (k_BKJD, v_BKJD))
    scores = torch.tanh(q_BHQD.to(wide) @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (torch.softmax(scores, -1) @ v).to(q_BHQD.dtype)


def _make(shape: ViewShape, kept: str | None, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    """``kept``: "own" or "eight" when the launch is given its keys, which pages hold as they are or in 8 bits."""
    view = make_view(shape, seed, device, dtype)
    q = normal(seed, (shape.tokens, shape.heads, shape.head_dim), device, dtype)
    num_rows = shape.tokens - shape.spare_tokens
    gate = k = v = None
    if shape.gated:  # each head's half of a projection
        gate = normal(seed + 1, (shape.tokens, shape.heads, 2, shape.head_dim), device, dtype).select(2, 1)
    if kept is not None:  # values as a part of a projection
        k = normal(seed + 2, (shape.tokens, shape.kv_heads, shape.head_dim), device, dtype)
        v = normal(seed + 3, (shape.tokens, 3, shape.kv_heads, shape.head_dim), device, dtype).select(1, 2)
        if kept == "eight":
            pools = (view.k_LPKSD.to(torch.float8_e4m3fn), view.v_LPKSD.to(torch.float8_e4m3fn))
            view = replace(view, k_LPKSD=pools[0], v_LPKSD=pools[1])
        write_kv(k, v, view, 1)
    return Inputs(
        args=(q, view, 1, shape.head_dim**-0.5),
        kwargs={"softcap": shape.softcap, "gate_THD": gate, "k_TKD": k, "v_TKD": v},
        num_rows=num_rows,
    )


_EIGHT = ("prefill, odd sizes", "prefill, one long among short", "prefill, captured with everything")


def _cases() -> Sequence[Case]:
    cases = []
    for name, shape in VIEW_SHAPES.items():
        ways: list[str | None] = [None]
        if not shape.is_decode:
            ways += ["own", "eight"] if name in _EIGHT else ["own"]
        for kept in ways:
            facts = {**shape.attention_facts(), "fresh": kept is not None}
            if kept == "eight":
                facts["kv_dtype"] = "float8_e4m3fn"
            title = name if kept is None else f"{name}, {kept}"
            make = partial(_make, shape, kept)
            cases.append(Case(op="paged_attention", name=title, make=make, facts=facts))
    return cases


PAGED_ATTENTION = Op(
    name="paged_attention",
    reference=paged_attention,
    cases=_cases,
    eager_in=frozenset({"decode", "prefill"}),
    tolerances={
        "float32": Tolerance(2e-5, 2e-5),  # another order of sums, exp by other means
        "bfloat16": Tolerance(
            2e-2, 2e-2
        ),  # probabilities may be rounded to 16 bits before the second product
        "float16": Tolerance(3e-3, 3e-3),
    },
    facts={
        "mode": '"decode" or "prefill"',
        **ATTENTION_FACTS,
        "fresh": "whether a prefill is given this launch's own keys and values",
        "dtype": "of the queries",
    },
)
