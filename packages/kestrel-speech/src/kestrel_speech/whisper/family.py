"""The Whisper family: what it recognises, what it says about a checkpoint, how it is built. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from kestrel_speech.whisper.config import WhisperConfig, original_layout
from kestrel_speech.whisper.defaults import DEFAULTS

__all__ = ["WhisperFamily"]

PUBLISHED = (
    *(
        f"openai/whisper-{size}{english}"
        for size in ("tiny", "base", "small", "medium")
        for english in ("", ".en")
    ),
    "openai/whisper-large",
    "openai/whisper-large-v2",
    "openai/whisper-large-v3",
    "openai/whisper-large-v3-turbo",
    "distil-whisper/distil-small.en",
    "distil-whisper/distil-medium.en",
    "distil-whisper/distil-large-v2",
    "distil-whisper/distil-large-v3",
)
REVISIONS = {"openai/whisper-large-v3-turbo": "41f01f3fe87f28c78e2fbf8b568835947dd65ed9"}


class WhisperFamily(ModelFamily):
    """Whisper, of any size, in both published layouts."""

    name = "whisper"

    def match(self, card: ModelCard) -> Match | None:
        if card.config.get("model_type") == "whisper":
            return Match(score=10, reason="config.json says model_type whisper")
        if original_layout(card):
            return Match(score=8, reason="tensors with the names of the original code")
        return None

    def describe(self, card: ModelCard) -> ModelInfo:
        config = WhisperConfig.from_card(card)
        return ModelInfo(
            family=self.name,
            architecture="Whisper",
            skills=("transcribe",),
            num_parameters=sum(
                math.prod(info.shape)
                for name, info in card.tensors.items()
                if not name.startswith("proj_out.")
            ),
            max_context=config.text_context,
            defaults={"transcribe": DEFAULTS},
            dtype=_commonest_dtype(card),
            licence="MIT" if card.model_id.startswith(("openai/", "distil-whisper/")) else "",
        )

    def build(self, card: ModelCard, ctx: BuildContext) -> Built:
        from kestrel_speech.whisper.build import build

        return build(card, ctx)

    def catalog(self) -> Sequence[CatalogEntry]:
        return tuple(
            CatalogEntry(name=name, source=f"hf:{name}", revision=REVISIONS.get(name)) for name in PUBLISHED
        )

    def tiny(self) -> TinyCheckpoint:
        def write(directory: Path, seed: int) -> None:
            from kestrel_speech.whisper.tiny import write_tiny

            write_tiny(directory, seed)

        return TinyCheckpoint(write=write, skills=("transcribe",))


def _commonest_dtype(card: ModelCard) -> str:
    sizes: dict[str, int] = {}
    for info in card.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="")
