"""A checkpoint's card and context become a loaded model. The one place where all parts meet."""

from __future__ import annotations

import logging

import torch

from kestrel.errors import LoadError
from kestrel.media import MediaLimits
from kestrel.spi import BuildContext, Built, ModelCard
from kestrel_speech.whisper.align import AlignPass
from kestrel_speech.whisper.config import GenerationConfig, WhisperConfig
from kestrel_speech.whisper.driver import WhisperDriver
from kestrel_speech.whisper.halves import halve
from kestrel_speech.whisper.model import WhisperModel
from kestrel_speech.whisper.prompt import WhisperPrompt
from kestrel_speech.whisper.tokens import SpecialIds
from kestrel_speech.whisper.weights import load

__all__ = ["build"]

log = logging.getLogger(__name__)


def build(card: ModelCard, ctx: BuildContext) -> Built:
    """Driver, prompts and alignment of ``card``. LoadError when tensors or tokenizer disagree with its config."""
    config = WhisperConfig.from_card(card)
    generation = GenerationConfig.from_card(card, config)
    tokenizer = ctx.tokenizer()
    special = SpecialIds.of(tokenizer, config, generation)
    if tokenizer.vocab_size > config.vocab_size:
        raise LoadError(
            f"{card.model_id}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.vocab_size}. "
            "Give the tokenizer that the model was trained with as tokenizer_path."
        )
    with torch.device("meta"):
        model = WhisperModel(config, ctx.ops, ctx.dtype, ctx.config.page_size)
    load(model, ctx.weights, device=ctx.device, dtype=ctx.dtype)
    if halved := halve(model):
        log.debug("%s: %d products read their weights as float16", card.model_id, halved)
    return Built(
        main=WhisperDriver(config, model, tokenizer, ctx.device, special.eot, ctx.ops),
        prompt=WhisperPrompt(config, special, tokenizer, MediaLimits.of(ctx.config)),
        passes={"align": AlignPass(config, generation, special, model, ctx.device, ctx.config.page_size)},
    )
