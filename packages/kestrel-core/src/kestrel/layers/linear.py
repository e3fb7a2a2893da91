"""Linear maps: plain, with an epilogue, and several checkpoints' weights packed into one.

``weight`` [N, K] and ``bias`` [N] under the names that checkpoints use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kestrel.layers.norms import Deferred, NormKind
from kestrel.layers.stored import PackedPart, Stored
from kestrel.ops.linear import ROW_BUCKETS, row_bucket
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpCall, OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["Linear", "Packed"]


class Linear(Stored):
    """``x @ weight.T + bias``, then ``epilogue`` (see ``ops.linear``: "gelu_tanh", "silu_mul", "residual", …).

    Which provider runs it may differ by the number of rows, so it is resolved once per row bucket. ``norm``: the kind
    of the norm that its input may come as (``Deferred``); where a provider has both in one, that runs. ``adds_bias``
    False: it has a bias, which somebody else adds (``LinearSum``).
    """

    def __init__(
        self,
        ops: OpTableLike,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        epilogue: str | None = None,
        norm: NormKind | None = None,
        adds_bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.epilogue = in_features, out_features, epilogue
        self.adds_bias = bias and adds_bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        )
        facts: dict[str, Any] = {"k": in_features, "n": out_features, "epilogue": epilogue}
        facts["bias"] = self.adds_bias
        facts["dtype"] = dtype_name(dtype or torch.get_default_dtype())
        self._ops = ops
        self._queries = {rows: OpQuery.of("linear", rows=rows, **facts) for rows in (*ROW_BUCKETS, 0)}
        self._calls: dict[int, OpCall] = {rows: ops.resolve(query) for rows, query in self._queries.items()}
        calls = list(self._calls.values())
        self._only: OpCall | None = calls[0] if all(call is calls[0] for call in calls) else None
        self._packed: dict[int, torch.Tensor] = {}
        self._norm = norm
        self._fused: dict[int, OpCall] = {} if norm is None else _fusions(ops, facts | {"kind": norm})

    def forward(self, x: torch.Tensor | Deferred, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product [..., N] (N / 2 when gated). ``residual`` [..., N] goes with the epilogues "residual" and
        "accumulate"."""
        if isinstance(x, Deferred):
            fused = self._fused.get(self._bucket(x.x)) if self._fused else None
            if fused is not None:
                return self._normed(fused, x, residual)
            x = x.value()
        return self.with_bias(x, self.bias if self.adds_bias else None, residual)

    def with_bias(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product with ``bias`` [N] in place of its own."""
        call = self._only
        weight: torch.Tensor = self.weight
        if call is None:
            rows = self._bucket(x)
            call, weight = self._calls[rows], self._packed.get(rows, weight)
        out: torch.Tensor = call(x, weight, bias, self.epilogue, residual)
        return out

    def _bucket(self, x: torch.Tensor) -> int:
        return row_bucket(x.numel() // self.in_features)

    def _normed(self, call: OpCall, x: Deferred, residual: torch.Tensor | None) -> torch.Tensor:
        norm = x.norm
        assert norm.kind == self._norm, f"a {norm.kind} norm for a linear built for {self._norm}"
        out: torch.Tensor = call(
            x.x, self.weight, self.bias if self.adds_bias else None, self.epilogue, residual,
            kind=norm.kind, gain=norm.weight, shift=norm.bias, eps=norm.eps,
        )  # fmt: skip
        return out

    def pack(self) -> None:
        """Lay the weight out as its providers want it; ``pack_weights`` calls this once, after loading.

        With one provider for all row buckets its layout replaces the weight; else each that wants another layout
        keeps a copy.
        """
        packed = {rows: self._ops.pack(query, self.weight) for rows, query in self._queries.items()}
        if self._only is not None:
            self.weight = nn.Parameter(packed[0], requires_grad=False)
        else:
            self._packed = {rows: weight for rows, weight in packed.items() if weight is not self.weight}

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"{self.in_features} -> {self.out_features}, epilogue={self.epilogue}"


class Packed(Linear):
    """One stored weight made of named parts, in the order given: {"q": 256, "k": 256, "v": 256}.

    A checkpoint may hold the whole (``name.weight``) or the parts (``name.q.weight``); ``packed_parts`` says where a
    part's tensor goes. LoRA and tensor parallelism address parts by the same names.
    """

    def __init__(
        self,
        ops: OpTableLike,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = True,
        epilogue: str | None = None,
        norm: NormKind | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            ops, in_features, sum(parts.values()), bias=bias, epilogue=epilogue, norm=norm, dtype=dtype
        )
        self.parts: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.parts[name] = slice(start, start + size)
            start += size
        self._sizes = list(parts.values())

    def split(self, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of an output [..., N], one per part."""
        return y.split_with_sizes(self._sizes, dim=-1)

    def stored_parts(self) -> Mapping[str, PackedPart]:
        """The weight, and bias, of each part."""
        kinds = ("weight",) if self.bias is None else ("weight", "bias")
        return {
            f"{part}.{kind}": PackedPart(kind, rows.start, rows.stop)
            for kind in kinds
            for part, rows in self.parts.items()
        }


def _fusions(ops: OpTableLike, facts: Mapping[str, Any]) -> dict[int, OpCall]:
    """What computes norm and product in one, by row bucket, where there is such a provider."""
    found = {rows: ops.find(OpQuery.of("norm_linear", rows=rows, **facts)) for rows in (*ROW_BUCKETS, 0)}
    return {rows: call for rows, call in found.items() if call is not None}
