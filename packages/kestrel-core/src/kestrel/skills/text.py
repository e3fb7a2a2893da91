"""What skills that answer in text share: their settings and how their request is made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kestrel.skills.acceptors import StopStrings
from kestrel.skills.channels import Channels
from kestrel.skills.readers import Shape, TextReader
from kestrel.spi.skill import Call, Request

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["LIMITS", "MEDIA", "SAMPLING", "STOPPING", "TEXT_SETTINGS", "text_request"]

SAMPLING = frozenset("temperature top_p top_k min_p seed n max_tokens logprobs top_logprobs".split())
STOPPING = frozenset(
    "stop stop_token_ids min_tokens ignore_eos logit_bias "
    "repetition_penalty presence_penalty frequency_penalty".split()
)
LIMITS = frozenset("timeout_s priority".split())
MEDIA = frozenset("min_pixels max_pixels fps max_frames".split())
TEXT_SETTINGS = SAMPLING | STOPPING | LIMITS | MEDIA


def text_request(
    skill: str, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer, shape: Shape
) -> Request:
    """A request whose output is read as text; its stop strings end the row in the lane and cut it in the reader.

    Stop strings come before the family's acceptors, so that they see every token whatever those decide.
    """
    decoding, settings = prompt.decoding(skill, call), call.settings

    def stops() -> StopStrings:
        parser = prompt.parser(skill, call)
        return StopStrings(tokenizer, settings.stop, parser=parser, min_tokens=settings.min_tokens)

    def reader() -> TextReader:
        channels = Channels(
            tokenizer, prompt.parser(skill, call), stop=settings.stop, min_tokens=settings.min_tokens
        )
        return TextReader(channels, shape, with_reasoning=call.reasoning)

    if settings.stop:
        decoding = replace(decoding, acceptors=(stops, *decoding.acceptors))
    return Request(
        segments=tuple(prompt.segments(skill, call)), decoding=decoding, settings=settings, reader=reader
    )
