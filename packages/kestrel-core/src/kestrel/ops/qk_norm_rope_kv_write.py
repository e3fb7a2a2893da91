"""qk_norm_rope_kv_write: everything between the projections of attention and the attention itself, in one op.

Letters: T tokens, H query heads, K key/value heads, D head dim, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.norms import rms_norm
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal
from kestrel.ops.rope import random_angles, rotate_
from kestrel.ops.view_cases import VIEW_SHAPES, ViewShape, make_view
from kestrel.ops.write_kv import write_kv
from kestrel.spi.batch import PagedView

__all__ = ["QK_NORM_ROPE_KV_WRITE", "qk_norm_rope_kv_write"]


def qk_norm_rope_kv_write(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    view: PagedView,
    layer: int,
    cos_TR: torch.Tensor | None = None,
    sin_TR: torch.Tensor | None = None,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    add_one: bool = False,
    gives_keys: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The queries [T, H, D], normed and rotated; keys (likewise) and values are written to the view's pages.
    ``gives_keys``: with the keys [T, K, D], before pages of another dtype round them.

    RMSNorm over each head with ``q_weight_D`` and ``k_weight_D`` when given (1 + weight when ``add_one``), then
    ``rope`` when ``cos_TR`` and ``sin_TR`` are given. Inputs are not changed; q, k and v may be slices of
    one projection.
    """
    if q_weight_D is not None:
        q_THD = rms_norm(q_THD, q_weight_D, eps, add_one=add_one)
    if k_weight_D is not None:
        k_TKD = rms_norm(k_TKD, k_weight_D, eps, add_one=add_one)
    if cos_TR is not None and sin_TR is not None:
        both = rotate_(torch.cat((q_THD, k_TKD), dim=1).to(cos_TR.dtype), cos_TR, sin_TR).to(q_THD.dtype)
        q_THD, k_TKD = both.split_with_sizes([q_THD.shape[1], k_TKD.shape[1]], dim=1)
    write_kv(k_TKD, v_TKD, view, layer)
    return (q_THD, k_TKD) if gives_keys else q_THD


def _make(
    shape: ViewShape, norm: str | None, rot_dim: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    view = make_view(shape, seed, device, dtype)
    heads = shape.heads + 2 * shape.kv_heads
    packed = normal(seed + 1, (shape.tokens, heads, shape.head_dim), device, dtype)
    q, k, v = packed.split_with_sizes([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    weights = [normal(seed + i, (shape.head_dim,), device, dtype) if norm else None for i in (3, 4)]
    cos, sin = random_angles(seed + 2, shape.tokens, rot_dim, device) if rot_dim else (None, None)
    return Inputs(
        args=(q, k, v, view, 1, cos, sin, *weights, 1e-6),
        kwargs={"add_one": norm == "rms_plus_one", "gives_keys": not shape.is_decode},
        written=(view.k_LPKSD[:, 1:], view.v_LPKSD[:, 1:]),
    )


def _cases() -> Sequence[Case]:
    cases = {}
    for name, shape in VIEW_SHAPES.items():
        half = 2 * (shape.head_dim // 4)
        for norm, rot_dim in (("rms", shape.head_dim), ("rms_plus_one", half), (None, half), (None, 0)):
            title = f"{name}, {norm or 'no norm'}, {rot_dim} rotated"
            facts = {**shape.facts(), "heads": shape.heads, "rot_dim": rot_dim, "norm": norm}
            make = partial(_make, shape, norm, rot_dim)
            cases[title] = Case(op="qk_norm_rope_kv_write", name=title, make=make, facts=facts)
    return list(cases.values())


QK_NORM_ROPE_KV_WRITE = Op(
    name="qk_norm_rope_kv_write",
    reference=qk_norm_rope_kv_write,
    cases=_cases,
    tolerances={
        "float32": Tolerance(1e-5, 1e-5),
        "bfloat16": Tolerance(
            6e-2, 2e-2
        ),  # the reference rounds between norm and rope, a fused kernel need not
        "float16": Tolerance(8e-3, 3e-3),
    },
    facts={
        "heads": "H",
        "kv_heads": "K",
        "head_dim": "D",
        "page": "positions per page",
        "rot_dim": "R, 0 without rope",
        "norm": '"rms", "rms_plus_one" or None',
        "dtype": "of q, k and v",
        "kv_dtype": "of pages, None where it is the same",
    },
)
