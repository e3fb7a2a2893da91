"""Sizes, kinds of layers and control ids of a Qwen 3.5 or 3.6 checkpoint, read once from its config.json.

Nothing here reads a tensor or imports torch. Sizes have no defaults: those of the classes fit few checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, Literal

from kestrel.errors import LoadError
from kestrel.spi import ModelCard
from kestrel_qwen.fields import Fields
from kestrel_qwen.processor import ImageConfig, VideoConfig

__all__ = ["DeltaConfig", "LayerKind", "MoEConfig", "QwenConfig", "RopeConfig", "TextConfig", "VisionConfig"]

LayerKind = Literal["full_attention", "linear_attention"]
KINDS = ("full_attention", "linear_attention")
TEXT_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", *TEXT_TYPES)
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
        f.only("hidden_act", "silu")
        f.only("attention_bias", False)
        f.only("attn_output_gate", True)
        f.only("norm_topk_prob", True)
        f.only("decoder_sparse_step", 1)
        for key in ("tie_word_embeddings", "eos_token_id", "quantization_config"):  # read elsewhere
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
        f.only("hidden_act", "gelu_pytorch_tanh")
        f.only("deepstack_visual_indexes", [])
        rope = f.take("rope_parameters", {})
        if rope.get("rope_type", "default") not in ("default", "axial"):
            f.only("rope_parameters.rope_type", "axial")
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
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
        )
        f.refuse_rest()
        _require(
            config.in_channels == 3, f"vision_config.in_channels is {config.in_channels}; pictures have 3"
        )
        _require(
            config.hidden_size % config.heads == 0, "vision_config.hidden_size is no multiple of num_heads"
        )
        _require(
            config.head_dim % 4 == 0, f"vision heads of {config.head_dim} cannot be rotated along two axes"
        )
        _require(
            config.grid_side**2 == config.num_position_embeddings,
            f"vision_config.num_position_embeddings is {config.num_position_embeddings}, which is no square",
        )
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenConfig:
    """Everything about a checkpoint but its tensors. ``vision`` is None for text-only models, and so are its ids.

    ``eos_ids``: ids that end an answer, by config.json and generation_config.json. ``sampling``: what the latter
    recommends. ``quantised_block``: rows and columns that share a scale in an FP8 checkpoint, else None.
    """

    text: TextConfig
    vision: VisionConfig | None = None
    tied: bool = False
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    quantised_block: tuple[int, int] | None = None
    images: ImageConfig = field(default_factory=ImageConfig)
    videos: VideoConfig = field(default_factory=VideoConfig)
    sampling: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_card(cls, card: ModelCard) -> QwenConfig:
        """The config of ``card``, with the preprocessor and generation files that lie beside it."""

        def side(name: str) -> Mapping[str, Any]:
            return _read(card, name)

        nested = side("processor_config.json")
        return cls.from_hf(
            card.config,
            generation=side("generation_config.json"),
            images=side("preprocessor_config.json") or nested.get("image_processor") or {},
            videos=side("video_preprocessor_config.json") or nested.get("video_processor") or {},
        )

    @classmethod
    def from_hf(
        cls,
        values: Mapping[str, Any],
        *,
        generation: Mapping[str, Any] | None = None,
        images: Mapping[str, Any] | None = None,
        videos: Mapping[str, Any] | None = None,
    ) -> QwenConfig:
        """From parsed files. Raises LoadError for what is missing, contradictory, or not implemented."""
        generation = generation or {}
        model_type = values.get("model_type")
        _require(model_type in MODEL_TYPES, f"model_type is {model_type!r}, none of {', '.join(MODEL_TYPES)}")
        f = Fields(values, "")
        if model_type in TEXT_TYPES or "text_config" not in values:
            inner, f = values, Fields({}, "")
        else:
            inner = f.take("text_config")
        vision = f.take("vision_config")
        text = TextConfig.from_hf(inner)
        config = cls(
            text=text,
            vision=None if vision is None else VisionConfig.from_hf(vision),
            tied=bool(values.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))),
            eos_ids=_ids(
                inner.get("eos_token_id"), values.get("eos_token_id"), generation.get("eos_token_id")
            ),
            quantised_block=_block(values.get("quantization_config") or inner.get("quantization_config")),
            images=ImageConfig.from_hf(images or {}),
            videos=VideoConfig.from_hf(videos or {}),
            sampling={
                k: generation[k] for k in ("temperature", "top_p", "top_k") if generation.get(k) is not None
            },
            **{key: f.take(key) for key in _VISION_IDS},
        )
        for key in ("tie_word_embeddings", "eos_token_id", "quantization_config"):
            f.take(key)
        f.refuse_rest()
        _check(config)
        return config


_VISION_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _layers(f: Fields, count: int) -> tuple[LayerKind, ...]:
    interval = f.whole("full_attention_interval", 4)
    listed = f.take("layer_types")
    f.only("mlp_only_layers", [])
    if listed is None:
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))
    _require(len(listed) == count, f"layer_types lists {len(listed)} layers and num_hidden_layers is {count}")
    for kind in listed:
        _require(kind in KINDS, f"layer_types names {kind!r}; Qwen 3.5 has {' and '.join(KINDS)}")
    return tuple(listed)


def _rope(f: Fields, head_dim: int) -> RopeConfig:
    older = {
        key: value for key in ("rope_theta", "partial_rotary_factor") if (value := f.take(key)) is not None
    }
    r = Fields(
        {**older, **f.take("rope_scaling", {}), **f.take("rope_parameters", {})},
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
    _require(
        rope.rot_dim > 0 and rope.rot_dim % 2 == 0, f"{rope.rot_dim} dimensions cannot be rotated in pairs"
    )
    _require(len(rope.sections) == 3, f"mrope_section is {list(rope.sections)}; it needs three numbers")
    return rope


def _moe(f: Fields) -> MoEConfig:
    moe = MoEConfig(
        experts=f.whole("num_experts"),
        top_k=f.whole("num_experts_per_tok"),
        intermediate_size=f.whole("moe_intermediate_size"),
        shared_intermediate_size=f.whole("shared_expert_intermediate_size"),
    )
    _require(
        moe.top_k <= moe.experts, f"num_experts_per_tok {moe.top_k} is more than num_experts {moe.experts}"
    )
    return moe


def _check_text(text: TextConfig) -> None:
    delta = text.delta
    _require(text.heads % text.kv_heads == 0, f"{text.heads} heads over {text.kv_heads} of keys")
    _require(
        delta.heads % delta.key_heads == 0, f"{delta.heads} linear value heads over {delta.key_heads} of keys"
    )
    _require("full_attention" in text.layers, "no layer has full attention")


def _check(config: QwenConfig) -> None:
    if config.vision is None:
        return
    width, wanted = config.vision.out_hidden_size, config.text.hidden_size
    _require(
        width == wanted, f"vision_config.out_hidden_size is {width} and text_config.hidden_size {wanted}"
    )
    ids = (
        config.image_token_id,
        config.video_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
    )
    for key, token_id in zip(_VISION_IDS, ids, strict=True):
        _require(
            isinstance(token_id, int) and 0 <= token_id < config.text.vocab_size,
            f"{key} is {token_id!r}; a model with vision needs it, below vocab_size {config.text.vocab_size}",
        )


def _block(quantisation: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not quantisation:
        return None
    method = quantisation.get("quant_method")
    _require(method == "fp8", f"quantization_config.quant_method is {method!r}; Kestrel reads block 'fp8'")
    block = tuple(quantisation.get("weight_block_size") or (128, 128))
    _require(len(block) == 2 and min(block) > 0, f"quantization_config.weight_block_size is {block}")
    return block


def _ids(*given: Any) -> frozenset[int]:
    found: set[int] = set()
    for value in given:
        found |= set(value) if isinstance(value, list) else set() if value is None else {value}
    return frozenset(found)


def _read(card: ModelCard, name: str) -> Mapping[str, Any]:
    path = card.directory / name
    if name not in card.files or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}. Download it again") from error
    _require(isinstance(found, dict), f"{name} holds no JSON object")
    return found


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise LoadError(
            f"config.json does not describe a Qwen 3.5 that Kestrel can run: {what}. Correct the file."
        )
