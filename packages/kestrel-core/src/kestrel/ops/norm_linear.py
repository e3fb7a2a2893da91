"""norm_linear: a norm and the matrix product that follows it, in one pass over the weight.

Letters: T rows, K inputs, N outputs of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.linear import linear, row_bucket
from kestrel.ops.norms import layer_norm, rms_norm
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["NORM_LINEAR", "norm_linear"]

KINDS = ("rms", "rms_plus_one", "layer")


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    residual: torch.Tensor | None = None,
    *,
    kind: str = "rms",
    gain: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """``linear`` of the norm of ``x`` [..., K]: arguments up to ``residual`` as ``ops.linear`` takes them.

    ``kind``: "rms", "rms_plus_one" (``gain`` [K] stored minus one) or "layer" (the only one that takes ``shift`` [K]).
    The norm may stay in float32 on its way into the product, where the reference rounds it.
    """
    if kind == "layer":
        normed = layer_norm(x, gain, shift, eps)
    else:
        normed = rms_norm(x, gain, eps, add_one=kind == "rms_plus_one")
    return linear(normed, weight, bias, epilogue, residual)


_SHAPES = {
    "smallest": (1, 8, 8),
    "odd": (3, 37, 22),
    "empty": (0, 64, 32),
    "one row": (1, 768, 256),
    "skinny": (8, 512, 256),
    "sixteen": (16, 320, 96),
    "batch": (64, 256, 128),
}
_EPILOGUES = (None, "gelu_tanh", "silu_mul", "residual")


def _make(
    shape: tuple[int, int, int],
    kind: str,
    epilogue: str | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    rows, k, n = shape
    x = normal(seed, (rows, k), device, dtype, scale=3.0)
    weight = normal(seed + 1, (n, k), device, dtype, scale=k**-0.5)
    bias = normal(seed + 2, (n,), device, dtype) if kind == "layer" else None
    residual = normal(seed + 3, (rows, n), device, dtype) if epilogue == "residual" else None
    gain = normal(seed + 4, (k,), device, dtype, scale=0.5)
    shift = normal(seed + 5, (k,), device, dtype) if kind == "layer" else None
    return Inputs(
        args=(x, weight, bias),
        kwargs={
            "epilogue": epilogue,
            "residual": residual,
            "kind": kind,
            "gain": gain,
            "shift": shift,
            "eps": 1e-6,
        },
        weight=1,
    )


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="norm_linear",
            name=f"{name}, {kind}, {epilogue or 'no epilogue'}",
            make=partial(_make, shape, kind, epilogue),
            facts={
                "k": shape[1],
                "n": shape[2],
                "kind": kind,
                "epilogue": epilogue,
                "bias": kind == "layer",
                "rows": row_bucket(shape[0]),
            },
        )
        for i, (name, shape) in enumerate(_SHAPES.items())
        for j, kind in enumerate(KINDS)
        for epilogue in (_EPILOGUES[(i + j) % len(_EPILOGUES)],)
    ]


NORM_LINEAR = Op(
    name="norm_linear",
    reference=norm_linear,
    cases=_cases,
    # As linear; in 16 bits the norm is rounded in other places, once or twice.
    tolerances={
        "float32": Tolerance(5e-5, 5e-5),
        "bfloat16": Tolerance(6e-2, 3e-2),
        "float16": Tolerance(8e-3, 8e-3),
    },
    facts={
        "k": "K",
        "n": "N",
        "kind": '"rms", "rms_plus_one" or "layer"',
        "epilogue": "as the argument",
        "bias": "whether there is one",
        "rows": "row_bucket(T)",
        "dtype": "of x and all weights",
    },
)
