"""Modules that model files are written with: weights under checkpoint-like names, maths through ops."""

from kestrel.layers.attention import CrossAttention, PagedAttention, VisionAttention
from kestrel.layers.e4m3 import E4M3Cast, E4M3Linear, E4M3Norm, multiplies_in_8_bits
from kestrel.layers.embedding import Embedding, embed, merge_media
from kestrel.layers.gated_delta import GatedDelta
from kestrel.layers.linear import Linear, Packed
from kestrel.layers.mlp import MLP
from kestrel.layers.moe import Experts, MoE
from kestrel.layers.norms import AddNorm, Deferred, LayerNorm, RMSNorm
from kestrel.layers.parallel import LinearPair, LinearSum
from kestrel.layers.rope import Angles, Rope
from kestrel.layers.scaled import ScaledExperts, ScaledLinear, ScaledPacked, serves_scaled
from kestrel.layers.stored import PackedPart, Stored, pack_weights, packed_parts
from kestrel.ops.gated_delta_step import MixerWeights

__all__ = [
    "MLP",
    "AddNorm",
    "Angles",
    "CrossAttention",
    "Deferred",
    "E4M3Cast",
    "E4M3Linear",
    "E4M3Norm",
    "Embedding",
    "Experts",
    "GatedDelta",
    "LayerNorm",
    "Linear",
    "LinearPair",
    "LinearSum",
    "MixerWeights",
    "MoE",
    "Packed",
    "PackedPart",
    "PagedAttention",
    "RMSNorm",
    "Rope",
    "ScaledExperts",
    "ScaledLinear",
    "ScaledPacked",
    "Stored",
    "VisionAttention",
    "embed",
    "merge_media",
    "multiplies_in_8_bits",
    "pack_weights",
    "packed_parts",
    "serves_scaled",
]
