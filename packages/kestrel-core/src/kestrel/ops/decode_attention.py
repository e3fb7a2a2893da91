"""decode_attention: all that happens between the projections of a decode step's attention and its output, in one op.

Letters: B rows, H query heads, K key/value heads, D head dim, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.paged_attention import paged_attention
from kestrel.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from kestrel.ops.random import normal
from kestrel.ops.rope import random_angles
from kestrel.ops.view_cases import ATTENTION_FACTS, VIEW_SHAPES, ViewShape, make_view
from kestrel.spi.batch import PagedView

__all__ = ["DECODE_ATTENTION", "decode_attention"]


def decode_attention(
    q_BHD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    view: PagedView,
    layer: int,
    scale: float,
    cos_BR: torch.Tensor | None = None,
    sin_BR: torch.Tensor | None = None,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    softcap: float | None = None,
    gate_BHD: torch.Tensor | None = None,
    *,
    add_one: bool = False,
) -> torch.Tensor:
    """Attention outputs [B, H, D] of a decode launch, whose keys and values are written to the view's pages.

    ``qk_norm_rope_kv_write``, then ``paged_attention`` over what it wrote and all before. A provider may count on it
    that, from layer 1 on, pages hold what was computed before this launch and that the view is what it was at layer 0.
    """
    prepared = qk_norm_rope_kv_write(
        q_BHD, k_BKD, v_BKD, view, layer, cos_BR, sin_BR, q_weight_D, k_weight_D, eps, add_one=add_one
    )
    assert isinstance(prepared, torch.Tensor)
    return paged_attention(prepared, view, layer, scale, softcap, gate_BHD)


def _make(
    shape: ViewShape, norm: str | None, rot_dim: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    view = make_view(shape, seed, device, dtype)
    rows, heads, kv_heads, dim = shape.tokens, shape.heads, shape.kv_heads, shape.head_dim
    packed = normal(seed + 1, (rows, heads + 2 * kv_heads, dim), device, dtype)
    q, k, v = packed.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    weights = [normal(seed + i, (dim,), device, dtype) if norm else None for i in (3, 4)]
    cos, sin = random_angles(seed + 2, rows, rot_dim, device) if rot_dim else (None, None)
    gate = None
    if shape.gated:  # each head's half of a projection
        gate = normal(seed + 5, (rows, heads, 2, dim), device, dtype).select(2, 1)
    return Inputs(
        args=(q, k, v, view, 1, dim**-0.5, cos, sin, *weights, 1e-6, shape.softcap, gate),
        kwargs={"add_one": norm == "rms_plus_one"},
        written=(view.k_LPKSD[:, 1:], view.v_LPKSD[:, 1:]),
    )


_PLAIN = ("decode, odd sizes", "decode, captured window", "decode, head 64", "decode, gated")


def _cases() -> Sequence[Case]:
    cases = []
    for name, shape in VIEW_SHAPES.items():
        if not shape.is_decode:
            continue
        kinds: list[tuple[str | None, int]] = [("rms_plus_one", 2 * (shape.head_dim // 4))]
        if name in _PLAIN:
            kinds += [(None, shape.head_dim), (None, 0)]
        for norm, rot_dim in kinds:
            facts = {**shape.attention_facts(), "rot_dim": rot_dim, "norm": norm}
            del facts["mode"]
            make = partial(_make, shape, norm, rot_dim)
            title = f"{name}, {norm or 'no norm'}, {rot_dim} rotated"
            cases.append(Case(op="decode_attention", name=title, make=make, facts=facts))
    return cases


DECODE_ATTENTION = Op(
    name="decode_attention",
    reference=decode_attention,
    cases=_cases,
    eager_in=frozenset({"decode"}),
    tolerances={
        "float32": Tolerance(5e-5, 5e-5),  # of the norm, then of the scores that it makes
        "bfloat16": Tolerance(
            8e-2, 4e-2
        ),  # the reference rounds between norm and rope, and before the scores
        "float16": Tolerance(1e-2, 6e-3),
    },
    facts={
        **ATTENTION_FACTS,
        "rot_dim": "R, 0 without rope",
        "norm": '"rms", "rms_plus_one" or None',
        "dtype": "of q, k and v",
    },
)
