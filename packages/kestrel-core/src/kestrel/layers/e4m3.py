"""Products with both operands in floats of 8 bits (e4m3), where ``prefill_dtype`` asks for them.

A family asks for it where it has many rows, in encoders and prefill: beside the layers of a block it builds what is
here where ``multiplies_in_8_bits`` says so, and runs that in those launches, whatever their size: an answer must not
depend on what shares a launch. Decode steps use the weights that were loaded, which stay; the ones in 8 bits take half
as much again.

Scales are fixed when the weights are loaded. A norm without its weights is at most √C long in each number, so a product
of it is at most √C · |row of the weight| (Cauchy and Schwarz), what attention makes of such values no larger than they
are, and no GELU larger than what it is of.

Letters: … any leading axes (rows), C the width of the residual stream, K inputs, N outputs.
"""

from __future__ import annotations

import math

import torch

from kestrel.layers.linear import Linear
from kestrel.layers.norms import AddNorm, LayerNorm
from kestrel.ops.e4m3 import LARGEST, as_e4m3
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["E4M3Cast", "E4M3Linear", "E4M3Norm", "multiplies_in_8_bits"]


def multiplies_in_8_bits(ops: OpTableLike) -> bool:
    """Whether encoders and prefill do."""
    return ops.prefill_dtype == "float8_e4m3fn"


class E4M3Norm:
    """``norm`` with what the block before left to add, in 8 bits and without its weights, which go to the products.
    ``offset``: it is given one."""

    def __init__(self, ops: OpTableLike, norm: LayerNorm | AddNorm, *, offset: bool = False) -> None:
        assert norm.weight is not None, "a norm of a block has weights"
        assert norm.kind == "layer", (
            f"products in 8 bits take the weights of layer norms, not of {norm.kind} ones"
        )
        self.norm = norm
        facts = {"dim": len(norm.weight), "kind": norm.kind, "dtype": dtype_name(norm.weight.dtype)}
        self._calls = {
            delta: ops.resolve(OpQuery.of("e4m3_norm", delta=delta, offset=offset, **facts))
            for delta in (False, True)
        }

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, offset: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x + delta`` [..., C] (``x`` itself without a delta), and the norm of that and ``offset`` [C] float32."""
        call = self._calls[delta is not None]
        total, values = call(x, self.norm.eps, delta, offset, kind=self.norm.kind)
        return total, values


class E4M3Cast:
    """Numbers of at most ``bound``, which is set once weights are loaded, in 8 bits. ``activation``: an epilogue of
    ``ops.linear`` without a gate, computed before."""

    def __init__(
        self, ops: OpTableLike, width: int, activation: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.bound = 0.0
        self._activation = activation
        name = dtype_name(dtype or torch.get_default_dtype())
        self._call = ops.resolve(OpQuery.of("e4m3_cast", k=width, activation=activation, dtype=name))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``x`` [..., K]."""
        assert self.bound > 0, "a cast has its bound once the weights are loaded"
        out: torch.Tensor = self._call(x, LARGEST / self.bound, self._activation)
        return out


class E4M3Linear:
    """``linear`` in 8 bits and without its epilogue, beside the one that was loaded. ``of_norm`` or ``of_cast`` makes
    the weight, before a provider lays the other out (``Linear.pack``)."""

    def __init__(self, ops: OpTableLike, linear: Linear, *, adds_bias: bool) -> None:
        self._linear, self._adds_bias = linear, adds_bias
        self._dtype = linear.weight.dtype
        self._query = OpQuery.of(
            "e4m3_linear", k=linear.in_features, n=linear.out_features, dtype=dtype_name(self._dtype)
        )
        self._ops, self._call = ops, ops.resolve(self._query)
        self._weight: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def of_norm(self, norm: E4M3Norm) -> torch.Tensor:
        """Take the weights for inputs of ``norm``. Gives what no output can exceed, [N] float32."""
        weight, bias = self._linear.weight.float(), self._own_bias()
        gain, shift = norm.norm.weight, norm.norm.bias
        assert gain is not None
        if shift is not None:
            from_shift = weight @ shift.float()
            bias = from_shift if bias is None else bias + from_shift
        weight = weight * gain.float()
        longest = math.sqrt(weight.shape[1])
        self._fill(weight, longest, bias)
        most = weight.norm(dim=1) * longest
        out: torch.Tensor = most if bias is None else most + bias.abs()
        return out

    def of_cast(self, cast: E4M3Cast) -> None:
        """Take the weights for inputs of ``cast``, whose bound is known."""
        self._fill(self._linear.weight.float(), cast.bound, self._own_bias())

    def _own_bias(self) -> torch.Tensor | None:
        bias = self._linear.bias if self._adds_bias else None
        return None if bias is None else bias.float()

    def _fill(self, weight: torch.Tensor, bound: float, bias: torch.Tensor | None) -> None:
        largest = weight.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        self._weight = self._ops.pack(self._query, as_e4m3(weight * (LARGEST / largest)))
        self._scale = largest * (bound / LARGEST**2)
        self._bias = None if bias is None else bias.to(self._dtype)

    def __call__(self, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product [..., N] of ``values`` [..., K] e4m3, the bias, if it adds one, and ``residual`` [..., N]."""
        assert self._weight is not None, "a product in 8 bits is filled once the weights are loaded"
        out: torch.Tensor = self._call(
            values, self._weight, self._scale, self._bias, residual, dtype=self._dtype
        )
        return out
