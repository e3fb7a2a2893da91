"""A chat as Moondream sees it: turns of images, a question and an answer. It has no system turn and no tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kestrel.errors import InvalidRequestError
from kestrel.spi import MediaPart, Message, TextPart

__all__ = ["Turn", "turns_of"]

BLANK_LINE = "\n\n"


@dataclass(slots=True)
class Turn:
    """One question with its images (indices into the call's media), and the answer given to it, if any."""

    images: list[int] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def question(self) -> str:
        """What stands between the skill's prefix and its suffix."""
        return BLANK_LINE.join(self.questions)

    @property
    def answer(self) -> str | None:
        """What the assistant said, or None while it is asked."""
        return BLANK_LINE.join(self.answers) if self.answers else None


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a conversation, the last one unanswered. InvalidRequestError for what Moondream cannot be told.

    A system message is the beginning of the next question. Messages of one role in a row make one turn.
    """
    turns: list[Turn] = []
    instructions: list[str] = []
    for message in messages:
        match message.role:
            case "system":
                instructions.append(_text(message))
            case "user":
                if not turns or turns[-1].answers:
                    turns.append(Turn())
                turns[-1].images += [part.item for part in message.parts if isinstance(part, MediaPart)]
                turns[-1].questions += [*instructions, _question(message)]
                instructions = []
            case "assistant" if turns and not message.tool_calls:
                turns[-1].answers.append(_text(message))
            case "assistant":
                what = "calls a tool" if message.tool_calls else "comes before any question"
                raise InvalidRequestError(
                    f"an assistant message {what}; Moondream chats are questions and answers"
                )
            case _:
                raise InvalidRequestError(
                    f"Moondream chats have no {message.role!r} messages; leave them out"
                )
    if not turns or turns[-1].answers or instructions:
        raise InvalidRequestError("the last message of a chat must be the user's; add the question to answer")
    return turns


def _question(message: Message) -> str:
    text = _joined(message).strip()
    if not text:
        raise InvalidRequestError("a user message holds no text; Moondream needs a question beside the image")
    return text


def _text(message: Message) -> str:
    if any(isinstance(part, MediaPart) for part in message.parts):
        raise InvalidRequestError(
            f"a {message.role} message holds an image; Moondream takes images from the user"
        )
    return _joined(message)


def _joined(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))
