"""What the shared cases do not show: blocks, staging, and that nothing leaks between sequences."""

from dataclasses import replace

import pytest
import torch

from kestrel.ops.extents import blocks_of
from kestrel.ops.paged_attention import _cuts, paged_attention
from kestrel.ops.pages import rows_of_positions
from kestrel.ops.random import normal
from kestrel.ops.view_cases import ViewShape, make_view
from kestrel.ops.write_kv import write_kv
from kestrel.spi.batch import RowExtent

CPU = torch.device("cpu")


def rows(*extents):
    return tuple(RowExtent(*extent) for extent in extents)


def seen_by(blocks, row):
    """Which keys each query sees, as the blocks say it: {position: set of positions}."""
    seen = {}
    for block in blocks:
        mask = block.mask(CPU)
        for i, p in enumerate(range(block.start, block.end)):
            keys = range(block.low, block.high)
            if mask is not None:
                seen[p] = {k for k, ok in zip(keys, mask[i].tolist(), strict=True) if ok}
            elif block.is_causal:
                seen[p] = {k for k in keys if k <= p}
            else:
                seen[p] = set(keys)
    return seen


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("block", [1, 2, 5, 512])
@pytest.mark.parametrize(
    "row",
    [
        RowExtent(1, 0),
        RowExtent(1, 7),
        RowExtent(9, 0),
        RowExtent(6, 5),
        RowExtent(9, 0, ((0, 9),)),
        RowExtent(9, 0, ((0, 4), (4, 6))),
        RowExtent(9, 4, ((5, 8), (10, 13))),
    ],
)
def test_blocks_cover_every_query_and_show_it_what_it_may_see(row, block, window):
    want = {}
    for p in range(row.computed, row.computed + row.query_len):
        high = next((max(e, p + 1) for s, e in row.bidirectional if s <= p < e), p + 1)
        want[p] = set(range(0 if window is None else max(0, p - window + 1), high))
    assert seen_by(blocks_of(row, window, block), row) == want


def test_a_prompt_from_the_start_and_a_bidirectional_prefix_need_no_mask():
    plain = blocks_of(RowExtent(700, 0), None)
    assert [(b.start, b.end, b.is_causal) for b in plain] == [(0, 700, True)]
    image = blocks_of(RowExtent(700, 0, ((0, 700),)), None)
    assert [(b.start, b.end, b.mask(CPU)) for b in image] == [(0, 700, None)]


def test_masks_of_a_long_context_stay_small():
    blocks = blocks_of(RowExtent(2048, 30000), None)
    assert max((b.end - b.start) * (b.high - b.low) for b in blocks) < 512 * 32100


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("extents", [rows((1, 9), (1, 2)), rows((3, 9), (5, 0))], ids=["decode", "prefill"])
def test_a_nan_in_one_sequence_reaches_no_other(extents, captured):
    view = make_view(ViewShape(rows=extents, captured=captured), 1, CPU, torch.float32)
    poisoned = view.page_table_BN[0, 0].long()
    view.k_LPKSD[:, poisoned] = float("nan")
    view.v_LPKSD[:, poisoned] = float("nan")
    q = torch.randn(sum(row.query_len for row in extents), 4, 16)
    out = paged_attention(q, view, 0, 0.25)
    assert out[: extents[0].query_len].isnan().all()
    assert out[extents[0].query_len :].isfinite().all()


def test_dead_rows_change_nothing_for_the_others():
    alive = ViewShape(rows=rows((1, 6)), page_size=4)
    view = make_view(alive, 1, CPU, torch.float32)
    q = torch.randn(2, 4, 16)
    alone = paged_attention(q[:1], view, 0, 0.25)
    view.k_LPKSD[:, 0] = float("nan")
    beside = replace(
        view,
        page_table_BN=torch.cat((view.page_table_BN, torch.zeros_like(view.page_table_BN))),
        slots_T=torch.cat((view.slots_T, torch.zeros(1, dtype=torch.int64))),
        computed_B=torch.tensor([6, 0], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32),
        extents=rows((1, 6), (1, 0)),
    )
    assert torch.allclose(paged_attention(q, beside, 0, 0.25)[:1], alone, atol=1e-6)


def test_layers_after_the_first_reuse_what_layer_0_staged():
    view = make_view(ViewShape(rows=rows((1, 6))), 1, CPU, torch.float32)
    q = torch.randn(1, 4, 16)
    paged_attention(q, view, 0, 0.25)
    staged = view.memo["decode"]
    paged_attention(q, view, 1, 0.25)
    assert view.memo["decode"] is staged


def test_a_view_that_was_refilled_is_staged_again_at_layer_0():
    view = make_view(ViewShape(rows=rows((1, 6)), captured=True), 1, CPU, torch.float32)
    q = torch.randn(1, 4, 16)
    k, v = torch.randn(2, 1, 2, 16).unbind(0)
    write_kv(k, v, view, 0)
    long = paged_attention(q, view, 0, 0.25)
    view.computed_B.fill_(3)
    view.slots_T.copy_(view.page_table_BN[:, 0] * 4 + 3)
    write_kv(k, v, view, 0)
    short = paged_attention(q, view, 0, 0.25)
    fresh = paged_attention(q, replace(view), 0, 0.25)
    assert torch.equal(short, fresh)
    assert not torch.allclose(short, long)
    assert torch.equal(view.k_LPKSD[0, view.page_table_BN[0, 0].long(), :, 3], k[0])


def test_a_copied_view_has_a_memo_of_its_own():
    view = make_view(ViewShape(rows=rows((1, 6))), 1, CPU, torch.float32)
    paged_attention(torch.randn(1, 4, 16), view, 0, 0.25)
    assert replace(view).memo == {}


def test_decode_rows_are_grouped_so_that_their_keys_fit_the_cache():
    assert _cuts([5, 5, 5], None) == [3]
    assert _cuts([5, 5, 5], 10) == [2, 3]
    assert _cuts([100, 1, 1, 1], 10) == [1, 4]
    assert _cuts([], 10) == [0]


def test_groups_of_decode_rows_compute_what_one_group_does(monkeypatch):
    shape = ViewShape(rows=rows((1, 9), (1, 2), (1, 30), (1, 4)))
    view = make_view(shape, 1, CPU, torch.float32)
    q = torch.randn(4, 4, 16)
    together = paged_attention(q, view, 0, 0.25)
    monkeypatch.setattr("kestrel.ops.paged_attention.CACHE_NUMBERS", 20 * 2 * 16)
    grouped = replace(view)
    assert torch.allclose(paged_attention(q, grouped, 0, 0.25), together, atol=1e-6)
    assert len(grouped.memo["decode"]) == 3


def test_a_row_of_a_deterministic_launch_is_computed_as_if_it_were_alone():
    lengths = (3, 70, 40, 200, 64, 1)
    view = make_view(ViewShape(rows=rows(*((1, length) for length in lengths))), 1, CPU, torch.float32)
    view = replace(view, limits=replace(view.limits, is_deterministic=True))
    q_THD = torch.randn((len(lengths), 4, 16), generator=torch.Generator().manual_seed(0))
    together = paged_attention(q_THD, view, 0, 0.25)
    for b, row in enumerate(view.extents):
        alone = replace(
            view,
            extents=(row,),
            page_table_BN=view.page_table_BN[b : b + 1],
            computed_B=view.computed_B[b : b + 1],
            slots_T=view.slots_T[b : b + 1],
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        )
        assert torch.equal(paged_attention(q_THD[b : b + 1], alone, 0, 0.25)[0], together[b]), row


def test_row_numbers_do_not_overflow_32_bits():
    table = torch.tensor([[2_000_000]], dtype=torch.int32)
    rows = rows_of_positions(table, torch.tensor([[3]]), 128, 16)
    assert rows[0, 127, 0] == (2_000_000 * 128 + 127) * 16 + 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("extents", [rows((1, 9), (1, 3)), rows((5, 4), (2, 0))])
def test_keys_and_values_may_be_kept_in_eight_bits(extents, dtype):
    shape = ViewShape(rows=extents)
    whole = make_view(shape, 1, CPU, torch.float32)
    pools = [whole.k_LPKSD.nan_to_num(0.0).to(dtype), whole.v_LPKSD.nan_to_num(0.0).to(dtype)]
    small = replace(whole, k_LPKSD=pools[0], v_LPKSD=pools[1])
    k, v = (
        normal(seed, (shape.tokens, shape.kv_heads, shape.head_dim), CPU, torch.float32) for seed in (2, 3)
    )
    q = normal(4, (shape.tokens, shape.heads, shape.head_dim), CPU, torch.float32)
    write_kv(k, v, small, 1)
    seen = replace(whole, k_LPKSD=small.k_LPKSD.float(), v_LPKSD=small.v_LPKSD.float())
    assert torch.equal(paged_attention(q, small, 1, 0.3), paged_attention(q, seen, 1, 0.3))
    place = whole.slots_T[0]
    page, offset = divmod(int(place), whole.page_size)
    assert torch.equal(seen.k_LPKSD[1, page, :, offset], k[0].to(dtype).float())
