"""What the attention kernels share: softmax step by step, soft-capping, and the gate of the output.

Source: Milakov and Gimelshein 2018, arXiv 1805.02867, "Online normalizer calculation for softmax", algorithm 3.
Scores are kept in powers of two: ``pre`` and ``post`` are what ``scale_factors`` makes of a scale and a softcap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

__all__ = ["Keys", "capped", "finish", "overlap", "query_tile", "scale_factors", "softmax_step", "stages_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys and values [pages, K, positions of a page, D] of one layer, the pages of each row [B, N], and row lengths:
    ``lens_B`` + ``new``. ``page``: positions of a page, 0 where a row has but one page."""

    k_PKSD: torch.Tensor
    v_PKSD: torch.Tensor
    table_BN: torch.Tensor
    lens_B: torch.Tensor
    new: int
    page: int
    window: int | None = None

    def __post_init__(self) -> None:
        k, v = self.k_PKSD, self.v_PKSD
        assert k.stride() == v.stride(), f"keys and values differ in strides: {k.stride()}, {v.stride()}"
        assert k.stride()[2:] == (k.shape[3], 1), f"pages need dense rows, not strides {k.stride()}"
        assert self.table_BN.shape[1] <= 1 or self.table_BN.stride(1) == 1, "page tables need dense rows"


def scale_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(``pre``, ``post``): a score s counts exp2(s · post), or exp2(tanh(s · pre) · post) under a softcap."""
    if softcap is None:
        return 1.0, scale * math.log2(math.e)
    return scale / softcap, softcap * math.log2(math.e)


def overlap(wanted: bool, kernel: object) -> dict[str, bool]:
    """Of a launch's constants, those that let ``kernel`` start while the one before it finishes."""
    if wanted and isinstance(kernel, JITFunction):  # an interpreted kernel cannot
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def stages_of(depth: int, page: int) -> int:
    """Triton's ``num_stages`` that reads ``depth`` − 1 tiles ahead: it shares stages out evenly between loads and the
    loads of their addresses, here of page ids."""
    return 2 * depth - 1 if page else depth


@triton.jit
def capped(scores, pre, HAS_SOFTCAP: tl.constexpr):
    """tanh of the scores · ``pre`` under a softcap, else the scores."""
    if HAS_SOFTCAP:
        scores = 2.0 * tl.sigmoid(2.0 * pre * scores) - 1.0
    return scores


@triton.jit
def softmax_step(scores, top, total, post, GUARD: tl.constexpr):
    """(weights, what earlier sums shrink by, new maximum, new total) after one more tile of ``scores`` [M, N].

    ``GUARD``: a row may have seen nothing yet.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * post)
    base = new_top
    if GUARD:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * post - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def query_tile(q, tokens, heads, live, stride_qt, stride_qh, D: tl.constexpr, D_P: tl.constexpr):
    """Queries [M, D_P] of ``tokens`` [M] and ``heads`` [M] or one; zeros beyond D and where not ``live``."""
    at_d = tl.arange(0, D_P)
    rows = q + tokens.to(tl.int64) * stride_qt + heads * stride_qh
    mask = live[:, None] if D == D_P else live[:, None] & (at_d < D)[None, :]
    return tl.load(rows[:, None] + at_d[None, :], mask=mask, other=0.0)


@triton.jit
def finish(acc, total, gate, gate_rows, mask, KIND: tl.constexpr):
    """Weighted sums [M, D_P] over their totals, in dtype KIND, let through by the gate at ``gate_rows``."""
    out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(KIND)
    if gate is not None:
        opening = tl.sigmoid(tl.load(gate + gate_rows, mask=mask, other=0.0).to(tl.float32))
        out = (out.to(tl.float32) * opening).to(KIND)
    return out
