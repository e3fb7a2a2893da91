"""Which language a window is in: one id after the start of the transcript, among those of the languages."""

from __future__ import annotations

import math

from kestrel.config import Settings
from kestrel.errors import RequestCancelledError
from kestrel.spi import Decoding, Infer, Request
from kestrel.types import Media, Prepared, Tokens
from kestrel_speech.whisper.tokens import SpecialIds

__all__ = ["detect_language"]


async def detect_language(
    window: Prepared, infer: Infer, special: SpecialIds, decoding: Decoding, settings: Settings
) -> tuple[str, float]:
    """The most probable language of ``window`` and its probability among all languages."""
    request = Request(
        segments=(Media(window), Tokens((special.sot,))),
        decoding=decoding,
        settings=Settings(temperature=0.0, logprobs=True, seed=settings.seed, priority=settings.priority),
    )
    (output,) = await infer(request)
    if output.finish_reason == "cancelled":
        raise RequestCancelledError("the transcription was cancelled")
    token = output.tokens[0]
    code = next(code for code, i in special.languages.items() if i == token.id)
    return code, 0.0 if token.logprobs is None else math.exp(token.logprobs.logprob)
