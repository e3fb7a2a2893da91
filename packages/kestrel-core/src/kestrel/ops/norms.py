"""layer_norm, rms_norm and add_norm: normalisation over the last axis, computed in float32 and rounded once.

Letters: … any leading axes, C the width normalised over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["ADD_NORM", "LAYER_NORM", "RMS_NORM", "add_norm", "layer_norm", "rms_norm"]

# float32: sums in another order. 16 bit: the result is rounded once, one unit in the last place.
TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5),
    "bfloat16": Tolerance(1e-2, 1e-2),
    "float16": Tolerance(2e-3, 2e-3),
}


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm of ``x`` [..., C]: (x − mean) / sqrt(variance + eps) · weight + bias, each [C] or None.

    ``offset`` [C] float32: added to ``x`` first, which is not rounded before its norm is.
    Source: Ba et al. 2016, arXiv 1607.06450.
    """
    if offset is None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    total = x.float() + offset if x.dtype in (torch.float16, torch.bfloat16) else x + offset
    weight, bias = (None if vector is None else vector.to(total.dtype) for vector in (weight, bias))
    return F.layer_norm(total, x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, *, add_one: bool = False
) -> torch.Tensor:
    """RMSNorm of ``x`` [..., C]: x / sqrt(mean(x²) + eps) · w, in float32, cast to x's dtype at the end.

    w is ``weight`` [C], or 1 + ``weight`` when ``add_one`` (the zero-centred form of Qwen 3.5), or 1 when None.
    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if weight is None:
        return F.rms_norm(x32, x.shape[-1:], None, eps).to(x.dtype)
    w32 = weight.to(x32.dtype)
    return F.rms_norm(x32, x.shape[-1:], 1 + w32 if add_one else w32, eps).to(x.dtype)


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    kind: str = "rms",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream ``x + delta`` and its norm, both [..., C].

    ``kind``: "rms", "rms_plus_one" (weight stored minus one) or "layer" (the only one that takes ``bias``).
    ``x`` and ``delta`` are not changed.
    """
    total = x + delta
    if kind == "layer":
        return total, layer_norm(total, weight, bias, eps)
    return total, rms_norm(total, weight, eps, add_one=kind == "rms_plus_one")


_SHAPES = {"smallest": (1, 8), "odd": (3, 37), "empty": (0, 64), "batch": (65, 256), "largest": (2, 5376)}


def _has_offset(shape: tuple[int, int]) -> bool:
    return shape[0] % 2 == 1


def _norm(
    op: str, kind: str, shape: tuple[int, int], seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    x, delta = normal(seed, shape, device, dtype), normal(seed + 1, shape, device, dtype)
    weight, bias = (normal(seed + i, shape[1:], device, dtype) for i in (2, 3))
    if op == "layer_norm":
        offset = normal(seed + 4, shape[1:], device, torch.float32) if _has_offset(shape) else None
        return Inputs(args=(x, weight, bias, 1e-5, offset))
    if op == "rms_norm":
        return Inputs(args=(x, weight, 1e-6), kwargs={"add_one": kind == "rms_plus_one"})
    return Inputs(args=(x, delta, weight, bias if kind == "layer" else None, 1e-6), kwargs={"kind": kind})


def _cases(op: str, kinds: tuple[str, ...]) -> Sequence[Case]:
    return [
        Case(
            op=op,
            name=f"{kind} {name}",
            make=partial(_norm, op, kind, shape),
            facts={"dim": shape[1], "kind": kind}
            | ({"offset": _has_offset(shape)} if op == "layer_norm" else {}),
        )
        for kind in kinds
        for name, shape in _SHAPES.items()
    ]


_FACTS = {"dim": "C", "kind": '"rms", "rms_plus_one" or "layer"', "dtype": "of x and the weights"}
LAYER_NORM = Op(
    name="layer_norm",
    reference=layer_norm,
    cases=partial(_cases, "layer_norm", ("layer",)),
    tolerances=TOLERANCES,
    facts=_FACTS | {"offset": "whether there is one"},
)
RMS_NORM = Op(
    name="rms_norm",
    reference=rms_norm,
    cases=partial(_cases, "rms_norm", ("rms", "rms_plus_one")),
    tolerances=TOLERANCES,
    facts=_FACTS,
)
ADD_NORM = Op(
    name="add_norm",
    reference=add_norm,
    cases=partial(_cases, "add_norm", ("rms", "rms_plus_one", "layer")),
    tolerances=TOLERANCES,
    facts=_FACTS,
)
