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
from kestrel_qwen.sizes import DeltaConfig, MoEConfig, RopeConfig, TextConfig, VisionConfig

__all__ = ["DeltaConfig", "MoEConfig", "QwenConfig", "RopeConfig", "TextConfig", "VisionConfig"]

TEXT_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", *TEXT_TYPES)


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
        f = Fields(values, "")
        if model_type in TEXT_TYPES or values.get("text_config") is None:
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


def _check(config: QwenConfig) -> None:
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
            isinstance(token_id, int) and 0 <= token_id < config.text.vocab_size,
            f"{key} is {token_id!r}; a model with vision needs it, below vocab_size {config.text.vocab_size}",
        )


def _block(quantisation: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not quantisation:
        return None
    method = quantisation.get("quant_method")
    require(method == "fp8", f"quantization_config.quant_method is {method!r}; Kestrel reads block 'fp8'")
    block = tuple(quantisation.get("weight_block_size") or (128, 128))
    require(len(block) == 2 and min(block) > 0, f"quantization_config.weight_block_size is {block}")
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
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}. Download it again") from error
    require(isinstance(found, dict), f"{name} holds no JSON object")
    return found
