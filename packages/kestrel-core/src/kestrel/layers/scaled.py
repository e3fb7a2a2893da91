"""Linear maps and experts whose weights are 8-bit floats with a scale per block of 128 rows and 128 columns.

``weight`` [N, K] e4m3 and ``weight_scale_inv`` [⌈N / 128⌉, ⌈K / 128⌉] float32: what a number counts for is itself times
the scale of its block. Whether a provider multiplies by them as they are is asked with ``serves_scaled``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from kestrel.layers.norms import Deferred
from kestrel.layers.stored import PackedPart, Stored
from kestrel.ops.fp8_linear import BLOCK
from kestrel.ops.linear import ROW_BUCKETS, row_bucket
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpCall, OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["ScaledExperts", "ScaledLinear", "ScaledPacked", "serves_scaled"]

_KINDS = ("weight", "weight_scale_inv")


def _queries(k: int, n: int, epilogue: str | None, dtype: torch.dtype | None) -> dict[int, OpQuery]:
    name = dtype_name(dtype or torch.get_default_dtype())
    return {
        rows: OpQuery.of("fp8_linear", k=k, n=n, epilogue=epilogue, rows=rows, dtype=name)
        for rows in (*ROW_BUCKETS, 0)
    }


def _experts_query(
    dim: int, hidden: int, experts: int, top_k: int, activation: str, dtype: torch.dtype | None
) -> OpQuery:
    return OpQuery.of(
        "fp8_grouped_experts",
        hidden=dim, experts=experts, top_k=top_k, width=hidden, activation=activation,
        dtype=dtype_name(dtype or torch.get_default_dtype()),
    )  # fmt: skip


def serves_scaled(ops: OpTableLike, dtype: torch.dtype, hidden: int) -> bool:
    """Whether a provider other than the reference multiplies by such weights, for inputs in ``dtype`` and ``hidden``
    of them."""
    products = _queries(hidden, hidden, None, dtype).values()
    return all(ops.find(query) is not None for query in products)


def _blocks(number: int) -> int:
    return -(-number // BLOCK)


def _eight_bits(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(_blocks(rows), _blocks(columns), dtype=torch.float32)
    return nn.Parameter(weight, requires_grad=False), nn.Parameter(scale, requires_grad=False)


def _part(kind: str, start: int, end: int) -> PackedPart:
    """Where rows ``start`` to ``end`` lie in a weight, or in its scales."""
    if kind.endswith("scale_inv"):
        return PackedPart(kind, start // BLOCK, _blocks(end))
    return PackedPart(kind, start, end)


class ScaledLinear(Stored):
    """``layers.Linear`` without bias over a weight of 8-bit floats."""

    def __init__(
        self,
        ops: OpTableLike,
        in_features: int,
        out_features: int,
        *,
        epilogue: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.epilogue = in_features, out_features, epilogue
        self.weight, self.weight_scale_inv = _eight_bits(out_features, in_features)
        queries = _queries(in_features, out_features, epilogue, dtype)
        self._calls: dict[int, OpCall] = {rows: ops.resolve(query) for rows, query in queries.items()}

    def forward(self, x: torch.Tensor | Deferred, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As ``layers.Linear``."""
        if isinstance(x, Deferred):
            x = x.value()
        call = self._calls[row_bucket(x.numel() // self.in_features)]
        out: torch.Tensor = call(x, self.weight, self.weight_scale_inv, None, self.epilogue, residual)
        return out

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"{self.in_features} -> {self.out_features}, epilogue={self.epilogue}, 8 bits"


class ScaledPacked(ScaledLinear):
    """``layers.Packed`` over a weight of 8-bit floats. Parts begin at whole blocks."""

    def __init__(
        self,
        ops: OpTableLike,
        in_features: int,
        parts: Mapping[str, int],
        *,
        epilogue: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ops, in_features, sum(parts.values()), epilogue=epilogue, dtype=dtype)
        self.parts: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            assert start % BLOCK == 0, f"part {name!r} begins at row {start}, inside a block of {BLOCK}"
            self.parts[name] = slice(start, start + size)
            start += size
        self._sizes = list(parts.values())

    def split(self, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of an output [..., N], one per part."""
        return y.split_with_sizes(self._sizes, dim=-1)

    def stored_parts(self) -> Mapping[str, PackedPart]:
        """The weight and the scales of each part."""
        return {
            f"{part}.{kind}": _part(kind, rows.start, rows.stop)
            for kind in _KINDS
            for part, rows in self.parts.items()
        }


class ScaledExperts(Stored):
    """``layers.Experts`` over weights of 8-bit floats: ``gate_up_proj`` [E · 2I, C] and ``down_proj`` [E · C, I], each
    with scales under its name and ``_scale_inv``. ``dim`` and ``hidden`` are whole blocks."""

    def __init__(
        self,
        ops: OpTableLike,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        activation: str = "silu_mul",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert dim % BLOCK == hidden % BLOCK == 0, f"{dim} and {hidden} are no multiples of {BLOCK}"
        self.dim, self.hidden, self.experts, self.activation = dim, hidden, experts, activation
        self.gate_up_proj, self.gate_up_proj_scale_inv = _eight_bits(experts * 2 * hidden, dim)
        self.down_proj, self.down_proj_scale_inv = _eight_bits(experts * dim, hidden)
        self._call = ops.resolve(_experts_query(dim, hidden, experts, top_k, activation, dtype))

    def forward(self, x_TC: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """Outputs [T, C]; arguments as ``ops.grouped_experts`` takes them."""
        each = (self.gate_up_proj, self.gate_up_proj_scale_inv, self.down_proj, self.down_proj_scale_inv)
        weights = (tensor.view(self.experts, -1, tensor.shape[1]) for tensor in each)
        out: torch.Tensor = self._call(x_TC, weights_TK, experts_TK, *weights, self.activation)
        return out

    def stored_parts(self) -> Mapping[str, PackedPart]:
        """The weights and scales of each expert."""
        parts: dict[str, PackedPart] = {}
        for e in range(self.experts):
            gate = 2 * e * self.hidden
            places = {
                "gate_proj": ("gate_up_proj", gate, gate + self.hidden),
                "up_proj": ("gate_up_proj", gate + self.hidden, gate + 2 * self.hidden),
                "down_proj": ("down_proj", e * self.dim, (e + 1) * self.dim),
            }
            for name, (target, start, end) in places.items():
                parts[f"{e}.{name}.weight"] = _part(target, start, end)
                parts[f"{e}.{name}.weight_scale_inv"] = _part(f"{target}_scale_inv", start, end)
        return parts
