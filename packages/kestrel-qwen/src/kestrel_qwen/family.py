"""The Qwen 3.5 and 3.6 family: what it recognises, says of a checkpoint, and how it is built. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from kestrel.spi import (
    BuildContext,
    Built,
    CatalogEntry,
    Match,
    ModelCard,
    ModelFamily,
    ModelInfo,
    TinyCheckpoint,
)
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.names import is_qwen
from kestrel_qwen.prompt import defaults_of, skills_of, thinks_of
from kestrel_qwen.sizes import MODEL_TYPES

__all__ = ["QwenFamily"]

PUBLISHED = (
    "Qwen/Qwen3.5-0.8B",
    "Qwen/Qwen3.5-2B",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.6-35B-A3B",
)
NOTE = "built to its specification and not yet tested against its published weights"
FP8_NOTE = "FP8 weights stay in 8 bits where a kernel backend multiplies by them, and are widened elsewhere."
TINY_SKILLS = ("query", "caption", "point", "detect", "chat", "generate")


class QwenFamily(ModelFamily):
    """Qwen 3.5 and 3.6: dense and mixture of experts, with vision or text alone, of any size."""

    name = "qwen"

    def match(self, card: ModelCard) -> Match | None:
        model_type = card.config.get("model_type")
        if model_type in MODEL_TYPES:
            return Match(score=10, reason=f"config.json says model_type {model_type}")
        if model_type is None and is_qwen(card.tensors):
            return Match(score=5, reason="tensors of gated DeltaNet layers as in Qwen 3.5")
        return None

    def describe(self, card: ModelCard) -> ModelInfo:
        config = QwenConfig.from_card(card)
        skills, thinks = skills_of(config), thinks_of(card, config)
        return ModelInfo(
            family=self.name,
            architecture=_architecture(config),
            skills=skills,
            num_parameters=sum(math.prod(shape) for shape in _weights(card)),
            max_context=config.text.max_positions,
            defaults={skill: defaults_of(skill, config, thinks=thinks) for skill in skills},
            dtype=_commonest_dtype(card),
            licence="Apache-2.0" if card.model_id.startswith("Qwen/") else "",
            notes=() if config.quantised_block is None else (FP8_NOTE,),
        )

    def build(self, card: ModelCard, ctx: BuildContext) -> Built:
        from kestrel_qwen.build import build

        return build(card, QwenConfig.from_card(card), ctx)

    def catalog(self) -> Sequence[CatalogEntry]:
        return tuple(CatalogEntry(name=name, source=f"hf:{name}", note=NOTE) for name in PUBLISHED)

    def tiny(self) -> TinyCheckpoint:
        def write(directory: Path, seed: int) -> None:
            from kestrel_qwen.tiny import write_tiny

            write_tiny(directory, seed)

        return TinyCheckpoint(write=write, skills=TINY_SKILLS)


def _architecture(config: QwenConfig) -> str:
    kind = "dense" if config.text.moe is None else f"{config.text.moe.experts} experts"
    return f"Qwen 3.5 ({kind}{', text only' if config.vision is None else ''})"


def _weights(card: ModelCard) -> Iterator[tuple[int, ...]]:
    """Shapes of what is used: no draft head, no scales."""
    for name, info in card.tensors.items():
        if not name.startswith("mtp.") and not name.endswith("_scale_inv"):
            yield info.shape


def _commonest_dtype(card: ModelCard) -> str:
    sizes: dict[str, int] = {}
    for info in card.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="")
