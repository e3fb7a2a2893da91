"""Layers over recurrent and cross state."""

from dataclasses import replace

import pytest
import torch

from kestrel.layers import CrossAttention, GatedDelta, MixerWeights
from kestrel.ops import OPS, resolve_ops
from kestrel.ops.recurrent_cases import RecurrentShape, make_recurrent_view
from kestrel.spi.batch import Batch, Limits, RowExtent

TABLE = resolve_ops()
CPU = torch.device("cpu")
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, LENGTH = 2, 4, 8, 6, 9
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM


def batch_of(view, count):
    none = torch.zeros(count, dtype=torch.int64)
    return Batch(
        ids_T=none,
        aux_TW=none.view(count, 1)[:, :0],
        media_rows_T=none - 1,
        positions_PT=none.unsqueeze(0),
        cu_seqlens=view.cu_seqlens,
        states={"delta": view, "cross": view},
        adapter_slots_B=torch.zeros(1, dtype=torch.int64),
        limits=view.limits,
        extents=view.extents,
    )


def run_mixer(sizes):
    """A mixer over ``sizes`` launches of one sequence: outputs, and the live state afterwards."""
    generator = torch.Generator().manual_seed(3)
    qkv, z = (torch.randn(LENGTH, n, generator=generator) for n in (CHANNELS, HEADS * VALUE_DIM))
    a, b = (torch.randn(LENGTH, HEADS, generator=generator) for _ in range(2))
    weights = MixerWeights(
        conv_CW=torch.randn(CHANNELS, 4, generator=generator),
        a_log_H=torch.randn(HEADS, generator=generator),
        dt_bias_H=torch.randn(HEADS, generator=generator),
        norm_E=torch.randn(VALUE_DIM, generator=generator),
    )
    layer = GatedDelta(TABLE, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, "delta", 1)
    spec = GatedDelta.state_spec("delta", 2, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)
    parts = {part.name: (part.shape, torch.float32) for part in spec.parts}
    view = make_recurrent_view(RecurrentShape(lens=(1,)), parts, 1, CPU)
    outs, done = [], 0
    for size in sizes:
        now = slice(done, done + size)
        limits = Limits(max_rows=1, max_tokens=size, max_query_len=size, max_context_len=LENGTH)
        cu = torch.tensor([0, size], dtype=torch.int32)
        launch = replace(view, cu_seqlens=cu, extents=(RowExtent(size, done),), limits=limits)
        gated = z[now].view(size, HEADS, VALUE_DIM)
        outs.append(layer(qkv[now], gated, a[now], b[now], batch_of(launch, size), weights))
        done += size
    return torch.cat(outs), {name: pool[1, int(view.slots_B[0])] for name, pool in view.parts.items()}


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [4, 5], [6, 1, 1, 1]])
def test_mixer_steps_equal_one_prefill(sizes):
    out, state = run_mixer(sizes)
    want, want_state = run_mixer([LENGTH])
    assert torch.allclose(out, want, atol=1e-5)
    for name in state:
        assert torch.allclose(state[name], want_state[name], atol=1e-5)


def test_cross_attention_layer_reads_the_entries_it_wrote():
    case = next(case for case in OPS["cross_attention"].cases() if case.name == "decode")
    q, view, _, scale = case.make(1, CPU, torch.float32).args
    lengths = view.lens_B.tolist()
    layer = CrossAttention(TABLE, 4, 4, 16, "cross", 1, 12)
    k, v = torch.randn(2, sum(lengths), 4, 16).unbind(0)
    layer.write(k, v, lengths, {"cross": view})
    out = layer(q, batch_of(view, len(lengths)))
    weights = torch.softmax(torch.einsum("hd,jhd->hj", q[0], k[: lengths[0]]) * scale, -1)
    assert torch.allclose(out[0], torch.einsum("hj,jhd->hd", weights, v[: lengths[0]]), atol=1e-5)
