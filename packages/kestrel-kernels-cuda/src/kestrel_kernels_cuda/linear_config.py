"""Which kernel in which configuration computes a product: measured choices from a table, else rules of thumb.

``linear_table.json`` maps an architecture ("90"), a weight ("12352x2560", gated ones "18432x2560 gated") and a row
bucket to the fields of a ``Config``. ``tuning/linear.py`` measures them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from kestrel.ops import row_bucket

__all__ = ["BLOCK", "Config", "Product", "choose", "default", "is_gated"]

PROCESSORS = 132  # of an H200; rules of thumb fill about this many
FEW = 16  # rows that one matrix instruction takes
MOST_INPUTS = 32768  # of a row that a program's registers hold
BLOCK = 128  # rows and columns of an 8-bit weight that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """``kernel``: "gemv" (one row), "gemm" or "blas" (torch; the rest does not apply). ``bm`` × ``bn`` outputs a
    program (gated: ``bn`` of each half), ``bk`` inputs at a time, ``split`` programs to a tile's inputs; ``swap``: the
    weight is the left operand; ``tma``: tiles come by the tensor memory unit (sm_90)."""

    kernel: Literal["gemv", "gemm", "stream", "blas"]
    bm: int = 1
    bn: int = 1
    bk: int = 1
    warps: int = 4
    stages: int = 1
    split: int = 1
    swap: bool = False
    tma: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What a choice depends on. ``n``: rows of the weight (both halves of a gated one); ``rows``: the row bucket."""

    n: int
    k: int
    rows: int
    gated: bool = False
    wide: bool = False  # float32 operands
    scaled: bool = False  # an 8-bit weight with a scale per block

    @classmethod
    def of(
        cls, n: int, k: int, rows: int, epilogue: str | None, *, wide: bool = False, scaled: bool = False
    ) -> Product:
        """The product of ``rows`` rows (any number) with a weight [n, k]."""
        return cls(n=n, k=k, rows=row_bucket(rows), gated=is_gated(epilogue), wide=wide, scaled=scaled)

    @property
    def key(self) -> str:
        """The weight as the table names it."""
        return f"{self.n}x{self.k}{' gated' if self.gated else ''}{' fp8' if self.scaled else ''}"


BLAS = Config(kernel="blas")


def is_gated(epilogue: str | None) -> bool:
    """Whether outputs come from two halves of the weight."""
    return epilogue in ("silu_mul", "gelu_tanh_mul")


@lru_cache(maxsize=4096)
def choose(product: Product, arch: int) -> Config:
    """The configuration for ``product`` on architecture ``arch`` (90 is sm_90)."""
    if not product.wide:
        measured = _table().get(str(arch), {}).get(product.key, {}).get(str(product.rows))
        if measured is not None:
            return Config(**measured)
    return default(product)


def default(product: Product) -> Config:
    """A configuration by rule, from what was best on an H200: enough programs for every processor, enough bytes on
    their way to each. torch's kernels win for gated weights and from 32 rows on."""
    outputs = product.n // 2 if product.gated else product.n
    if product.rows == 1 and product.k <= MOST_INPUTS:
        return _gemv(product)
    most = 4 * FEW if product.scaled else 0 if product.gated and not product.wide else FEW
    if not 1 < product.rows <= most or product.k % 16:
        return BLAS
    bm = max(FEW, product.rows)
    if product.wide:
        return Config(kernel="gemm", bm=bm, bn=32, bk=32, stages=2)
    bk = BLOCK if product.scaled else min(128, _below(product.k))
    split = min(8, max(1, PROCESSORS // -(-outputs // 64)), -(-product.k // (4 * bk)))
    warps = (
        8 if product.scaled and product.gated and bm > FEW else 4
    )  # fewer have too few registers for two halves
    return Config(kernel="gemm", bm=bm, bn=64, bk=bk, warps=warps, stages=4, split=split, swap=True)


def _gemv(product: Product) -> Config:
    """A program holds its whole rows in registers, and a thread reads eight numbers at a time."""
    most = 1024 if product.k % 1024 == 0 else 512 if product.k % 512 == 0 else 256
    bk = min(most, 1 << max(4, (product.k - 1).bit_length()))
    bn = 8 if product.scaled else 2  # of 8-bit weights a program needs more to be worth its inputs and scales
    while bn > 1 and bn * product.k * (1 + product.gated) > (40960 if product.scaled and bn <= 4 else 20480):
        bn //= 2
    return Config(kernel="gemv", bn=bn, bk=bk, warps=max(1, min(4, bn * bk // (32 * 8))))


def _below(number: int) -> int:
    """The largest power of two that is not above ``number``, at least 16."""
    return max(16, 1 << (number.bit_length() - 1))


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]:
    text = files("kestrel_kernels_cuda").joinpath("linear_table.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]] = json.loads(text)
    return found
