"""gated_delta: the gated delta rule over ragged sequences with a constant-size state.

Letters: B sequences, T tokens, K key heads, H value heads, D key dim, E value dim, N tokens of one sequence, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.padding import padding_once
from kestrel.ops.random import normal, uniform
from kestrel.ops.recurrent_cases import RECURRENT_SHAPES, RecurrentShape, make_recurrent_view
from kestrel.ops.state_stores import Stores, stores_of_all, stores_of_row
from kestrel.spi.batch import RecurrentView

__all__ = ["GATED_DELTA", "Tokens", "chunked_rule", "gated_delta", "prepared", "recurrent_rule"]

CHUNK = 64  # tokens solved together: the triangular system grows with its square
RECURRENT_BELOW = 4  # up to here, token by token takes fewer operations than setting up a chunk


def gated_delta(
    q_TKD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_THE: torch.Tensor,
    gate_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    view: RecurrentView,
    layer: int,
    part: str = "state",
) -> torch.Tensor:
    """Outputs [T, H, E], of v's dtype, of the gated delta rule; each sequence's state is updated in place.

    Tokens of sequence ``b`` are rows ``cu_seqlens[b]:cu_seqlens[b + 1]``; its state S [H, D, E] is
    ``view.parts[part][layer, slots_B[b]]``, float32 whatever the input dtype (kept in 16 bits, it is rounded once a
    launch). Value head h uses key head h // (H / K).
    Per token: q and k are L2-normalised (1e-6 under the root), q is scaled by D^-0.5, then
    S ← exp(gate) S;  S ← S + k ⊗ beta (v − Sᵀk);  output Sᵀq.  ``gate`` is the log decay (<= 0), ``beta`` in (0, 1).
    Each entry (row, count, slot) of ``view.stores`` gets a copy of that row's state after its first ``count`` tokens;
    entries of count 0 (padding) write to scratch slot 0 alone.

    Source: Yang et al. 2024, arXiv 2412.06464, "Gated Delta Networks", the gated delta rule and its chunked form.
    """
    pool_SHDE = view.parts[part][layer]
    if v_THE.shape[0] == 0:
        return torch.empty_like(v_THE)
    wide = torch.promote_types(pool_SHDE.dtype, torch.float32)
    tokens = prepared(q_TKD, k_TKD, v_THE, gate_TH, beta_TH, wide)
    if view.limits.is_decode:
        out = _decode(tokens, view, pool_SHDE)
    elif view.extents is not None:
        out = _by_sequence(tokens, view, pool_SHDE)
    else:
        out = _padded(tokens, view, layer, pool_SHDE)
    return out.to(v_THE.dtype)


class Tokens(NamedTuple):
    """What the rule reads of some tokens, heads aligned and q and k normalised: q and k [..., D], v [..., E], gate and
    beta [...]. Leading axes are T, H in an op's order and B, H, N in a rule's; all float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
        """Each of the five changed."""
        return Tokens(*(change(x) for x in self))


def prepared(
    q_TKD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_THE: torch.Tensor,
    gate_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    dtype: torch.dtype,
) -> Tokens:
    """The op's inputs in ``dtype``: q and k normalised and repeated to H heads, q scaled."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q_TKD.to(dtype), k_TKD.to(dtype)))
    repeats = v_THE.shape[1] // q_TKD.shape[1]
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    return Tokens(q * q_TKD.shape[-1] ** -0.5, k, v_THE.to(dtype), gate_TH.to(dtype), beta_TH.to(dtype))


def _decode(tokens: Tokens, view: RecurrentView, pool_SHDE: torch.Tensor) -> torch.Tensor:
    out, state = delta_step(tokens, pool_SHDE.index_select(0, view.slots_B).to(tokens.v.dtype))
    state = state.to(pool_SHDE.dtype)
    pool_SHDE.index_copy_(0, view.slots_B, state)
    if view.stores.shape[0]:
        pool_SHDE.index_copy_(0, view.stores[:, 2], state.index_select(0, view.stores[:, 0]))
    return out


def _by_sequence(tokens: Tokens, view: RecurrentView, pool_SHDE: torch.Tensor) -> torch.Tensor:
    out_THE = torch.zeros_like(tokens.v)
    start = 0
    assert view.extents is not None
    for b, row in enumerate(view.extents):
        mine = slice(start, start + row.query_len)
        start = mine.stop
        if row.query_len:
            slot = view.slots_B[b : b + 1]
            rule = recurrent_rule if row.query_len < RECURRENT_BELOW else chunked_rule
            one = tokens.map(partial(_one_sequence, mine))
            before = pool_SHDE.index_select(0, slot).to(one.v.dtype)
            out, state = rule(one, before, stores_of_row(view, b, pool_SHDE))
            pool_SHDE.index_copy_(0, slot, state.to(pool_SHDE.dtype))
            out_THE[mine] = out[0].transpose(0, 1)
    return out_THE


def _one_sequence(rows: slice, x: torch.Tensor) -> torch.Tensor:
    return x[rows].transpose(0, 1).unsqueeze(0)


def _padded(tokens: Tokens, view: RecurrentView, layer: int, pool_SHDE: torch.Tensor) -> torch.Tensor:
    """Every sequence padded to the launch's ceiling; padding has gate 0 and beta 0."""
    padding = padding_once(view, layer, tokens.v.shape[0])
    padded = tokens.map(lambda x: padding.pad(x).transpose(1, 2))
    before = pool_SHDE.index_select(0, view.slots_B).to(padded.v.dtype)
    out, state = chunked_rule(padded, before, stores_of_all(view, pool_SHDE))
    pool_SHDE.index_copy_(0, view.slots_B, state.to(pool_SHDE.dtype))
    return padding.unpad(out.transpose(1, 2))


def delta_step(tokens: Tokens, state_BHDE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per sequence (axes B, H): outputs [B, H, E] and the new state."""
    state = state_BHDE * tokens.gate.exp()[..., None, None]
    delta = (tokens.v - (tokens.k.unsqueeze(-2) @ state).squeeze(-2)) * tokens.beta.unsqueeze(-1)
    state = state.addcmul_(tokens.k.unsqueeze(-1), delta.unsqueeze(-2))
    return (tokens.q.unsqueeze(-2) @ state).squeeze(-2), state


def recurrent_rule(
    tokens: Tokens, state_BHDE: torch.Tensor, stores: Stores | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, N, E] and the last state, token by token."""
    outs, state = [], state_BHDE
    for t, token in enumerate(zip(*(x.unbind(2) for x in tokens), strict=True)):
        out, state = delta_step(Tokens(*token), state)
        outs.append(out)
        if stores is not None:
            stores.write(t, t + 1, partial(_state_of, state))
    return torch.stack(outs, dim=2), state


def _state_of(state: torch.Tensor, rows_M: torch.Tensor, counts_M: torch.Tensor) -> torch.Tensor:
    return state.index_select(0, rows_M)


def chunked_rule(
    tokens: Tokens, state_BHDE: torch.Tensor, stores: Stores | None = None, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``recurrent_rule``, ``chunk`` tokens at a time. A token with gate 0 and beta 0 leaves the state as it is.

    With γ_i the sum of the gates up to i: A_ij = β_i (k_i·k_j) e^(γ_i − γ_j) for j < i, and (I + A)⁻¹ turns β v and
    β k e^γ into the chunk's own updates, given the state S before it.
    """
    outs, state = [], state_BHDE
    for start in range(0, tokens.v.shape[2], chunk):
        q, k, v, gate, beta = (x.narrow(2, start, min(chunk, x.shape[2] - start)) for x in tokens)
        between, grown, beta = _decays(gate), gate.cumsum(-1).exp().unsqueeze(-1), beta.unsqueeze(-1)
        system = ((k * beta) @ k.transpose(-1, -2) * between).tril(-1)
        update = torch.linalg.solve_triangular(
            system, torch.cat((v * beta, k * beta * grown), dim=-1), upper=False, unitriangular=True
        )
        value = update[..., : v.shape[-1]] - update[..., v.shape[-1] :] @ state
        outs.append((q * grown) @ state + (q @ k.transpose(-1, -2) * between) @ value)
        if stores is not None:
            stores.write(start, start + q.shape[2], partial(_state_within, k, value, between, grown, state))
        added = (k * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ value
        state = state * grown[..., -1:, :] + added
    return torch.cat(outs, dim=2), state


def _decays(gate_BHN: torch.Tensor) -> torch.Tensor:
    """e^(γ_i − γ_j) [B, H, N, N] for j <= i, else 0. Each exponent is a sum of its own gates: a difference of two long
    sums would lose the small ones."""
    count = gate_BHN.shape[-1]
    lower = torch.ones(count, count, dtype=torch.bool, device=gate_BHN.device).tril()
    steps = gate_BHN.unsqueeze(-1).expand(*gate_BHN.shape, count).masked_fill(~lower.tril(-1), 0)
    return steps.cumsum(-2).masked_fill_(~lower, float("-inf")).exp_()


def _state_within(
    k: torch.Tensor,
    value: torch.Tensor,
    between: torch.Tensor,
    grown: torch.Tensor,
    state: torch.Tensor,
    rows_M: torch.Tensor,
    counts_M: torch.Tensor,
) -> torch.Tensor:
    """States [M, H, D, E] of ``rows_M`` after the first ``counts_M`` (>= 1) tokens of the chunk."""
    k, value, between, grown, state = (x.index_select(0, rows_M) for x in (k, value, between, grown, state))
    place = (counts_M - 1).view(-1, 1, 1, 1).expand(-1, k.shape[1], 1, 1)
    weight = between.gather(2, place.expand(-1, -1, 1, between.shape[-1])).transpose(-1, -2)
    return state * grown.gather(2, place) + (k * weight).transpose(-1, -2) @ value


def _make(shape: RecurrentShape, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    state = (shape.heads, shape.key_dim, shape.value_dim)
    view = make_recurrent_view(shape, {"state": (state, torch.float32)}, seed, device)
    tokens = shape.tokens
    q, k = (normal(seed + i, (tokens, shape.key_heads, shape.key_dim), device, dtype) for i in (1, 2))
    v = normal(seed + 3, (tokens, shape.heads, shape.value_dim), device, dtype)
    gate = -F.softplus(normal(seed + 4, (tokens, shape.heads), device, torch.float32))
    beta = uniform(seed + 5, (tokens, shape.heads), device, torch.float32, 0.05, 0.95)
    return Inputs(
        args=(q, k, v, gate, beta, view, 1), written=(view.parts["state"][:, 1:],), num_rows=shape.live_tokens
    )


def _cases() -> Sequence[Case]:
    return [
        Case(op="gated_delta", name=name, make=partial(_make, shape), facts=shape.facts())
        for name, shape in RECURRENT_SHAPES.items()
    ]


GATED_DELTA = Op(
    name="gated_delta",
    reference=gated_delta,
    cases=_cases,
    eager_in=frozenset({"prefill"}),
    tolerances={
        "float32": Tolerance(5e-5, 5e-5),  # a chunk solves a triangular system of up to 64 rows
        "bfloat16": Tolerance(1e-2, 1e-2),  # the output is rounded once; the state stays float32
        "float16": Tolerance(2e-3, 2e-3),
    },
    facts={
        "mode": '"decode" or "prefill"',
        "key_heads": "K",
        "heads": "H",
        "key_dim": "D",
        "value_dim": "E",
        "dtype": "of q, k and v",
    },
)
