"""The core of a gated DeltaNet mixer: what lies between its projections. Weights stay with the model file."""

from __future__ import annotations

import torch
from torch import nn

from kestrel.ops.gated_delta_step import MixerWeights, split_qkv
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpQuery
from kestrel.spi.batch import Batch
from kestrel.spi.family import OpTableLike
from kestrel.spi.states import Recurrent, StatePart

__all__ = ["GatedDelta"]


class GatedDelta(nn.Module):
    """Convolution, gates, delta rule and gated norm over recurrent state ``state`` (parts "conv" and "state").

    ``layer`` counts within the state. Decode is one op; prefill is its parts.
    """

    def __init__(
        self,
        ops: OpTableLike,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        state: str,
        layer: int,
        *,
        taps: int = 4,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.key_heads, self.heads, self.value_dim = key_heads, heads, value_dim
        self.state, self.layer = state, layer
        name = dtype_name(dtype or torch.get_default_dtype())
        shape = {
            "key_heads": key_heads,
            "heads": heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "dtype": name,
        }
        conv = {"mode": "prefill", "taps": taps, "activation": "silu", "dtype": name}
        self._step = ops.resolve(OpQuery.of("gated_delta_step", taps=taps, **shape))
        self._conv = ops.resolve(OpQuery.of("causal_conv", **conv))
        self._rule = ops.resolve(OpQuery.of("gated_delta", mode="prefill", **shape))
        self._gates = ops.resolve(OpQuery.of("delta_gates", heads=heads, dtype=name))
        self._norm = ops.resolve(OpQuery.of("gated_norm", dim=value_dim, dtype=name))

    def forward(
        self,
        qkv_TC: torch.Tensor,
        z_THE: torch.Tensor,
        a_TH: torch.Tensor,
        b_TH: torch.Tensor,
        batch: Batch,
        weights: MixerWeights,
    ) -> torch.Tensor:
        """The mixer's output [T, H, E] before its last projection. Arguments as ``ops.gated_delta_step`` says."""
        view = batch.recurrent(self.state)
        if view.limits.is_decode:
            out: torch.Tensor = self._step(
                qkv_TC, z_THE, a_TH, b_TH, weights, self.key_heads, view, self.layer
            )
            return out
        mixed_TC = self._conv(qkv_TC, weights.conv_CW, None, view, self.layer)
        q, k, v = split_qkv(mixed_TC, self.key_heads, self.heads, self.value_dim)
        gate_TH, beta_TH = self._gates(a_TH, b_TH, weights.a_log_H, weights.dt_bias_H)
        out_THE = self._rule(q, k, v, gate_TH, beta_TH, view, self.layer)
        normed: torch.Tensor = self._norm(out_THE, z_THE, weights.norm_E, weights.eps)
        return normed

    @staticmethod
    def state_spec(
        name: str,
        layers: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        taps: int = 4,
        dtype: str = "float32",
    ) -> Recurrent:
        """The state that ``layers`` such mixers declare: convolution inputs in the model's dtype, S in ``dtype``."""
        channels = 2 * key_heads * key_dim + heads * value_dim
        parts = (
            StatePart(name="conv", shape=(channels, taps - 1)),
            StatePart(name="state", shape=(heads, key_dim, value_dim), dtype=dtype),
        )
        return Recurrent(name=name, layers=layers, parts=parts)
