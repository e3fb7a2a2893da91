"""The Qwen 3.5 decoder: three gated DeltaNet layers to each layer of full attention.

Differs from the textbook decoder: every norm weight is stored minus one, but that of the DeltaNet's output; each query
head brings a gate for its output; queries and keys are normed per head; rotary embedding turns the first quarter of a
head, its frequencies dealt out to time, height and width in turn (interleaved M-RoPE). No biases.

Letters: T tokens, C hidden, H query (or value) heads, K key heads, D head dim, E value dim, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from kestrel.layers import (
    MLP,
    Angles,
    Deferred,
    Embedding,
    GatedDelta,
    Linear,
    MixerWeights,
    MoE,
    Packed,
    PagedAttention,
    RMSNorm,
    Rope,
    ScaledLinear,
    ScaledPacked,
)
from kestrel.spi import Batch, OpTableLike, StateSpec
from kestrel.spi.states import PagedKV
from kestrel_qwen.config import TextConfig

__all__ = ["DELTA", "FULL", "TextDecoder", "states_of"]

FULL, DELTA = "full", "delta"  # the states of full attention and of gated DeltaNet


def states_of(config: TextConfig, recurrent_dtype: str = "float32") -> tuple[StateSpec, ...]:
    """The state that the decoder keeps of a sequence; that of gated DeltaNet in ``recurrent_dtype``."""
    full, linear = (config.layers.count(kind) for kind in ("full_attention", "linear_attention"))
    pages = PagedKV(name=FULL, layers=full, kv_heads=config.kv_heads, head_dim=config.head_dim)
    if not linear:
        return (pages,)
    d = config.delta
    heads = (d.key_heads, d.heads, d.key_dim, d.value_dim)
    return pages, GatedDelta.state_spec(DELTA, linear, *heads, taps=d.taps, dtype=recurrent_dtype)


class GatedAttention(nn.Module):
    """Causal attention whose output passes a gate. ``q_proj`` holds [query | gate] of each head in turn."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        ops: OpTableLike,
        dtype: torch.dtype,
        page_size: int,
        scaled: bool,
    ) -> None:
        super().__init__()
        dim, self.head_dim = config.hidden_size, config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = {"q_proj": 2 * width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv = _packed(ops, dim, parts, dtype, scaled)
        self.q_norm = RMSNorm(ops, config.head_dim, config.eps, add_one=True, dtype=dtype)
        self.k_norm = RMSNorm(ops, config.head_dim, config.eps, add_one=True, dtype=dtype)
        self.o_proj = _adding(layer, ops, width, dim, dtype, scaled)
        self.attend = PagedAttention(
            ops, config.heads, config.kv_heads, config.head_dim, FULL, config.index(layer),
            rot_dim=config.rope.rot_dim, qk_norm="rms_plus_one", eps=config.eps, gated=True,
            page_size=page_size, dtype=dtype,
        )  # fmt: skip

    def forward(
        self, h_TC: Deferred, residual_TC: torch.Tensor, angles: Angles, batch: Batch
    ) -> torch.Tensor:
        both, k, v = self.qkv.split(self.qkv(h_TC))
        q_THD, gate_THD = both.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)
        k_TKD, v_TKD = (x.unflatten(-1, (-1, self.head_dim)) for x in (k, v))
        out_THD = self.attend(
            q_THD, k_TKD, v_TKD, batch, angles, self.q_norm.weight, self.k_norm.weight, gate_THD
        )
        return self.o_proj(out_THD.flatten(1), residual_TC)


class GatedDeltaNet(nn.Module):
    """Linear attention with a delta rule: a causal convolution, gates, the rule, a gated norm."""

    def __init__(
        self, config: TextConfig, layer: int, ops: OpTableLike, dtype: torch.dtype, scaled: bool
    ) -> None:
        super().__init__()
        d, self.eps = config.delta, config.eps
        width = d.heads * d.value_dim
        parts, gates = {"qkv": d.channels, "z": width}, {"b": d.heads, "a": d.heads}
        dim = config.hidden_size
        self.in_proj = _packed(ops, dim, parts if scaled else parts | gates, dtype, scaled)
        self.gates_proj = _packed(ops, dim, gates, dtype) if scaled else None
        self.conv1d = nn.Parameter(torch.empty(d.channels, d.taps, dtype=dtype), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(d.heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(d.heads, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(d.value_dim, dtype=torch.float32), requires_grad=False)
        self.out_proj = _adding(layer, ops, width, dim, dtype, scaled)
        self.value_dim = d.value_dim
        self.mix = GatedDelta(
            ops, d.key_heads, d.heads, d.key_dim, d.value_dim, DELTA, config.index(layer),
            taps=d.taps, dtype=dtype,
        )  # fmt: skip

    def forward(self, h_TC: Deferred, residual_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
        qkv_TC, z, *gates = self.in_proj.split(self.in_proj(h_TC))
        if self.gates_proj is not None:
            gates = list(self.gates_proj.split(self.gates_proj(h_TC)))
        b_TH, a_TH = gates
        weights = MixerWeights(
            conv_CW=self.conv1d, a_log_H=self.A_log, dt_bias_H=self.dt_bias, norm_E=self.norm, eps=self.eps
        )
        z_THE = z.unflatten(-1, (-1, self.value_dim))
        return self.out_proj(self.mix(qkv_TC, z_THE, a_TH, b_TH, batch, weights).flatten(1), residual_TC)


class Layer(nn.Module):
    """x + mixer(norm x), then x + mlp(norm x)."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        ops: OpTableLike,
        dtype: torch.dtype,
        page_size: int,
        scaled: bool,
    ) -> None:
        super().__init__()
        dim = config.hidden_size
        self.is_full = config.layers[layer] == "full_attention"
        self.input_layernorm = RMSNorm(ops, dim, config.eps, add_one=True, dtype=dtype)
        if self.is_full:
            self.self_attn = GatedAttention(config, layer, ops, dtype, page_size, scaled)
        else:
            self.linear_attn = GatedDeltaNet(config, layer, ops, dtype, scaled)
        self.post_attention_layernorm = RMSNorm(ops, dim, config.eps, add_one=True, dtype=dtype)
        self.mlp = _feed_forward(config, ops, dtype, scaled)

    def forward(self, x_TC: torch.Tensor, angles: Angles, batch: Batch) -> torch.Tensor:
        h_TC = self.input_layernorm.defer(x_TC)
        if self.is_full:
            x_TC = self.self_attn(h_TC, x_TC, angles, batch)
        else:
            x_TC = self.linear_attn(h_TC, x_TC, batch)
        h_TC = self.post_attention_layernorm.defer(x_TC)
        if isinstance(self.mlp, MoE):
            return x_TC + self.mlp(h_TC.value())
        return self.mlp(h_TC, x_TC)


def _packed(
    ops: OpTableLike, dim: int, parts: Mapping[str, int], dtype: torch.dtype, scaled: bool = False
) -> Packed | ScaledPacked:
    """The projections of normed hidden states."""
    if scaled:
        return ScaledPacked(ops, dim, parts, dtype=dtype)
    return Packed(ops, dim, parts, bias=False, norm="rms_plus_one", dtype=dtype)


def _adding(
    layer: int, ops: OpTableLike, width: int, dim: int, dtype: torch.dtype, scaled: bool
) -> Linear | ScaledLinear:
    """A mixer's projection, added to the hidden states: the first one leaves the embeddings as they are."""
    epilogue = "residual" if layer == 0 else "accumulate"
    if scaled:
        return ScaledLinear(ops, width, dim, epilogue=epilogue, dtype=dtype)
    return Linear(ops, width, dim, bias=False, epilogue=epilogue, dtype=dtype)


def _feed_forward(config: TextConfig, ops: OpTableLike, dtype: torch.dtype, scaled: bool) -> MLP | MoE:
    """Dense, or a few of many experts and a shared one: every layer has the same."""
    dim, moe = config.hidden_size, config.moe
    if moe is not None:
        return MoE(
            ops, dim, moe.intermediate_size, moe.experts, moe.top_k,
            shared_hidden=moe.shared_intermediate_size, scaled=scaled, dtype=dtype,
        )  # fmt: skip
    assert config.intermediate_size is not None, "a config is dense or has experts"
    return MLP(
        ops, dim, config.intermediate_size,
        activation="silu_mul", bias=False, accumulate=True, norm="rms_plus_one", scaled=scaled,
        dtype=dtype,
    )  # fmt: skip


class TextDecoder(nn.Module):
    """Token ids to embeddings, embeddings to hidden states. ``scaled``: as ``QwenModel`` has it."""

    def __init__(
        self, config: TextConfig, ops: OpTableLike, dtype: torch.dtype, page_size: int, scaled: bool = False
    ) -> None:
        super().__init__()
        rope = config.rope
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(config, layer, ops, dtype, page_size, scaled) for layer in range(len(config.layers))
        )
        self.norm = RMSNorm(ops, config.hidden_size, config.eps, add_one=True, dtype=dtype)
        self.rope = Rope(ops, config.head_dim, rope.rot_dim, rope.theta, rows=rope.rows, dtype=dtype)

    def forward(self, x_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states [T, C] before ``norm``."""
        angles = self.rope(batch.positions_PT)
        for layer in self.layers:
            x_TC = layer(x_TC, angles, batch)
        return x_TC
