"""Generated ids as thinking, answer and tool calls. Control ids decide, never text that looks like them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kestrel.skills import Detokeniser
from kestrel.spi import Found, Parser, Piece, SayText, Tool
from kestrel.types import Token
from kestrel_qwen.markup import (
    THINK,
    THOUGHT,
    TOOL_CALL,
    TOOL_CALLED,
    TOOL_RESPONDED,
    TOOL_RESPONSE,
    Markers,
)
from kestrel_qwen.tool_calls import read_call

__all__ = ["AnswerParser"]

TAGS = (THINK, THOUGHT, TOOL_CALL, TOOL_CALLED, TOOL_RESPONSE, TOOL_RESPONDED)


class _In(Enum):
    THINKING = auto()
    ANSWER = auto()
    CALL = auto()


class AnswerParser(Parser):
    """Splits an output that begins inside the thinking (``thinking``) or after it.

    Line breaks that the format puts around the thinking, and space around calls, belong to neither channel. A call
    that cannot be read, or was not offered, is text as the model wrote it.
    """

    def __init__(self, markers: Markers, *, thinking: bool, tools: Sequence[Tool] = ()) -> None:
        self._tags = {i: name for i, name in markers.names.items() if name in TAGS}
        self._tools = tuple(tools)
        self._decoder = Detokeniser(markers.tokenizer)
        self._place = _In.THINKING if thinking else _In.ANSWER
        self._call: list[str] = []
        self._flow = _Flow(drop_first="\n", hold="\n") if thinking else self._answer_flow("")

    def feed(self, token: Token) -> Sequence[Piece]:
        tag = self._tags.get(token.id)
        if tag is None:
            return self._say(self._decoder.feed((token.id,)))
        before = self._say(self._decoder.finish())
        return (*before, *self._meet(tag))

    def finish(self, finish_reason: str) -> Sequence[Piece]:
        last = self._say(self._decoder.finish())
        if self._place is _In.CALL:
            last = (*last, *self._abandon())
        return (*last, *self._show(self._flow.held()))

    def _meet(self, tag: str) -> Sequence[Piece]:
        """What a tag does where it stands; a tag that means nothing there is text."""
        if self._place is _In.CALL:
            return self._meet_in_call(tag)
        if tag == THINK:
            return self._think()
        if tag == THOUGHT and self._place is _In.THINKING:
            self._place, self._flow = _In.ANSWER, self._answer_flow("\n")
            return ()
        if tag == TOOL_CALL and self._place is _In.ANSWER and self._tools:
            self._place, self._call = _In.CALL, []
            return ()
        return self._say(tag)

    def _think(self) -> Sequence[Piece]:
        if self._place is _In.THINKING:
            return ()
        shown = self._show(self._flow.held())
        self._place, self._flow = _In.THINKING, _Flow(drop_first="\n", hold="\n")
        return shown

    def _meet_in_call(self, tag: str) -> Sequence[Piece]:
        if tag == TOOL_CALL:  # the model began anew
            shown = self._abandon()
            self._place, self._call = _In.CALL, []
            return shown
        if tag != TOOL_CALLED:
            return self._say(tag)
        found = read_call("".join(self._call), self._tools)
        if found is None:
            self._call.append(tag)
            return self._abandon()
        self._place, self._flow = _In.ANSWER, self._answer_flow(None)
        return (Found(found, kind="tool_call"),)

    def _abandon(self) -> Sequence[Piece]:
        """The open call as the text that it is."""
        self._place = _In.ANSWER
        return self._say(TOOL_CALL + "".join(self._call))

    def _answer_flow(self, drop_first: str | None) -> _Flow:
        return _Flow(drop_first=drop_first, hold=None if self._tools else "")

    def _say(self, text: str) -> Sequence[Piece]:
        if self._place is _In.CALL:
            self._call.append(text)
            return ()
        return self._show(self._flow.feed(text))

    def _show(self, text: str) -> Sequence[Piece]:
        channel = "reasoning" if self._place is _In.THINKING else "text"
        return (SayText(text, channel),) if text else ()


class _Flow:
    """Text without the characters ``drop_first`` at its beginning, holding back ``hold`` at its end.

    Both are characters as ``str.strip`` takes them: None is all whitespace, "" nothing.
    """

    def __init__(self, *, drop_first: str | None, hold: str | None) -> None:
        self._drop_first = drop_first
        self._hold = hold
        self._is_first = True
        self._held = ""

    def feed(self, text: str) -> str:
        """What may be shown now."""
        if self._is_first and self._drop_first != "":
            text = text.lstrip(self._drop_first)
        if not text:
            return ""
        self._is_first = False
        text = self._held + text
        shown = text if self._hold == "" else text.rstrip(self._hold)
        self._held = text[len(shown) :]
        return shown

    def held(self) -> str:
        """What was held back, now that the end turned out not to be one of the format."""
        held, self._held = self._held, ""
        return held
