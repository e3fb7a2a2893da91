"""Qwen 3.5's chat template in code: ChatML, tools, tool results, media, thinking of earlier turns dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kestrel.errors import InvalidRequestError
from kestrel.spi import MediaPart, Message, TextPart, Tool
from kestrel.types import Text
from kestrel_qwen.markup import END, START, THINK, THOUGHT, Markup, Piece
from kestrel_qwen.tool_calls import tool_block, written_call

__all__ = ["check_conversation", "render", "thought_and_said"]

_TURN_END = Markup(f"{END}\n")
_OPENING = {
    True: Markup(f"{START}assistant\n{THINK}\n"),
    False: Markup(f"{START}assistant\n{THINK}\n\n{THOUGHT}\n\n"),
}


def render(messages: Sequence[Message], tools: Sequence[Tool] = (), *, thinking: bool) -> list[Piece]:
    """The prompt after which the model answers, its thinking opened or (not ``thinking``) opened and closed.

    The thinking of assistants is kept only after the last message of a user, while tools are being called.
    """
    check_conversation(messages)
    system = messages[0] if messages[0].role == "system" else None
    turns = messages if system is None else messages[1:]
    last_query = max(place for place, message in enumerate(turns) if message.role == "user")
    pieces = list(_system(system, tools))
    for place, message in enumerate(turns):
        match message.role:
            case "user":
                pieces += [Markup(f"{START}user\n"), *_content(message), _TURN_END]
            case "assistant":
                pieces += _assistant(message, with_thinking=place > last_query)
            case _:
                is_first = turns[place - 1].role != "tool"
                is_last = place + 1 == len(turns) or turns[place + 1].role != "tool"
                pieces += _tool_result(message, is_first=is_first, is_last=is_last)
    return [*pieces, _OPENING[thinking]]


def check_conversation(messages: Sequence[Message]) -> None:
    """InvalidRequestError for conversations that the template has no form for."""
    if any(message.role == "system" for message in messages[1:]):
        raise InvalidRequestError(
            "a Qwen conversation has one system message, the first; several were given. Join them"
        )
    if not any(message.role == "user" for message in messages):
        raise InvalidRequestError(
            "a Qwen conversation needs a message of role 'user'; none was given. Add one"
        )
    for message in messages:
        is_spoken = message.role in ("system", "assistant")
        if is_spoken and any(isinstance(part, MediaPart) for part in message.parts):
            raise InvalidRequestError(f"a {message.role} message holds media; move it to a user message")


def thought_and_said(message: Message) -> tuple[str, str]:
    """The thinking and the answer of an assistant's message, trimmed. Thinking may stand tagged in the text."""
    said, thought = message.text.strip(), message.reasoning
    if not thought and THOUGHT in said:
        thought = said.split(THOUGHT)[0].split(THINK)[-1]
        said = said.split(THOUGHT)[-1].lstrip("\n")
    return thought.strip(), said


def _system(system: Message | None, tools: Sequence[Tool]) -> Iterator[Piece]:
    if system is None and not tools:
        return
    said = "" if system is None else system.text.strip()
    yield Markup(f"{START}system\n")
    if tools:
        yield from tool_block(tools)
        said = f"\n\n{said}" if said else ""
    yield Text(said)
    yield _TURN_END


def _content(message: Message) -> list[Piece]:
    """Text and media in order, without whitespace at both ends."""
    pieces: list[Piece] = [Text(p.text) if isinstance(p, TextPart) else p for p in message.parts]
    while pieces and isinstance(first := pieces[0], Text):
        pieces[0] = Text(first.text.lstrip())
        if pieces[0] != Text(""):
            break
        del pieces[0]
    while pieces and isinstance(last := pieces[-1], Text):
        pieces[-1] = Text(last.text.rstrip())
        if pieces[-1] != Text(""):
            break
        del pieces[-1]
    return pieces


def _assistant(message: Message, *, with_thinking: bool) -> Iterator[Piece]:
    thought, said = thought_and_said(message)
    yield Markup(f"{START}assistant\n")
    if with_thinking and thought:
        yield from (Markup(f"{THINK}\n"), Text(thought), Markup(f"\n{THOUGHT}\n\n"))
    yield Text(said)
    for place, call in enumerate(message.tool_calls):
        yield Markup("\n" if place else "\n\n" if said else "")
        yield from written_call(call)
    yield _TURN_END


def _tool_result(message: Message, *, is_first: bool, is_last: bool) -> Iterator[Piece]:
    if is_first:
        yield Markup(f"{START}user")
    yield Markup("\n<tool_response>\n")
    yield from _content(message)
    yield Markup("\n</tool_response>")
    if is_last:
        yield _TURN_END
