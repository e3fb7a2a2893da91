"""Sizes and kinds of layers: the sections ``text_config`` and ``vision_config`` of a Qwen 3.5 or 3.6 config.json.

Sizes have no defaults: those of the classes fit few checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

from kestrel_qwen.fields import Fields, require

__all__ = ["DeltaConfig", "LayerKind", "MoEConfig", "RopeConfig", "TextConfig", "VisionConfig"]

LayerKind = Literal["full_attention", "linear_attention"]
KINDS = ("full_attention", "linear_attention")
TEXT_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", *TEXT_TYPES)
SHARED = (
    "architectures",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
)  # read by ``QwenConfig``
VISION_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_vision", "qwen3_5_moe_vision")
PUBLISHED_SECTIONS = (11, 11, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Interleaved multi-axis rotary embedding: ``theta``, how many dimensions of a head turn, frequencies per axis."""

    theta: float
    rot_dim: int
    sections: tuple[int, ...] = PUBLISHED_SECTIONS

    @property
    def rows(self) -> tuple[int, ...]:
        """The position row that each frequency reads: 0 time, 1 height, 2 width."""
        _, high, wide = self.sections
        rows = []
        for i in range(self.rot_dim // 2):
            is_high, is_wide = i % 3 == 1 and i < 3 * high, i % 3 == 2 and i < 3 * wide
            rows.append(1 if is_high else 2 if is_wide else 0)
        return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """A gated DeltaNet mixer."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together: what the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A sparse feed-forward part: ``top_k`` of ``experts``, and one expert that every token passes."""

    experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The decoder. Exactly one of ``intermediate_size`` (dense) and ``moe`` is set."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    rope: RopeConfig
    delta: DeltaConfig
    intermediate_size: int | None = None
    moe: MoEConfig | None = None

    def index(self, layer: int) -> int:
        """How many layers before ``layer`` are of its kind: its place in their state."""
        return self.layers[:layer].count(self.layers[layer])

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> TextConfig:
        """From ``text_config``, or the whole of a text-only model's config.json."""
        f = Fields(values, "text_config")
        f.only("model_type", *MODEL_TYPES)
        f.only("hidden_act", "silu")
        f.only("attention_bias", False)
        f.only("attn_output_gate", True)
        f.only("norm_topk_prob", True)
        f.only("decoder_sparse_step", 1)
        for key in SHARED:
            f.take(key)
        head_dim = f.whole("head_dim")
        num_layers = f.whole("num_hidden_layers")
        is_moe = values.get("num_experts") is not None
        config = cls(
            vocab_size=f.whole("vocab_size"),
            hidden_size=f.whole("hidden_size"),
            layers=_layers(f, num_layers),
            heads=f.whole("num_attention_heads"),
            kv_heads=f.whole("num_key_value_heads"),
            head_dim=head_dim,
            eps=f.number("rms_norm_eps"),
            max_positions=f.whole("max_position_embeddings"),
            rope=_rope(f, head_dim),
            delta=DeltaConfig(
                key_heads=f.whole("linear_num_key_heads"),
                heads=f.whole("linear_num_value_heads"),
                key_dim=f.whole("linear_key_head_dim"),
                value_dim=f.whole("linear_value_head_dim"),
                taps=f.whole("linear_conv_kernel_dim"),
            ),
            intermediate_size=None if is_moe else f.whole("intermediate_size"),
            moe=_moe(f) if is_moe else None,
        )
        if is_moe:
            f.take("intermediate_size")  # of layers without experts, which published models lack
        f.refuse_rest()
        _check_text(config)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower. A patch is ``patch_size``² pixels of ``temporal_patch_size`` frames."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    out_hidden_size: int
    num_position_embeddings: int
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.heads

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def grid_side(self) -> int:
        """Side of the square table of learned positions."""
        return isqrt(self.num_position_embeddings)

    @property
    def factor(self) -> int:
        """Pixels along one side of what becomes one position of the prompt."""
        return self.patch_size * self.spatial_merge_size

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> VisionConfig:
        """From ``vision_config``."""
        f = Fields(values, "vision_config")
        f.only("model_type", *VISION_TYPES)
        f.only("hidden_act", "gelu_pytorch_tanh")
        f.only("deepstack_visual_indexes", [])
        r = Fields(f.section("rope_parameters") or {}, "vision_config.rope_parameters")
        r.only("rope_type", "default", "axial")
        config = cls(
            depth=f.whole("depth"),
            hidden_size=f.whole("hidden_size"),
            intermediate_size=f.whole("intermediate_size"),
            heads=f.whole("num_heads"),
            out_hidden_size=f.whole("out_hidden_size"),
            num_position_embeddings=f.whole("num_position_embeddings"),
            in_channels=f.whole("in_channels", 3),
            patch_size=f.whole("patch_size"),
            temporal_patch_size=f.whole("temporal_patch_size"),
            spatial_merge_size=f.whole("spatial_merge_size"),
            rope_theta=float(r.number("rope_theta", 10_000.0)),
        )
        r.refuse_rest()
        f.refuse_rest()
        require(
            config.in_channels == 3, f"vision_config.in_channels is {config.in_channels}; pictures have 3"
        )
        require(
            config.hidden_size % config.heads == 0, "vision_config.hidden_size is no multiple of num_heads"
        )
        require(
            config.head_dim % 4 == 0, f"vision heads of {config.head_dim} cannot be rotated along two axes"
        )
        require(
            config.grid_side**2 == config.num_position_embeddings,
            f"vision_config.num_position_embeddings is {config.num_position_embeddings}, which is no square",
        )
        return config


def _layers(f: Fields, count: int) -> tuple[LayerKind, ...]:
    interval = f.whole("full_attention_interval", 4)
    listed = f.take("layer_types")
    f.only("mlp_only_layers", [])
    if listed is None:
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))
    require(len(listed) == count, f"layer_types lists {len(listed)} layers and num_hidden_layers is {count}")
    for kind in listed:
        require(kind in KINDS, f"layer_types names {kind!r}; Qwen 3.5 has {' and '.join(KINDS)}")
    return tuple(listed)


def _rope(f: Fields, head_dim: int) -> RopeConfig:
    older = {
        key: value for key in ("rope_theta", "partial_rotary_factor") if (value := f.take(key)) is not None
    }
    r = Fields(
        {**older, **(f.section("rope_scaling") or {}), **(f.section("rope_parameters") or {})},
        "text_config.rope_parameters",
    )
    r.only("rope_type", "default")
    r.only("type", "default", "mrope")
    r.only("mrope_interleaved", True)
    rope = RopeConfig(
        theta=float(r.number("rope_theta")),
        rot_dim=int(head_dim * r.number("partial_rotary_factor", 0.25)),
        sections=tuple(r.take("mrope_section", PUBLISHED_SECTIONS)),
    )
    r.refuse_rest()
    require(
        rope.rot_dim > 0 and rope.rot_dim % 2 == 0, f"{rope.rot_dim} dimensions cannot be rotated in pairs"
    )
    are_whole = all(isinstance(n, int) and n >= 0 for n in rope.sections)
    require(
        are_whole and len(rope.sections) == 3,
        f"mrope_section is {list(rope.sections)}; it needs three whole numbers",
    )
    return rope


def _moe(f: Fields) -> MoEConfig:
    moe = MoEConfig(
        experts=f.whole("num_experts"),
        top_k=f.whole("num_experts_per_tok"),
        intermediate_size=f.whole("moe_intermediate_size"),
        shared_intermediate_size=f.whole("shared_expert_intermediate_size"),
    )
    require(
        moe.top_k <= moe.experts, f"num_experts_per_tok {moe.top_k} is more than num_experts {moe.experts}"
    )
    return moe


def _check_text(text: TextConfig) -> None:
    delta = text.delta
    require(text.heads % text.kv_heads == 0, f"{text.heads} heads over {text.kv_heads} of keys")
    require(
        delta.heads % delta.key_heads == 0, f"{delta.heads} linear value heads over {delta.key_heads} of keys"
    )
    require("full_attention" in text.layers, "no layer has full attention")
