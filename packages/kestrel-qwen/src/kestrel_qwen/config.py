"""A Qwen 3.5 or 3.6 checkpoint but for its tensors: sizes, control ids and what the files beside config.json say.

Nothing here reads a tensor or imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrel.errors import LoadError
from kestrel.spi import ModelCard
from kestrel_qwen.fields import Fields, require
from kestrel_qwen.processor import ImageConfig, VideoConfig
from kestrel_qwen.sizes import (
    MODEL_TYPES,
    SHARED,
    TEXT_TYPES,
    DeltaConfig,
    MoEConfig,
    RopeConfig,
    TextConfig,
    VisionConfig,
)

__all__ = ["DeltaConfig", "MoEConfig", "QwenConfig", "RopeConfig", "TextConfig", "VisionConfig"]

ARCHITECTURES = tuple(
    f"Qwen3_5{kind}For{use}" for kind in ("", "Moe") for use in ("ConditionalGeneration", "CausalLM")
)


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
        require(model_type in MODEL_TYPES, f"model_type is {model_type!r}, none of {', '.join(MODEL_TYPES)}")
        for name in values.get("architectures") or ():
            require(
                name in ARCHITECTURES, f"architectures names {name!r}, none of {', '.join(ARCHITECTURES)}"
            )
        f = Fields(values, "")
        inner = None if model_type in TEXT_TYPES else f.section("text_config")
        if inner is None:
            inner, f = values, Fields({}, "")
        vision = f.section("vision_config")
        text = TextConfig.from_hf(inner)
        config = cls(
            text=text,
            vision=None if vision is None else VisionConfig.from_hf(vision),
            tied=bool(values.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))),
            eos_ids=_ids(
                inner.get("eos_token_id"), values.get("eos_token_id"), generation.get("eos_token_id")
            ),
            quantised_block=_block(
                Fields(values, "").section("quantization_config")
                or Fields(inner, "text_config").section("quantization_config")
            ),
            images=ImageConfig.from_hf(images or {}),
            videos=VideoConfig.from_hf(videos or {}),
            sampling=_sampling(generation),
            **{key: f.take(key) for key in _VISION_IDS},
        )
        for key in (*SHARED, "model_type"):
            f.take(key)
        f.refuse_rest()
        _check(config)
        for sides in (images or {}, videos or {}):
            _check_sides(config, sides)
        return config


_VISION_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _check(config: QwenConfig) -> None:
    for end in config.eos_ids:
        require(
            _is_id(end, config.text.vocab_size),
            f"eos_token_id names {end!r}; it must be below vocab_size {config.text.vocab_size}",
        )
    if config.vision is None:
        return
    width, wanted = config.vision.out_hidden_size, config.text.hidden_size
    require(width == wanted, f"vision_config.out_hidden_size is {width} and text_config.hidden_size {wanted}")
    ids = (
        config.image_token_id,
        config.video_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
    )
    for key, token_id in zip(_VISION_IDS, ids, strict=True):
        require(
            _is_id(token_id, config.text.vocab_size),
            f"{key} is {token_id!r}; a model with vision needs it, below vocab_size {config.text.vocab_size}",
        )


def _check_sides(config: QwenConfig, sides: Mapping[str, Any]) -> None:
    """LoadError when a preprocessor file cuts patches of other sizes than the tower takes."""
    vision = config.vision
    if vision is None:
        return
    taken = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    for key, size in taken.items():
        found = sides.get(key)
        require(
            found is None or found == size,
            f"a preprocessor file says {key} is {found!r} and vision_config says {size}",
        )


def _is_id(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _sampling(generation: Mapping[str, Any]) -> Mapping[str, float]:
    """The settings that generation_config.json recommends: greedy where it says not to sample."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {key: generation[key] for key in _RANGES if generation.get(key) is not None}
    for key, value in found.items():
        low, high = _RANGES[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and low <= value <= high):
            raise LoadError(
                f"generation_config.json: {key} is {value!r}; it must be a number from {low:g} to {high:g}. "
                "Correct the file."
            )
    return found


_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "top_k": (0.0, 1e9)}


def _block(quantisation: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not quantisation:
        return None
    method = quantisation.get("quant_method")
    require(method == "fp8", f"quantization_config.quant_method is {method!r}; Kestrel reads block 'fp8'")
    block = quantisation.get("weight_block_size") or [128, 128]
    holds = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    require(
        holds, f"quantization_config.weight_block_size is {block!r}; it must be two whole numbers above 0"
    )
    return block[0], block[1]


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
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not JSON: {error}. Download it again") from error
    require(isinstance(found, dict), f"{name} holds no JSON object")
    return found
