"""Attention kernels on launches that serving makes: long beside short rows, padding, dead rows, windows, ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kestrel.ops.cross_attention import cross_attention as cross_reference
from kestrel.ops.decode_attention import decode_attention as step_reference
from kestrel.ops.paged_attention import paged_attention as paged_reference
from kestrel.ops.random import normal
from kestrel.ops.rope import random_angles
from kestrel.ops.view_cases import ViewShape, make_view
from kestrel.ops.vision_attention import vision_attention as vision_reference
from kestrel.spi import No, OpQuery
from kestrel.spi.batch import CrossView, Limits, PagedView, RowExtent
from kestrel_kernels_cuda import attention_cross, attention_paged, attention_step, attention_vision
from kestrel_kernels_cuda.attention_configs import decode_config, split_of
from kestrel_kernels_cuda.devices import Device, as_if

F32 = torch.float32
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def seed() -> int:
    return int(torch.randint(2**31, ()))


def launch(shape: ViewShape, place: torch.device, **changes: object) -> tuple[torch.Tensor, PagedView]:
    view = make_view(shape, seed(), place, F32)
    q = normal(seed(), (shape.tokens, shape.heads, shape.head_dim), place, F32)
    limits = replace(view.limits, **changes)
    return q, replace(view, limits=limits, extents=None if shape.captured else view.extents)


def rows(*extents: tuple[int, int]) -> tuple[RowExtent, ...]:
    return tuple(RowExtent(query_len, computed) for query_len, computed in extents)


def assert_agrees(shape: ViewShape, place: torch.device, **changes: object) -> None:
    q, view = launch(shape, place, **changes)
    count = shape.tokens - shape.spare_tokens
    got = attention_paged.paged_attention(q, view, 1, 0.2, shape.softcap)
    want = paged_reference(q, view, 1, 0.2, shape.softcap)
    torch.testing.assert_close(got[:count], want[:count], **CLOSE)


LONG_AND_SHORT = rows((1, 3), (1, 700), (1, 0), (1, 129), (1, 64))


@pytest.mark.parametrize("head_dim", [16, 40, 72])
def test_decode_of_one_long_row_among_short_ones(place: torch.device, head_dim: int) -> None:
    assert_agrees(ViewShape(rows=LONG_AND_SHORT, page_size=16, heads=6, kv_heads=2, head_dim=head_dim), place)


def test_decode_with_a_ceiling_far_above_every_length(place: torch.device) -> None:
    shape = ViewShape(rows=LONG_AND_SHORT, page_size=16, captured=True)
    q, view = launch(shape, place, max_context_len=100_000)
    want = paged_reference(q, replace(view, limits=replace(view.limits, max_context_len=701)), 0, 0.2)
    torch.testing.assert_close(attention_paged.paged_attention(q, view, 0, 0.2), want, **CLOSE)


@pytest.mark.parametrize("window", [1, 33, 200])
def test_decode_in_a_window_with_a_softcap(place: torch.device, window: int) -> None:
    assert_agrees(ViewShape(rows=LONG_AND_SHORT, page_size=16, window=window, softcap=5.0), place)


@pytest.mark.parametrize("extents", [LONG_AND_SHORT, rows((60, 80), (3, 50))], ids=["decode", "prefill"])
def test_what_lies_behind_a_window_is_not_read(place: torch.device, extents: tuple[RowExtent, ...]) -> None:
    q, view = launch(ViewShape(rows=extents, page_size=16, window=40), place)
    want = paged_reference(q, view, 0, 0.2)
    view.k_LPKSD[:, 0] = float("nan")
    view.v_LPKSD[:, 0] = float("nan")
    torch.testing.assert_close(attention_paged.paged_attention(q, view, 0, 0.2), want, **CLOSE)


@pytest.mark.parametrize("extents", [LONG_AND_SHORT, rows((60, 80), (3, 50))], ids=["decode", "prefill"])
def test_keys_and_values_may_be_kept_in_eight_bits(
    place: torch.device, extents: tuple[RowExtent, ...]
) -> None:
    q, view = launch(ViewShape(rows=extents, page_size=16), place)
    k, v = (pool.nan_to_num(0.0).to(torch.float8_e4m3fn) for pool in (view.k_LPKSD, view.v_LPKSD))
    want = paged_reference(q, replace(view, k_LPKSD=k.to(F32), v_LPKSD=v.to(F32)), 0, 0.2)
    got = attention_paged.paged_attention(q, replace(view, k_LPKSD=k, v_LPKSD=v), 0, 0.2)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("heads", [2, 20])
def test_the_last_block_of_a_row_joins_them_all(place: torch.device, heads: int) -> None:
    q, view = launch(ViewShape(rows=LONG_AND_SHORT, page_size=16, heads=heads, captured=True), place)
    for layer in (0, 1, 0) if heads == 2 else (1,):  # arrivals are counted afresh each time
        got = attention_paged.paged_attention(q, view, layer, 0.2)
        torch.testing.assert_close(got, paged_reference(q, view, layer, 0.2), **CLOSE)
    assert not view.memo["arrivals"].any()


@pytest.mark.parametrize("window", [None, 1, 64, 90])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_writes_its_newest_keys_and_attends_to_them(
    place: torch.device, window: int | None, deterministic: bool
) -> None:
    shape = ViewShape(rows=LONG_AND_SHORT, page_size=16, heads=6, head_dim=32, window=window, gated=True)
    q, k, v = (normal(seed(), (5, heads, 32), place, F32) for heads in (6, 2, 2))
    cos, sin = random_angles(seed(), 5, 16, place)
    weights = [normal(seed(), (32,), place, F32) for _ in "qk"]
    gate = normal(seed(), (5, 6, 2, 32), place, F32)[:, :, 1]
    views = [launch(shape, place, is_deterministic=deterministic)[1]]
    copies = (views[0].k_LPKSD.clone(), views[0].v_LPKSD.clone())
    views.append(replace(views[0], k_LPKSD=copies[0], v_LPKSD=copies[1]))
    for layer in (0, 1):
        args = [(q, k, v, view, layer, 0.2, cos, sin, *weights, 1e-6, None, gate) for view in views]
        got = attention_step.decode_attention(*args[0], add_one=True)
        want = step_reference(*args[1], add_one=True)
        torch.testing.assert_close(got, want, **CLOSE)
    for pools in zip(*((view.k_LPKSD, view.v_LPKSD) for view in views), strict=True):
        torch.testing.assert_close(*pools, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("window", [None, 90])
def test_a_deterministic_row_has_the_same_bits_alone_and_among_others(
    place: torch.device, window: int | None
) -> None:
    shape = ViewShape(rows=LONG_AND_SHORT, page_size=16, window=window)
    q, view = launch(shape, place, is_deterministic=True)
    together = attention_paged.paged_attention(q, view, 0, 0.2)
    for b, row in enumerate(shape.rows):
        limits = replace(view.limits, max_rows=1, max_tokens=1, max_context_len=row.computed + 1)
        alone = replace(
            view,
            page_table_BN=view.page_table_BN[b : b + 1],
            computed_B=view.computed_B[b : b + 1],
            cu_seqlens=view.cu_seqlens[:2],
            limits=limits,
        )
        assert torch.equal(attention_paged.paged_attention(q[b : b + 1], alone, 0, 0.2)[0], together[b]), row


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of the dead row
def test_dead_rows_read_the_scratch_page_and_harm_nobody(place: torch.device) -> None:
    q, view = launch(ViewShape(rows=rows((1, 40), (1, 0), (1, 9)), page_size=16), place)
    view.k_LPKSD[:, 0] = float("nan")
    view.v_LPKSD[:, 0] = float("nan")
    want = paged_reference(q, view, 0, 0.2)
    view.page_table_BN[1] = 0
    got = attention_paged.paged_attention(q, view, 0, 0.2)
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]], **CLOSE)


@pytest.mark.parametrize("captured", [False, True])
def test_prefill_of_prefixes_ranges_and_empty_rows(place: torch.device, captured: bool) -> None:
    extents = (
        RowExtent(150, 0, ((3, 140),)), RowExtent(0, 0), RowExtent(7, 90), RowExtent(1, 33),
        RowExtent(40, 61, ((64, 70), (80, 99))),
    )  # fmt: skip
    assert_agrees(
        ViewShape(rows=extents, page_size=16, captured=captured, spare_tokens=5 if captured else 0), place
    )


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # NumPy's, of the faulty sequence
@pytest.mark.parametrize(
    ("dtype", "pool", "window"),
    [
        (torch.bfloat16, torch.bfloat16, None),
        (F32, torch.float8_e4m3fn, None),
        (F32, torch.float8_e4m3fn, 40),
    ],
)
def test_prefill_reads_its_own_keys_from_rows_and_earlier_ones_from_pages(
    place: torch.device, dtype: torch.dtype, pool: torch.dtype, window: int | None
) -> None:
    extents = (RowExtent(150, 0, ((3, 140),)), RowExtent(70, 90), RowExtent(9, 33), RowExtent(1, 64))
    shape = ViewShape(rows=extents, page_size=16, window=window, captured=True, spare_tokens=5)
    view = make_view(shape, seed(), place, dtype)
    view = replace(view, k_LPKSD=view.k_LPKSD.to(pool), v_LPKSD=view.v_LPKSD.to(pool))
    q = normal(seed(), (shape.tokens, 4, 16), place, dtype)
    k = normal(seed(), (shape.tokens, 2, 16), place, dtype)
    v = normal(seed(), (shape.tokens, 3, 2, 16), place, dtype)[:, 1]
    want = paged_reference(q, view, 1, 0.2, None, None, k, v)
    nothing = torch.full((2, 2, 16), float("nan"), device=place).to(pool)
    for slot in view.slots_T[: shape.tokens - 5].tolist():  # what pages hold of this launch is not read
        for pages in (view.k_LPKSD, view.v_LPKSD):
            pages[:, slot // 16, :, slot % 16] = nothing
    with as_if(Device(90)):
        got = attention_paged.paged_attention(q, view, 1, 0.2, None, None, k, v)
    close = CLOSE if dtype == F32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got[:-5], want[:-5], **close)
    k[:150] = v[:150] = float("nan")
    with as_if(Device(90)):
        faulty = attention_paged.paged_attention(q, view, 1, 0.2, None, None, k, v)
    assert torch.equal(faulty[150:-5], got[150:-5])


@pytest.mark.parametrize("window", [1, 20, 64])
def test_prefill_in_a_window(place: torch.device, window: int) -> None:
    extents = (RowExtent(100, 70, ((80, 130),)), RowExtent(3, 0))
    assert_agrees(ViewShape(rows=extents, page_size=16, window=window, heads=4, kv_heads=4), place)


@pytest.mark.parametrize("heads", [2, 6, 8])
def test_short_prefill_packs_the_heads_of_a_group(place: torch.device, heads: int) -> None:
    shape = ViewShape(rows=rows((5, 130), (12, 0), (2, 63)), page_size=16, heads=heads)
    config = attention_paged.prefill_config(90, 16, heads // 2, 2, launch(shape, place)[1].limits)
    assert config.packed
    q, view = launch(shape, place)
    keys = attention_paged.Keys(
        k_PKSD=view.k_LPKSD[1], v_PKSD=view.v_LPKSD[1], table_BN=view.page_table_BN, lens_B=view.computed_B,
        new=0, page=16,
    )  # fmt: skip
    got, launches = attention_paged.prefill_launch(
        q, keys, view.cu_seqlens, None, True, 0.2, None, None, config
    )
    for one in launches:
        one.run()
    torch.testing.assert_close(got, paged_reference(q, view, 1, 0.2), **CLOSE)


def cross_view(place: torch.device, lens: list[int], new: list[int], spare: int) -> CrossView:
    k, v = (normal(seed(), (2, len(lens) + 2, 3, 130, 16), place, F32) for _ in "kv")
    starts = [sum(new[:b]) for b in range(len(new) + 1)]
    limits = Limits(
        max_rows=len(lens), max_tokens=starts[-1] + spare, max_query_len=max(new), max_context_len=1
    )
    return CrossView(
        k_LEKSD=k,
        v_LEKSD=v,
        entries_B=torch.randperm(len(lens) + 1, device=place)[: len(lens)] + 1,
        lens_B=torch.tensor(lens, dtype=torch.int32, device=place),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=place),
        limits=limits,
    )


@pytest.mark.parametrize(("new", "spare"), [([1, 1, 1, 1], 0), ([4, 1, 0, 70], 3), ([4, 4, 2, 4], 0)])
def test_cross_attention_sees_an_entry_up_to_its_length(
    place: torch.device, new: list[int], spare: int
) -> None:
    view = cross_view(place, [130, 1, 64, 65], new, spare)
    q = normal(seed(), (sum(new) + spare, 6, 16), place, F32)
    count = sum(new)
    got = attention_cross.cross_attention(q, view, 1, 0.25)[:count]
    torch.testing.assert_close(got, cross_reference(q, view, 1, 0.25)[:count], **CLOSE)


@pytest.mark.parametrize("dim", [24, 64, 72, 88])
def test_vision_attention_of_slices_of_one_projection(place: torch.device, dim: int) -> None:
    q, k, v = normal(seed(), (2, 150, 3, 2, dim), place, F32).unbind(2)
    got = attention_vision.vision_attention(q, k.contiguous(), v, 0.1)
    torch.testing.assert_close(got, vision_reference(q, k, v, 0.1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [64, 72, 88])
def test_vision_attention_reads_keys_through_descriptors(place: torch.device, dim: int) -> None:
    q, k, v = normal(seed(), (2, 150, 3, 2, dim), place, torch.bfloat16).unbind(2)
    config = attention_vision.VisionConfig(tile=(64, 64, 4, 2), is_described=True)
    out, launched = attention_vision.vision_launch(q, k, v, 0.1, config)
    assert any(isinstance(arg, TensorDescriptor) for arg in launched.args)
    launched.run()
    want = vision_reference(q.float(), k.float(), v.float(), 0.1)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


def test_splits_depend_on_the_bucket_and_never_exceed_what_is_launched() -> None:
    limits = Limits(max_rows=1, max_tokens=1, max_query_len=1, max_context_len=1100)
    tiles = decode_config(90, 256, 4, 2, limits, 4, 132)
    assert split_of(limits, 1, 4, 1100, tiles, 132).splits == 18  # of at least 64 keys
    assert split_of(limits, 64, 4, 1100, tiles, 132).splits == 1  # a block a processor without splitting
    assert split_of(limits, 64, 4, 100_000, tiles, 132).splits == 16  # idle blocks are bounded
    always = replace(limits, is_deterministic=True)
    assert split_of(always, 64, 4, 1100, tiles, 132) == split_of(always, 1, 4, 1100, tiles, 132)


def test_blocks_of_a_tile_or_two_do_not_read_ahead() -> None:
    limits = Limits(max_rows=1, max_tokens=1, max_query_len=1, max_context_len=1100)
    stages = [decode_config(90, 64, 1, 2, limits, 20 * rows, 132).stages for rows in (1, 64)]
    assert stages == [1, 3]
    short = replace(limits, max_context_len=448)
    assert decode_config(90, 64, 1, 2, short, 20 * 64, 132).stages == 1
    always = replace(short, is_deterministic=True)
    assert decode_config(90, 64, 1, 2, always, 20, 132) == decode_config(90, 64, 1, 2, always, 20 * 64, 132)


def test_heads_wider_than_the_kernels_are_declined_with_a_reason() -> None:
    query = OpQuery.of(
        "paged_attention", mode="decode", heads=4, kv_heads=2, head_dim=576, page=16, dtype="bfloat16"
    )
    answer = attention_paged.IMPLS["paged_attention"].supports(query)
    assert isinstance(answer, No)
    assert "576" in answer.reason


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_warm_up_names_each_kernel_once(mode: str) -> None:
    query = OpQuery.of(
        "paged_attention", mode=mode, heads=16, kv_heads=4, head_dim=256, page=16, dtype="bfloat16", window=None,
        softcap=False, gated=True,
    )  # fmt: skip
    with as_if(Device(90)):
        jobs = list(attention_paged.IMPLS["paged_attention"].warm(query, (16, 64, 4096)))
    # decode with few rows, some or many: split, whole, and split. prefill: two tiles, with and without ranges
    assert len(jobs) == (5 if mode == "decode" else 4)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton compiles from now on."""
    names: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **about: names.append(about["fn"].name)
    )
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_launch_runs_what_warm_up_compiled(place: torch.device, compiled: list[str], mode: str) -> None:
    shape = ViewShape(
        rows=rows((1, 700), (1, 3)) if mode == "decode" else rows((70, 61), (300, 0)),
        heads=16, kv_heads=4, head_dim=256, page_size=16, layers=3, gated=True,
    )  # fmt: skip
    query = OpQuery.of("paged_attention", dtype="bfloat16", **shape.attention_facts())
    for job in attention_paged.IMPLS["paged_attention"].warm(query, (512, 2048)):
        job()
    compiled.clear()
    view = make_view(shape, seed(), place, torch.bfloat16)
    q, gate = normal(seed(), (shape.tokens, 16, 2, 256), place, torch.bfloat16).unbind(2)
    lens = torch.cat([view.computed_B.new_zeros(1), view.computed_B])[1:]  # at no round address
    attention_paged.paged_attention(q.contiguous(), replace(view, computed_B=lens), 1, 0.06, None, gate)
    assert not compiled


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 64])
def test_a_step_runs_what_warm_up_compiled(place: torch.device, compiled: list[str], count: int) -> None:
    shape = ViewShape(rows=rows(*[(1, 700)] * count), heads=16, kv_heads=4, head_dim=256, page_size=16)
    facts = {
        **shape.attention_facts(),
        "gated": True,
        "rot_dim": 64,
        "norm": "rms_plus_one",
        "dtype": "bfloat16",
    }
    for job in attention_step.IMPLS["decode_attention"].warm(
        OpQuery.of("decode_attention", **facts), (count,)
    ):
        job()
    compiled.clear()
    view = make_view(shape, seed(), place, torch.bfloat16)
    packed = normal(seed(), (count, 16 * 512 + 8 * 256), place, torch.bfloat16)
    both, k, v = packed.split([16 * 512, 4 * 256, 4 * 256], dim=1)
    q, gate = both.view(count, 16, 2, 256).unbind(2)
    k, v = (x.unflatten(1, (4, 256)) for x in (k, v))
    angles = random_angles(seed(), count, 64, place)
    weight = normal(seed(), (256,), place, torch.bfloat16)
    attention_step.decode_attention(
        q, k, v, view, 1, 0.06, *angles, weight, weight, 1e-6, None, gate, add_one=True
    )
    assert not compiled


@pytest.mark.gpu
def test_vision_attention_runs_what_warm_up_compiled(place: torch.device, compiled: list[str]) -> None:
    query = OpQuery.of("vision_attention", dtype="bfloat16", heads=16, head_dim=72)
    for job in attention_vision.IMPLS["vision_attention"].warm(query, ()):
        job()
    compiled.clear()
    q, k, v = normal(seed(), (3, 729, 3, 16, 72), place, torch.bfloat16).unbind(2)
    attention_vision.vision_attention(q, k, v, 0.1)
    assert not compiled
