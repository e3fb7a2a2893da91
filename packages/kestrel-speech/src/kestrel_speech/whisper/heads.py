"""Attention heads whose scores follow the audio in time, per published size: (decoder layer, head) pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kestrel_speech.whisper.config import WhisperConfig

__all__ = ["published_heads"]

Heads = tuple[tuple[int, int], ...]


def _pairs(text: str) -> Heads:
    pairs = (pair.split(",") for pair in text.split())
    return tuple((int(layer), int(head)) for layer, head in pairs)


HEADS = {
    "tiny.en": _pairs("1,0 2,0 2,5 3,0 3,1 3,2 3,3 3,4"),
    "tiny": _pairs("2,2 3,0 3,2 3,3 3,4 3,5"),
    "base.en": _pairs("3,3 4,7 5,1 5,5 5,7"),
    "base": _pairs("3,1 4,2 4,3 4,7 5,1 5,2 5,4 5,6"),
    "small.en": _pairs(
        "6,6 7,0 7,3 7,8 8,2 8,5 8,7 9,0 9,4 9,8 9,10 10,0 10,1 10,2 10,3 10,6 10,11 11,2 11,4"
    ),
    "small": _pairs("5,3 5,9 8,0 8,4 8,7 8,8 9,0 9,7 9,9 10,5"),
    "medium.en": _pairs(
        "11,4 14,1 14,12 14,14 15,4 16,0 16,4 16,9 17,12 17,14 18,7 18,10 18,15 20,0 20,3 20,9 20,14 21,12"
    ),
    "medium": _pairs("13,15 15,4 15,15 16,1 20,0 23,4"),
    "large-v1": _pairs("9,19 11,2 11,4 11,17 22,7 22,11 22,17 23,2 23,15"),
    "large-v2": _pairs(
        "10,12 13,17 16,11 16,12 16,13 17,15 17,16 18,4 18,11 18,19 19,11 21,2 21,3 22,3 22,9 22,12 23,5 23,7 23,13 "
        "25,5 26,1 26,12 27,15"
    ),
    "large-v3": _pairs("7,0 10,17 12,18 13,12 16,1 17,14 19,11 21,4 24,1 25,6"),
    "turbo": _pairs("2,4 2,11 3,3 3,6 3,11 3,14"),
}
SIZES = {  # decoder layers and width
    (4, 384): "tiny",
    (6, 512): "base",
    (12, 768): "small",
    (24, 1024): "medium",
    (4, 1280): "turbo",
}


def published_heads(config: WhisperConfig, model_id: str, *, is_multilingual: bool) -> Heads:
    """The heads of the published model that ``config`` is the size of; else all of the upper half of the layers."""
    name = SIZES.get((config.decoder_layers, config.dim), "")
    if (config.decoder_layers, config.dim) == (32, 1280):
        is_first = model_id.rsplit("/", 1)[-1] in ("whisper-large", "whisper-large-v1", "large-v1")
        name = "large-v3" if config.num_mels == 128 else "large-v1" if is_first else "large-v2"
    elif name and name != "turbo" and not is_multilingual:
        name += ".en"
    if name and config.encoder_layers >= config.decoder_layers:
        return HEADS[name]
    upper = range(config.decoder_layers // 2, config.decoder_layers)
    return tuple((layer, head) for layer in upper for head in range(config.decoder_heads))
