"""gated_delta_step: everything between the projections of a gated DeltaNet mixer, for one token per sequence.

Letters: T tokens (B = T in decode), K key heads, H value heads, D key dim, E value dim, C = 2KD + HE channels, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kestrel.ops.causal_conv import causal_conv
from kestrel.ops.gated_delta import gated_delta
from kestrel.ops.gated_norm import delta_gates, gated_norm
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal
from kestrel.ops.recurrent_cases import RECURRENT_SHAPES, RecurrentShape, make_recurrent_view
from kestrel.spi.batch import RecurrentView

__all__ = ["GATED_DELTA_STEP", "MixerWeights", "gated_delta_step", "split_qkv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerWeights:
    """The small weights of a mixer: the convolution [C, W] (no bias), ``a_log`` and ``dt_bias`` [H], the norm [E]."""

    conv_CW: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_E: torch.Tensor
    eps: float = 1e-6


def gated_delta_step(
    qkv_TC: torch.Tensor,
    z_THE: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: MixerWeights,
    key_heads: int,
    view: RecurrentView,
    layer: int,
) -> torch.Tensor:
    """The mixer's output [T, H, E] before its last projection; only for launches with ``limits.is_decode``.

    ``qkv_TC`` is laid out [q: K · D | k: K · D | v: H · E]. It goes through causal_conv with SiLU (state part
    "conv"), then ``delta_gates``, then gated_delta (state part "state"), then ``gated_norm`` with ``z_THE``.
    Source: Yang et al. 2024, arXiv 2412.06464, as Qwen 3.5 uses it.
    """
    mixed_TC = causal_conv(qkv_TC, weights.conv_CW, None, view, layer)
    q, k, v = split_qkv(mixed_TC, key_heads, z_THE.shape[1], z_THE.shape[2])
    gate_TH, beta_TH = delta_gates(a_TH, b_TH, weights.a_log_H, weights.dt_bias_H)
    out_THE = gated_delta(q, k, v, gate_TH, beta_TH, view, layer)
    return gated_norm(out_THE, z_THE, weights.norm_E, weights.eps)


def split_qkv(
    qkv_TC: torch.Tensor, key_heads: int, heads: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views q [T, K, D], k [T, K, D] and v [T, H, E] of ``qkv_TC``."""
    tokens, keys = qkv_TC.shape[0], (qkv_TC.shape[1] - heads * value_dim) // 2
    q, k, v = qkv_TC.split_with_sizes([keys, keys, heads * value_dim], dim=1)
    per_head = keys // key_heads
    return (
        q.view(tokens, key_heads, per_head),
        k.view(tokens, key_heads, per_head),
        v.view(tokens, heads, value_dim),
    )


def _make(shape: RecurrentShape, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    channels = 2 * shape.key_heads * shape.key_dim + shape.heads * shape.value_dim
    state = (shape.heads, shape.key_dim, shape.value_dim)
    parts = {"conv": ((channels, 3), dtype), "state": (state, torch.float32)}
    view = make_recurrent_view(shape, parts, seed, device)
    tokens = shape.tokens
    qkv = normal(seed + 1, (tokens, channels), device, dtype)
    z = normal(seed + 2, (tokens, shape.heads, shape.value_dim), device, dtype)
    a, b = (normal(seed + i, (tokens, shape.heads), device, dtype) for i in (3, 4))
    weights = MixerWeights(
        conv_CW=normal(seed + 5, (channels, 4), device, dtype, scale=0.5),
        a_log_H=normal(seed + 6, (shape.heads,), device, torch.float32, scale=0.3),
        dt_bias_H=normal(seed + 7, (shape.heads,), device, dtype),
        norm_E=normal(seed + 8, (shape.value_dim,), device, torch.float32),
    )
    written = (view.parts["conv"][:, 1:], view.parts["state"][:, 1:])
    return Inputs(args=(qkv, z, a, b, weights, shape.key_heads, view, 1), written=written)


def _facts(shape: RecurrentShape) -> dict[str, int]:
    return {
        "key_heads": shape.key_heads,
        "heads": shape.heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "taps": 4,
    }


def _cases() -> Sequence[Case]:
    return [
        Case(op="gated_delta_step", name=name, make=partial(_make, shape), facts=_facts(shape))
        for name, shape in RECURRENT_SHAPES.items()
        if shape.is_decode
    ]


GATED_DELTA_STEP = Op(
    name="gated_delta_step",
    reference=gated_delta_step,
    cases=_cases,
    tolerances={
        "float32": Tolerance(5e-5, 5e-5),
        "bfloat16": Tolerance(6e-2, 3e-2),  # the reference rounds after each part, a fused kernel need not
        "float16": Tolerance(8e-3, 4e-3),
    },
    facts={
        "key_heads": "K",
        "heads": "H",
        "key_dim": "D",
        "value_dim": "E",
        "taps": "W",
        "dtype": "of qkv and z",
    },
)
