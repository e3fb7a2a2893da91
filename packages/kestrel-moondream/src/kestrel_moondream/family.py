"""The Moondream family: what it recognises, what it says about a checkpoint, and how it is built. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from kestrel.errors import LoadError
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
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.names import PACKED, is_moondream, is_moondream3
from kestrel_moondream.prompt import defaults_of, skills_of
from kestrel_moondream.snapshot import STARMIE, refuse_legacy, wants_starmie

__all__ = ["MoondreamFamily"]

NANO_DIR = Path(__file__).resolve().parent / "nano"
NANO_NOTE = (
    "kestrel/nano is a small demonstration model: it knows synthetic scenes of shapes, words and bar charts."
)


class MoondreamFamily(ModelFamily):
    """Moondream 2, of any size, in both published layouts."""

    name = "moondream"

    def match(self, card: ModelCard) -> Match | None:
        if is_moondream(card.tensors):
            return Match(score=10, reason="tensors of a Moondream vision encoder and text decoder")
        if card.config.get("model_type") == "moondream1":
            return Match(score=5, reason="config.json says model_type moondream1")
        return None

    def describe(self, card: ModelCard) -> ModelInfo:
        if is_moondream3(card.tensors):
            return _described_moondream3(card)
        config = MoondreamConfig.from_card(card)
        skills = skills_of(config)
        is_nano = card.directory == NANO_DIR
        return ModelInfo(
            family=self.name,
            architecture="Moondream 2",
            skills=skills,
            num_parameters=_parameters(card),
            max_context=config.text.max_context,
            defaults={skill: defaults_of(skill) for skill in skills},
            dtype=_commonest_dtype(card),
            licence="Apache-2.0" if is_nano or card.model_id.startswith("vikhyatk/") else "",
            notes=(NANO_NOTE,) if is_nano else (),
        )

    def build(self, card: ModelCard, ctx: BuildContext) -> Built:
        if is_moondream3(card.tensors):
            raise LoadError(
                f"{card.model_id} is a Moondream 3 checkpoint (it has expert or tau tensors), and Moondream 3 is not "
                "supported yet. Use a Moondream 2 checkpoint such as 'vikhyatk/moondream2'."
            )
        from kestrel_moondream.build import build

        config = MoondreamConfig.from_card(card)
        refuse_legacy(card, forced=ctx.config.tokenizer_path is not None)
        return build(card, config, ctx)

    def tokenizer(self, card: ModelCard) -> str | None:
        return STARMIE if wants_starmie(card) else None

    def catalog(self) -> Sequence[CatalogEntry]:
        return (
            CatalogEntry(name="kestrel/nano", source=f"file:{NANO_DIR}", embedded=True, note=NANO_NOTE),
            CatalogEntry(name="vikhyatk/moondream2", source="hf:vikhyatk/moondream2", revision="2025-06-21"),
        )

    def tiny(self) -> TinyCheckpoint:
        def write(directory: Path, seed: int) -> None:
            from kestrel_moondream.tiny import write_tiny

            write_tiny(directory, seed)

        return TinyCheckpoint(write=write, skills=skills_of(MoondreamConfig()))


def _described_moondream3(card: ModelCard) -> ModelInfo:
    return ModelInfo(
        family=MoondreamFamily.name,
        architecture="Moondream 3",
        skills=(),
        num_parameters=_parameters(card),
        max_context=32768,
        dtype=_commonest_dtype(card),
        notes=("Moondream 3 is recognised, but not supported yet.",),
    )


def _parameters(card: ModelCard) -> int:
    """Parameters by the headers; a packed byte holds two, its scales none."""
    total = 0
    for name, info in card.tensors.items():
        if not name.endswith(PACKED[1:]):
            total += math.prod(info.shape) * (2 if name.endswith(PACKED[0]) else 1)
    return total


def _commonest_dtype(card: ModelCard) -> str:
    sizes: dict[str, int] = {}
    for info in card.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="")
