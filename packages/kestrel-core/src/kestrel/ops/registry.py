"""Every op by name. Built here, once, explicitly; nothing registers itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kestrel.errors import likeliest
from kestrel.ops.causal_conv import CAUSAL_CONV
from kestrel.ops.cross_attention import CROSS_ATTENTION, WRITE_CROSS
from kestrel.ops.decode_attention import DECODE_ATTENTION
from kestrel.ops.e4m3 import E4M3_CAST, E4M3_LINEAR, E4M3_NORM
from kestrel.ops.fp8_grouped_experts import FP8_GROUPED_EXPERTS
from kestrel.ops.fp8_linear import FP8_LINEAR
from kestrel.ops.gated_delta import GATED_DELTA
from kestrel.ops.gated_delta_step import GATED_DELTA_STEP
from kestrel.ops.gated_norm import DELTA_GATES, GATED_NORM
from kestrel.ops.grouped_experts import GROUPED_EXPERTS
from kestrel.ops.linear import LINEAR
from kestrel.ops.linear_pair import LINEAR_PAIR, LINEAR_SUM
from kestrel.ops.log_mel import LOG_MEL
from kestrel.ops.moe_route import MOE_ROUTE
from kestrel.ops.norm_linear import NORM_LINEAR
from kestrel.ops.norms import ADD_NORM, LAYER_NORM, RMS_NORM
from kestrel.ops.op import Op
from kestrel.ops.output_gate import OUTPUT_GATE
from kestrel.ops.paged_attention import PAGED_ATTENTION
from kestrel.ops.qk_norm_rope_kv_write import QK_NORM_ROPE_KV_WRITE
from kestrel.ops.resize_crops import RESIZE_CROPS
from kestrel.ops.rope import ROPE
from kestrel.ops.rope_angles import ROPE_ANGLES
from kestrel.ops.row_tables import ROW_INPUTS, ROW_RESULTS
from kestrel.ops.sample_argmax import SAMPLE_ARGMAX
from kestrel.ops.sample_commit import SAMPLE_COMMIT
from kestrel.ops.sample_draw import SAMPLE_DRAW
from kestrel.ops.sample_logprobs import SAMPLE_LOGPROBS
from kestrel.ops.sample_process import SAMPLE_PROCESS
from kestrel.ops.vision_attention import VISION_ATTENTION
from kestrel.ops.write_kv import COPY_PAGE, WRITE_KV

__all__ = ["OPS", "RESERVED", "unknown_ops"]

OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for op in (
            ADD_NORM,
            CAUSAL_CONV,
            COPY_PAGE,
            CROSS_ATTENTION,
            DECODE_ATTENTION,
            DELTA_GATES,
            E4M3_CAST,
            E4M3_LINEAR,
            E4M3_NORM,
            FP8_GROUPED_EXPERTS,
            FP8_LINEAR,
            GATED_DELTA,
            GATED_DELTA_STEP,
            GATED_NORM,
            GROUPED_EXPERTS,
            LAYER_NORM,
            LINEAR,
            LINEAR_PAIR,
            LINEAR_SUM,
            LOG_MEL,
            MOE_ROUTE,
            NORM_LINEAR,
            OUTPUT_GATE,
            PAGED_ATTENTION,
            QK_NORM_ROPE_KV_WRITE,
            RESIZE_CROPS,
            RMS_NORM,
            ROPE,
            ROPE_ANGLES,
            ROW_INPUTS,
            ROW_RESULTS,
            SAMPLE_ARGMAX,
            SAMPLE_COMMIT,
            SAMPLE_DRAW,
            SAMPLE_LOGPROBS,
            SAMPLE_PROCESS,
            VISION_ATTENTION,
            WRITE_CROSS,
            WRITE_KV,
        )
    }
)

RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "int4_grouped_experts": "experts whose weights are 4-bit integers",
        "int4_linear": "a product with 4-bit integers, scaled by groups",
        "int8_grouped_experts": "experts whose weights are 8-bit integers",
        "int8_linear": "a product with 8-bit integers, scaled by rows",
        "lora_delta": "what the adapters of a launch's rows add to a product",
        "lora_experts_delta": "what the adapters of a launch's rows add to experts",
        "prune_visual_tokens": "which positions of a media item a decoder keeps",
    }
)
"""Ops that have a name and no contract yet: no layer of core asks for them. A backend may offer them, and a family ask,
by an agreement of their own; when core defines one, its contract counts."""


def unknown_ops(names: Iterable[str]) -> dict[str, str]:
    """Those of ``names`` that core neither defines nor reserves, each with the known name that is likeliest meant, or
    "". A family of the same project may still ask for them."""
    known = [*OPS, *RESERVED]
    return {
        name: likeliest(name, known) for name in sorted(names) if name not in OPS and name not in RESERVED
    }
