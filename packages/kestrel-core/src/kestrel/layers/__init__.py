"""Modules that model files are written with: weights under checkpoint-like names, maths through ops."""

from kestrel.layers.attention import PagedAttention, VisionAttention
from kestrel.layers.embedding import Embedding, embed, merge_media
from kestrel.layers.linear import Linear, Packed, packed_parts
from kestrel.layers.mlp import MLP
from kestrel.layers.norms import AddNorm, LayerNorm, RMSNorm
from kestrel.layers.rope import Angles, Rope

__all__ = [
    "MLP",
    "AddNorm",
    "Angles",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Packed",
    "PagedAttention",
    "RMSNorm",
    "Rope",
    "VisionAttention",
    "embed",
    "merge_media",
    "packed_parts",
]
