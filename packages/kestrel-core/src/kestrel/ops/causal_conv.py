"""causal_conv: a depthwise convolution over each sequence, whose last inputs are kept as state.

Letters: B sequences, T tokens, C channels, W taps, Q tokens of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.padding import padding_once
from kestrel.ops.random import normal
from kestrel.ops.recurrent_cases import RECURRENT_SHAPES, RecurrentShape, make_recurrent_view
from kestrel.ops.state_stores import Stores, stores_of_all, stores_of_row
from kestrel.spi.batch import RecurrentView

__all__ = ["CAUSAL_CONV", "causal_conv"]


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    view: RecurrentView,
    layer: int,
    part: str = "conv",
    activation: str | None = "silu",
) -> torch.Tensor:
    """Outputs [T, C]: y_t = act(Σ_j weight[:, j] · x_(t − W + 1 + j) + bias), x before a sequence from its state.

    The state [C, W − 1] at ``view.parts[part][layer, slot]`` holds a sequence's last inputs, oldest first (zeros before
    the first), and is updated in place. ``view.stores`` is honoured as by gated_delta. ``activation``: "silu" or None.
    """
    pool_SCW = view.parts[part][layer]
    if x_TC.shape[0] == 0:
        return torch.empty_like(x_TC)
    if view.limits.is_decode:
        window_BCW = torch.cat(
            (pool_SCW.index_select(0, view.slots_B), x_TC.unsqueeze(-1).to(pool_SCW.dtype)), -1
        )
        tail = window_BCW[..., 1:].contiguous()
        pool_SCW.index_copy_(0, view.slots_B, tail)
        if view.stores.shape[0]:
            pool_SCW.index_copy_(0, view.stores[:, 2], tail.index_select(0, view.stores[:, 0]))
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        y = (window_BCW.to(wide) * weight_CW.to(wide)).sum(-1)
        return _activate(y if bias_C is None else y + bias_C, activation).to(x_TC.dtype)
    if view.extents is None:
        return _activate(_padded(x_TC, weight_CW, bias_C, view, layer, pool_SCW), activation)
    out_TC = torch.zeros_like(x_TC)
    start = 0
    for b, row in enumerate(view.extents):
        if row.query_len:
            tokens = slice(start, start + row.query_len)
            slot = view.slots_B[b : b + 1]
            past_1CQ = torch.cat(
                (pool_SCW.index_select(0, slot), x_TC[tokens].t().unsqueeze(0).to(pool_SCW.dtype)), -1
            )
            lens = torch.full_like(slot, row.query_len)
            _keep(past_1CQ, lens, slot, pool_SCW, stores_of_row(view, b, pool_SCW))
            out_TC[tokens] = _convolve(past_1CQ.to(x_TC.dtype), weight_CW, bias_C)[0].t()
        start += row.query_len
    return _activate(out_TC, activation)


def _padded(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    view: RecurrentView,
    layer: int,
    pool_SCW: torch.Tensor,
) -> torch.Tensor:
    padding = padding_once(view, layer, x_TC.shape[0])
    past_BCQ = torch.cat(
        (pool_SCW.index_select(0, view.slots_B), padding.pad(x_TC).transpose(1, 2).to(pool_SCW.dtype)), -1
    )
    _keep(past_BCQ, padding.lens_B, view.slots_B, pool_SCW, stores_of_all(view, pool_SCW))
    return padding.unpad(_convolve(past_BCQ.to(x_TC.dtype), weight_CW, bias_C).transpose(1, 2))


def _convolve(past_BCQ: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    return F.conv1d(past_BCQ, weight_CW.unsqueeze(1), bias_C, groups=weight_CW.shape[0])


def _keep(
    past_BCQ: torch.Tensor,
    lens_B: torch.Tensor,
    slots_B: torch.Tensor,
    pool_SCW: torch.Tensor,
    stores: Stores | None,
) -> None:
    """Update the live states, then make the copies. ``past`` begins with the W − 1 inputs before the launch."""
    width = pool_SCW.shape[-1]

    def tails(rows_M: torch.Tensor, counts_M: torch.Tensor) -> torch.Tensor:
        places = (counts_M.unsqueeze(1) + torch.arange(width, device=counts_M.device)).unsqueeze(1)
        return past_BCQ.index_select(0, rows_M).gather(-1, places.expand(-1, past_BCQ.shape[1], -1))

    everyone = torch.arange(slots_B.shape[0], device=slots_B.device)
    pool_SCW.index_copy_(0, slots_B, tails(everyone, lens_B))
    if stores is not None:
        stores.write(0, past_BCQ.shape[-1] - width, tails)


def _activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    assert activation in ("silu", None), f"activation {activation!r} is neither 'silu' nor None"
    return y if activation is None else F.silu(y)


def _make(
    shape: RecurrentShape,
    taps: int,
    activation: str | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    channels = 2 * shape.key_heads * shape.key_dim + shape.heads * shape.value_dim
    view = make_recurrent_view(shape, {"conv": ((channels, taps - 1), dtype)}, seed, device)
    x = normal(seed + 1, (shape.tokens, channels), device, dtype)
    weight = normal(seed + 2, (channels, taps), device, dtype)
    bias = None if activation else normal(seed + 3, (channels,), device, dtype)
    return Inputs(
        args=(x, weight, bias, view, 1, "conv", activation),
        written=(view.parts["conv"][:, 1:],),
        num_rows=shape.live_tokens,
    )


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="causal_conv",
            name=f"{name}, {taps} taps",
            make=partial(_make, shape, taps, activation),
            facts={"mode": shape.facts()["mode"], "taps": taps, "activation": activation},
        )
        for name, shape in RECURRENT_SHAPES.items()
        for taps, activation in ((4, "silu"), (2, None))
    ]


CAUSAL_CONV = Op(
    name="causal_conv",
    reference=causal_conv,
    cases=_cases,
    eager_in=frozenset({"prefill"}),
    tolerances={
        "float32": Tolerance(1e-5, 1e-5),
        "bfloat16": Tolerance(4e-2, 2e-2),  # the sum may be rounded before the activation
        "float16": Tolerance(5e-3, 3e-3),
    },
    facts={"mode": '"decode" or "prefill"', "taps": "W", "activation": "as the argument", "dtype": "of x"},
)
