"""Small inputs that exercise a family: media of every kind, and a call of every skill that core knows how to spell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kestrel.config import Settings
from kestrel.skills import TranscribeOptions
from kestrel.spi import (
    AudioItem,
    Call,
    FloatsItem,
    ImageItem,
    MediaItem,
    MediaPart,
    MediaSpec,
    Message,
    TextPart,
    TokensPart,
    VideoItem,
)
from kestrel.types import Prepared

__all__ = ["sample_call", "sample_item"]

SAMPLE_RATE = 16_000
MAX_OBJECTS = 3


def sample_item(kind: str, seed: int) -> MediaItem | None:
    """A random item of ``kind``, other content for every ``seed``; None for a kind that core does not know."""
    rng = np.random.default_rng(seed)
    match kind:
        case "image":
            return ImageItem(pixels=_picture(rng, 61, 90))
        case "video":
            return VideoItem(
                frames=tuple(_picture(rng, 48, 64) for _ in range(4)), times_s=(0.0, 0.5, 1.0, 1.5)
            )
        case "audio":
            noise = rng.normal(0, 0.1, SAMPLE_RATE + SAMPLE_RATE // 3).clip(-1, 1)
            return AudioItem(samples=noise.astype(np.float32), sample_rate=SAMPLE_RATE)
        case "point":
            return FloatsItem(kind=kind, values=tuple(rng.uniform(0, 1, 2).tolist()))
        case "box":
            (x0, y0), (x1, y1) = np.sort(rng.uniform(0, 1, (2, 2)), axis=0).tolist()
            return FloatsItem(kind=kind, values=(x0, y0, x1, y1))
    return None


def sample_call(
    skill: str,
    text: str,
    prepared: Sequence[Prepared],
    specs: Sequence[MediaSpec],
    *,
    reasoning: bool = False,
) -> Call | None:
    """A call of ``skill`` about ``text`` and what is in ``prepared`` (images, or audio to transcribe); None for a
    skill that core cannot spell."""
    kind = "audio" if skill == "transcribe" else "image"
    items = [item for item in prepared if item.kind == kind]
    takes_images = any(spec.kind == "image" for spec in specs)
    if skill in ("caption", "point", "detect", "segment") and not takes_images:
        return None
    values = _values(skill, text, items)
    if values is None:
        return None
    return Call(
        skill=skill,
        values=values,
        media=tuple((kind, None) for _ in items),
        prepared=tuple(items),
        settings=Settings(max_objects=MAX_OBJECTS if skill in ("point", "detect", "segment") else None),
        reasoning=reasoning,
    )


def _values(skill: str, text: str, images: Sequence[Prepared]) -> Mapping[str, Any] | None:
    parts: tuple[TextPart | MediaPart, ...] = (*(MediaPart(i) for i in range(len(images))), TextPart(text))
    match skill:
        case "query":
            return {"question": text, "has_image": bool(images)}
        case "caption":
            return {"length": "normal"}
        case "point" | "detect" | "segment":
            return {"object": text}
        case "chat":
            return {"messages": (Message(role="user", parts=parts),), "tools": ()}
        case "generate":
            return {"parts": (TokensPart((1, 2)), *parts)}
        case "transcribe":
            return {"audio": None, "sample_rate": None, "options": TranscribeOptions(initial_prompt=text)}
    return None


def _picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    blocks = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return np.kron(blocks, np.ones((8, 8, 1), dtype=np.uint8))[:height, :width]
