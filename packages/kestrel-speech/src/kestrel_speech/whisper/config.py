"""Sizes of a Whisper checkpoint and what its generation_config.json says. Read once; nothing here reads a tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrel.errors import LoadError
from kestrel.spi import ModelCard
from kestrel_speech.whisper.heads import published_heads

__all__ = ["GenerationConfig", "WhisperConfig", "original_layout"]

MULTILINGUAL_VOCABULARY = 51865  # the English-only models have one id less
HEAD_DIM = 64  # of every published size; the original layout does not say it

SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "dim",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "encoder_attention_heads": "encoder_heads",
    "decoder_attention_heads": "decoder_heads",
    "encoder_ffn_dim": "encoder_ffn",
    "decoder_ffn_dim": "decoder_ffn",
    "num_mel_bins": "num_mels",
    "max_source_positions": "audio_context",
    "max_target_positions": "text_context",
}  # config.json's names and ours


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig:
    """Sizes. ``audio_context`` encoder positions stand for one window; ``text_context`` is the decoder's."""

    vocab_size: int
    dim: int
    encoder_layers: int
    decoder_layers: int
    encoder_heads: int
    decoder_heads: int
    encoder_ffn: int
    decoder_ffn: int
    num_mels: int = 80
    audio_context: int = 1500
    text_context: int = 448
    scale_embedding: bool = False

    def __post_init__(self) -> None:
        for heads in (self.encoder_heads, self.decoder_heads):
            if self.dim % heads:
                raise LoadError(f"config.json: d_model {self.dim} is no multiple of {heads} heads")

    @property
    def num_frames(self) -> int:
        """Mel frames of a window: two per encoder position."""
        return 2 * self.audio_context

    @classmethod
    def from_card(cls, card: ModelCard) -> WhisperConfig:
        """The config of ``card``: from its config.json, else from the shapes of its tensors (original layout)."""
        if card.config.get("model_type") == "whisper":
            return cls.from_hf(card.config)
        if original_layout(card):
            return _from_shapes(card)
        raise LoadError(
            f"{card.model_id}: config.json does not say model_type 'whisper' and the tensors are not of the original "
            "layout. Put the checkpoint's config.json beside the weights."
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WhisperConfig:
        """From a parsed config.json. LoadError for what is missing or not supported."""
        missing = [name for name in SIZES if name not in config]
        if missing:
            raise LoadError(
                f"config.json lacks {', '.join(missing)}; take the file of the published checkpoint"
            )
        activation = config.get("activation_function", "gelu")
        if activation != "gelu":
            raise LoadError(f"config.json: activation_function is {activation!r}; Whisper models have 'gelu'")
        sizes = {ours: config[theirs] for theirs, ours in SIZES.items()}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LoadError(f"config.json: {name} is {size!r}; it must be a whole number from 1")
        return cls(**sizes, scale_embedding=bool(config.get("scale_embedding", False)))


def original_layout(card: ModelCard) -> bool:
    """Whether the tensors have the names of the original code."""
    return {
        "encoder.blocks.0.attn.query.weight",
        "decoder.blocks.0.cross_attn.query.weight",
    } <= card.tensors.keys()


def _from_shapes(card: ModelCard) -> WhisperConfig:
    shapes = {name: info.shape for name, info in card.tensors.items()}
    try:
        vocab_size, dim = shapes["decoder.token_embedding.weight"]
        ffn = shapes["encoder.blocks.0.mlp.0.weight"][0]
        return WhisperConfig(
            vocab_size=vocab_size,
            dim=dim,
            encoder_layers=_layers(card, "encoder"),
            decoder_layers=_layers(card, "decoder"),
            encoder_heads=max(1, dim // HEAD_DIM),
            decoder_heads=max(1, dim // HEAD_DIM),
            encoder_ffn=ffn,
            decoder_ffn=shapes["decoder.blocks.0.mlp.0.weight"][0],
            num_mels=shapes["encoder.conv1.weight"][1],
            audio_context=shapes["encoder.positional_embedding"][0],
            text_context=shapes["decoder.positional_embedding"][0],
        )
    except KeyError as error:
        raise LoadError(
            f"{card.model_id}: the checkpoint lacks {error.args[0]!r}; download it again",
            missing=[error.args[0]],
        ) from error


def _layers(card: ModelCard, half: str) -> int:
    return len({name.split(".")[2] for name in card.tensors if name.startswith(f"{half}.blocks.")})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What a checkpoint says about decoding; None where it says nothing and the published tables hold.

    ``alignment_heads``: (decoder layer, head) pairs whose attention follows the audio in time.
    """

    is_multilingual: bool
    alignment_heads: tuple[tuple[int, int], ...]
    suppress: tuple[int, ...] | None = None
    begin_suppress: tuple[int, ...] | None = None
    languages: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_card(cls, card: ModelCard, config: WhisperConfig) -> GenerationConfig:
        """From generation_config.json beside the weights, then config.json, then the published tables."""
        said = {**card.config, **_generation_file(card)}
        multilingual = said.get("is_multilingual")
        if multilingual is None:
            multilingual = config.vocab_size >= MULTILINGUAL_VOCABULARY
        given = said.get("alignment_heads") or ()
        heads = tuple((int(layer), int(head)) for layer, head in given)
        heads = heads or published_heads(config, card.model_id, is_multilingual=bool(multilingual))
        outside = [h for h in heads if h[0] >= config.decoder_layers or h[1] >= config.decoder_heads]
        if outside:
            raise LoadError(
                f"{card.model_id}: alignment head {outside[0]} is not one of the model's; correct the file"
            )
        languages = {str(name).strip("<|>"): int(i) for name, i in (said.get("lang_to_id") or {}).items()}
        return cls(
            is_multilingual=bool(multilingual),
            alignment_heads=heads,
            suppress=_ids(said.get("suppress_tokens")),
            begin_suppress=_ids(said.get("begin_suppress_tokens")),
            languages=languages,
        )


def _ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(i) for i in value if int(i) >= 0)


def _generation_file(card: ModelCard) -> dict[str, Any]:
    file = card.directory / "generation_config.json"
    if file.name not in card.files:
        return {}
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {file}: {error}. Download it again") from error
    if not isinstance(found, dict):
        raise LoadError(f"{file} holds a JSON {type(found).__name__}; an object is needed. Download it again")
    return found
