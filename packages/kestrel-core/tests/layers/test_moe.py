"""Experts: what they compute, that blocks and batches do not show, and how checkpoints may store them."""

import pytest
import torch
import torch.nn.functional as F

from kestrel.layers import MLP, Experts, MoE, packed_parts
from kestrel.ops import resolve_ops
from kestrel.ops.grouped_experts import grouped_experts

OPS = resolve_ops()
DIM, HIDDEN, EXPERTS, TOP_K = 12, 10, 6, 2


@pytest.fixture
def moe():
    torch.manual_seed(0)
    layer = MoE(OPS, DIM, HIDDEN, EXPERTS, TOP_K)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return layer


def plain(moe, x):
    """Every expert on every token, weighted by what the router leaves."""
    p = F.linear(x, moe.gate.weight).softmax(-1)
    kept = torch.zeros_like(p).scatter(1, p.topk(TOP_K).indices, p.topk(TOP_K).values)
    kept = kept / kept.sum(-1, keepdim=True)
    gate_up = moe.experts.gate_up_proj.view(EXPERTS, 2, HIDDEN, DIM)
    down = moe.experts.down_proj.view(EXPERTS, DIM, HIDDEN)
    each = [
        F.linear(F.silu(x @ gate.T) * (x @ up.T), down[e]) for e, (gate, up) in enumerate(gate_up.unbind(0))
    ]
    return (torch.stack(each, 1) * kept.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("tokens", [1, 2, 7, 200])
def test_a_mixture_is_the_weighted_sum_of_its_chosen_experts(moe, tokens):
    x = torch.randn(tokens, DIM)
    assert torch.allclose(moe(x), plain(moe, x), atol=1e-5)


def test_a_token_gets_the_same_alone_and_in_a_batch(moe):
    x = torch.randn(40, DIM)
    alone = torch.cat([moe(row[None]) for row in x])
    assert torch.allclose(moe(x), alone, atol=1e-6)


def test_no_tokens_give_no_outputs(moe):
    assert moe(torch.zeros(0, DIM)).shape == (0, DIM)


def test_experts_that_nobody_names_are_not_read(moe):
    gate_up = moe.experts.gate_up_proj.view(EXPERTS, 2 * HIDDEN, DIM).clone()
    gate_up[3] = float("nan")
    down = moe.experts.down_proj.view(EXPERTS, DIM, HIDDEN)
    chosen = torch.tensor([[0, 1], [5, 2], [1, 4]])
    out = grouped_experts(torch.randn(3, DIM), torch.full((3, 2), 0.5), chosen, gate_up, down)
    assert out.isfinite().all()


def test_a_checkpoint_may_hold_experts_one_by_one():
    parts = packed_parts(MoE(OPS, DIM, HIDDEN, EXPERTS, TOP_K))
    assert len(parts) == 3 * EXPERTS
    first, up, down = (parts[f"experts.2.{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert (first.target, first.start, first.end) == ("experts.gate_up_proj", 4 * HIDDEN, 5 * HIDDEN)
    assert (up.start, up.end) == (5 * HIDDEN, 6 * HIDDEN)
    assert (down.target, down.start, down.end) == ("experts.down_proj", 2 * DIM, 3 * DIM)


def test_a_gated_mlp_names_its_gate_and_up():
    parts = packed_parts(MLP(OPS, DIM, HIDDEN, activation="silu_mul", bias=False))
    assert {name: (p.target, p.start, p.end) for name, p in parts.items()} == {
        "fc1.gate.weight": ("fc1.weight", 0, HIDDEN),
        "fc1.up.weight": ("fc1.weight", HIDDEN, 2 * HIDDEN),
    }


def test_experts_can_be_built_without_memory():
    with torch.device("meta"):
        layer = Experts(OPS, 2048, 512, 256, 8)
    assert layer.gate_up_proj.is_meta


def test_a_shared_expert_is_added_through_its_gate():
    torch.manual_seed(1)
    layer = MoE(OPS, DIM, HIDDEN, EXPERTS, TOP_K, shared_hidden=7)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    x = torch.randn(5, DIM)
    shared = (x @ layer.shared_expert_gate.weight.T).sigmoid() * layer.shared_expert(x)
    assert torch.allclose(layer(x), plain(layer, x) + shared, atol=1e-5)
