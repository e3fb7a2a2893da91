"""The chunked form against the recurrent one, and states that continue across launches."""

from dataclasses import replace

import pytest
import torch

from kestrel.ops.causal_conv import causal_conv
from kestrel.ops.gated_delta import Tokens, chunked_rule, gated_delta, recurrent_rule
from kestrel.ops.recurrent_cases import RecurrentShape, make_recurrent_view
from kestrel.spi.batch import Limits, RowExtent

CPU, BF16 = torch.device("cpu"), torch.bfloat16
B, H, D, E = 2, 3, 8, 6
PARTS = {"state": ((4, 8, 6), torch.float32)}


def random_tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        torch.nn.functional.normalize(torch.randn(B, H, count, D, generator=generator), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(B, H, count, E, generator=generator)
    gate = -torch.rand(B, H, count, generator=generator) * 2
    return Tokens(q, k, v, gate, torch.rand(B, H, count, generator=generator)), torch.randn(B, H, D, E)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunked_and_recurrent_forms_agree(count, chunk):
    tokens, state = random_tokens(count)
    out, last = chunked_rule(tokens, state, chunk=chunk)
    want, want_last = recurrent_rule(tokens, state)
    assert torch.allclose(out, want, atol=2e-5)
    assert torch.allclose(last, want_last, atol=2e-5)


def test_strong_decay_neither_overflows_nor_loses_the_newest_token():
    tokens, state = random_tokens(64)
    tokens = tokens._replace(gate=tokens.gate * 100)
    out, last = chunked_rule(tokens, state)
    want, want_last = recurrent_rule(tokens, state)
    assert out.isfinite().all()
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(last, want_last, atol=1e-5)


def test_tokens_without_gate_and_beta_leave_the_state_as_it_is():
    tokens, state = random_tokens(5)
    idle = tokens._replace(gate=torch.zeros_like(tokens.gate), beta=torch.zeros_like(tokens.beta))
    assert torch.allclose(chunked_rule(idle, state)[1], state)


@pytest.mark.parametrize("sizes", [[9], [4, 5], [1] * 9, [3, 1, 1, 4]])
def test_delta_and_conv_continue_across_launches(sizes):
    """Outputs and final states of 9 tokens do not depend on how launches split them."""
    shape = RecurrentShape(lens=(9,))
    parts = {"state": ((4, 8, 6), torch.float32), "conv": ((10, 3), torch.float32)}
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(9, 2, 8, generator=generator) for _ in range(2))
    v, x = torch.randn(9, 4, 6, generator=generator), torch.randn(9, 10, generator=generator)
    gate, beta = -torch.rand(9, 4, generator=generator), torch.rand(9, 4, generator=generator)
    weight = torch.randn(10, 4, generator=generator)
    whole = make_recurrent_view(shape, parts, 1, CPU)
    want = gated_delta(q, k, v, gate, beta, whole, 1), causal_conv(x, weight, None, whole, 1)
    view = make_recurrent_view(shape, parts, 1, CPU)
    outs, convs, done = [], [], 0
    for size in sizes:
        now = slice(done, done + size)
        launch = replace(
            view,
            cu_seqlens=torch.tensor([0, size], dtype=torch.int32),
            extents=(RowExtent(size, done),),
            limits=Limits(max_rows=1, max_tokens=size, max_query_len=size, max_context_len=9),
        )
        outs.append(gated_delta(q[now], k[now], v[now], gate[now], beta[now], launch, 1))
        convs.append(causal_conv(x[now], weight, None, launch, 1))
        done += size
    assert torch.allclose(torch.cat(outs), want[0], atol=1e-5)
    assert torch.allclose(torch.cat(convs), want[1], atol=1e-5)
    slot = int(view.slots_B[0])
    for name in parts:
        assert torch.allclose(view.parts[name][1, slot], whole.parts[name][1, slot], atol=1e-5)


def test_a_checkpoint_equals_the_state_of_a_shorter_run():
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(70, 2, 8, generator=generator) for _ in range(2))
    v = torch.randn(70, 4, 6, generator=generator)
    gate, beta = -torch.rand(70, 4, generator=generator), torch.rand(70, 4, generator=generator)
    long = make_recurrent_view(RecurrentShape(lens=(70,), stores=((0, 66),)), PARTS, 1, CPU)
    live, stored = int(long.slots_B[0]), int(long.stores[0, 2])
    short = make_recurrent_view(RecurrentShape(lens=(66,)), PARTS, 1, CPU)
    short.parts["state"][1, int(short.slots_B[0])] = long.parts["state"][1, live]
    gated_delta(q, k, v, gate, beta, long, 1)
    gated_delta(q[:66], k[:66], v[:66], gate[:66], beta[:66], short, 1)
    assert torch.allclose(
        long.parts["state"][1, stored], short.parts["state"][1, int(short.slots_B[0])], atol=1e-5
    )


@pytest.mark.parametrize("lens", [(1, 1), (9, 2, 0, 20)], ids=["decode", "prefill"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_state_of_sixteen_bits_is_rounded_and_nothing_else(lens, captured):
    shape = RecurrentShape(lens=lens, stores=((0, 1),), captured=captured)
    generator = torch.Generator().manual_seed(7)
    count = sum(lens)
    q, k, v = (torch.randn(count, 3, n, generator=generator) for n in (8, 8, 6))
    gate, beta = -torch.rand(count, 3, generator=generator), torch.rand(count, 3, generator=generator)
    views = [
        make_recurrent_view(shape, {"state": ((3, 8, 6), dtype)}, 3, CPU) for dtype in (BF16, torch.float32)
    ]
    views[1].parts["state"].copy_(views[0].parts["state"])
    got, want = (gated_delta(q, k, v, gate, beta, view, 1) for view in views)
    assert torch.equal(got, want)
    rounded = views[1].parts["state"].to(BF16)
    torch.testing.assert_close(views[0].parts["state"], rounded, rtol=0, atol=0, equal_nan=True)
