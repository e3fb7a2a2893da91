"""The template's own text against everybody else's: control tokens are spelled only by the first.

A rendered prompt is a list of pieces: ``Markup`` (the template's), ``Text`` (users', tools', documents') and
``MediaPart``. Only here do pieces become segments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kestrel.errors import InvalidRequestError, LoadError
from kestrel.spi import MediaPart
from kestrel.types import Media, Prepared, Segment, Text, Tokens
from kestrel_qwen.slices import VIDEO, slices_of

if TYPE_CHECKING:
    from kestrel.spi import TextTokenizer
    from kestrel_qwen.config import QwenConfig

__all__ = [
    "CONTROL",
    "END",
    "END_OF_TEXT",
    "IMAGE_PAD",
    "START",
    "THINK",
    "THOUGHT",
    "TOOL_CALL",
    "TOOL_CALLED",
    "VIDEO_PAD",
    "VISION_END",
    "VISION_START",
    "Markers",
    "Markup",
    "Piece",
    "split_control",
]

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK, THOUGHT = "<think>", "</think>"
TOOL_CALL, TOOL_CALLED = "<tool_call>", "</tool_call>"
TOOL_RESPONSE, TOOL_RESPONDED = "<tool_response>", "</tool_response>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"

# What a template may spell as a control token, where the tokenizer has it as one.
CONTROL = (
    START, END, END_OF_TEXT, THINK, THOUGHT, TOOL_CALL, TOOL_CALLED, TOOL_RESPONSE, TOOL_RESPONDED,
    VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD,
)  # fmt: skip
_CONTROL = re.compile("|".join(re.escape(name) for name in CONTROL))


@dataclass(frozen=True, slots=True)
class Markup:
    """Text of the template itself: where it spells a control token, it means it."""

    text: str


Piece = Markup | Text | MediaPart


def split_control(text: str) -> list[str]:
    """``text`` cut at control tokens, which are elements of their own; no element is empty."""
    parts: list[str] = []
    at = 0
    for match in _CONTROL.finditer(text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [part for part in (*parts, text[at:]) if part]


class Markers:
    """Ids of control tokens by name, and pieces as segments. LoadError when the tokenizer has no ChatML."""

    def __init__(self, tokenizer: TextTokenizer, config: QwenConfig) -> None:
        self.tokenizer = tokenizer
        self._config = config
        found = {name: tokenizer.token_id(name) for name in CONTROL}
        # A name that is also a token of ordinary text has bytes: it controls nothing.
        self.ids: Mapping[str, int] = {
            name: i for name, i in found.items() if i is not None and not tokenizer.token_bytes(i)
        }
        self.names: Mapping[int, str] = {i: name for name, i in self.ids.items()}
        lacking = [name for name in (START, END) if name not in self.ids]
        if lacking:
            raise LoadError(
                f"the tokenizer has no control token {' and no '.join(lacking)}, which Qwen's chat needs. "
                "Give the checkpoint's own tokenizer.json as tokenizer_path"
            )

    def segments(self, pieces: Iterable[Piece], prepared: Sequence[Prepared]) -> list[Segment]:
        """The prompt that ``pieces`` render. Neighbouring texts are one text, so that they are tokenised as one."""
        found: list[Segment] = []
        for piece in pieces:
            match piece:
                case Markup(text):
                    for part in split_control(text):
                        found.append(Tokens((self.ids[part],)) if part in self.ids else Text(part))
                case Text():
                    found.append(piece)
                case MediaPart(item):
                    found += self.media(prepared[item], enclosed=True)
        return list(_joined(found))

    def media(self, prepared: Prepared, *, enclosed: bool) -> list[Segment]:
        """A media item as segments: an image ``enclosed`` in its markers or bare; a video as all of its slices."""
        opening, closing = self._config.vision_start_token_id, self._config.vision_end_token_id
        if opening is None or closing is None:
            raise InvalidRequestError(
                f"this checkpoint has no vision and was given media of kind {prepared.kind!r}"
            )
        start, end = Tokens((opening,)), Tokens((closing,))
        if prepared.kind != VIDEO:
            return [start, Media(prepared), end] if enclosed else [Media(prepared)]
        segments: list[Segment] = []
        for seconds, part in slices_of(prepared):
            segments += [Text(f"<{seconds:.1f} seconds>"), start, Media(part), end]
        return segments


def _joined(segments: Iterable[Segment]) -> Iterable[Segment]:
    """``segments`` with neighbouring texts, and neighbouring tokens, as one."""
    last: Segment | None = None
    for segment in segments:
        match last, segment:
            case Text(before), Text(after):
                last = Text(before + after)
            case Tokens(before_ids), Tokens(after_ids):
                last = Tokens(before_ids + after_ids)
            case _:
                if last is not None and last != Text(""):
                    yield last
                last = segment
    if last is not None and last != Text(""):
        yield last
