"""A small block of real layers run through pages: batched, chunked and captured runs equal one plain pass."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kestrel.layers import Angles, PagedAttention, Rope, VisionAttention
from kestrel.ops import OPS as OPS_BY_NAME
from kestrel.ops import resolve_ops
from kestrel.ops.view_cases import ViewShape, make_view
from kestrel.spi import Available, Impl, KernelBackend, Yes
from kestrel.spi.batch import Batch, RowExtent
from kestrel.testing.capture import CaptureGuard

OPS = resolve_ops()
H, K, D, LENGTH, PAGE = 4, 2, 16, 11, 4


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(LENGTH, heads, D, generator=generator) for heads in (H, K, K)]


def batch_of(view, computed, count):
    none = torch.zeros(count, dtype=torch.int64)
    return Batch(
        ids_T=none,
        aux_TW=none.view(count, 1)[:, :0],
        media_rows_T=none - 1,
        positions_PT=torch.arange(computed, computed + count).unsqueeze(0),
        cu_seqlens=view.cu_seqlens,
        states={"kv": view},
        adapter_slots_B=torch.zeros(1, dtype=torch.int64),
        limits=view.limits,
        extents=view.extents,
    )


def run_chunks(layer, qkv, sizes, *, captured=False, use_rope=False, weights=(None, None)):
    """One sequence through ``layer`` in chunks of ``sizes``, over one pool: outputs [LENGTH, H, D]."""
    k_pool, v_pool = (torch.full((2, 8, K, PAGE, D), float("nan")) for _ in range(2))
    outs, done = [], 0
    rope = Rope(OPS, D, layer.rot_dim or D)
    for size in sizes:
        shape = ViewShape(
            rows=(RowExtent(size, done),), heads=H, kv_heads=K, head_dim=D, page_size=PAGE, captured=captured
        )
        view = make_view(shape, 3, torch.device("cpu"), torch.float32)
        table = torch.arange(1, view.page_table_BN.shape[1] + 1)
        at = torch.arange(done, done + size)
        view = replace(
            view,
            k_LPKSD=k_pool,
            v_LPKSD=v_pool,
            page_table_BN=table.to(torch.int32).unsqueeze(0),
            slots_T=table[at // PAGE] * PAGE + at % PAGE,
        )
        batch = batch_of(view, done, size)
        angles = rope(batch.positions_PT) if use_rope else None
        with CaptureGuard() if captured else torch.no_grad():
            outs.append(layer(*(x[done : done + size] for x in qkv), batch, angles, *weights))
        done += size
    return torch.cat(outs)


def plain(q, k, v):
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("sizes", [[LENGTH], [4, 7], [1] * LENGTH, [6, 1, 1, 3]])
def test_chunks_and_single_steps_equal_one_causal_pass(qkv, sizes, captured):
    layer = PagedAttention(OPS, H, K, D, "kv", 1, page_size=PAGE)
    out = run_chunks(layer, qkv, sizes, captured=captured)
    assert torch.allclose(out, plain(*qkv), atol=1e-5)


@pytest.mark.parametrize("sizes", [[LENGTH], [4, 7], [5] + [1] * 6])
def test_fused_norm_and_rope_equal_the_separate_ones(qkv, sizes):
    q, k, v = qkv
    weights = torch.randn(2, D).unbind(0)
    layer = PagedAttention(OPS, H, K, D, "kv", 0, rot_dim=8, qk_norm="rms", page_size=PAGE)
    out = run_chunks(layer, qkv, sizes, use_rope=True, weights=weights)
    rope = Rope(OPS, D, 8)
    angles: Angles = rope(torch.arange(LENGTH).unsqueeze(0))
    q, k = (rope.rotate(F.rms_norm(x, (D,), w, 1e-6), angles) for x, w in ((q, weights[0]), (k, weights[1])))
    assert torch.allclose(out, plain(q, k, v), atol=1e-5)


class Fused(KernelBackend):
    """A backend whose one op is the reference, and which counts how often it is called."""

    name = "fused"

    def __init__(self):
        self.calls = 0

    def probe(self, device):
        return Available()

    def impls(self):
        return {"decode_attention": Impl(supports=lambda query: Yes(), fn=self.attend)}

    def attend(self, *args, **kwargs):
        self.calls += 1
        return OPS_BY_NAME["decode_attention"].reference(*args, **kwargs)


def test_decode_is_one_op_where_a_backend_has_it(qkv):
    backend = Fused()
    weights = torch.randn(2, D).unbind(0)
    outs = []
    for table in (OPS, resolve_ops(backends=[backend])):
        layer = PagedAttention(table, H, K, D, "kv", 0, rot_dim=8, qk_norm="rms_plus_one", page_size=PAGE)
        outs.append(run_chunks(layer, qkv, [8, 1, 1, 1], use_rope=True, weights=weights))
    assert backend.calls == 3
    assert torch.equal(*outs)
    assert not [row for row in table.rows() if row.query.get("mode") == "decode"]


def test_a_layer_without_keys_reads_what_an_earlier_one_wrote(qkv):
    writer = PagedAttention(OPS, H, K, D, "kv", 1, page_size=PAGE)
    view = make_view(ViewShape(rows=(RowExtent(LENGTH, 0),)), 3, torch.device("cpu"), torch.float32)
    batch = batch_of(view, 0, LENGTH)
    first = writer(*qkv, batch)
    reader = PagedAttention(OPS, H, K, D, "kv", 1, page_size=PAGE)
    assert torch.equal(reader(qkv[0], None, None, batch), first)


def test_vision_attention_stays_inside_an_item():
    layer = VisionAttention(OPS, 2, 8)
    q, k, v = torch.randn(3, 2, 5, 2, 8).unbind(0)
    both = layer(q, k, v)
    assert torch.allclose(both[:1], layer(q[:1], k[:1], v[:1]), atol=1e-6)
