"""A checkpoint's own chat_template.jinja: what it does by default, and prompts rendered by it on request.

The template is a program from the checkpoint. It runs in jinja2's sandbox, sees plain values and can open nothing.
Everybody else's text passes through it in disguise, ``<`` and ``>`` as characters that occur nowhere in the
conversation, so that a control token in what it writes was spelled by the template alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel.errors import InvalidRequestError, LoadError
from kestrel.spi import MediaPart, Message, ModelCard, TextPart, Tool, ToolCall
from kestrel.types import Text
from kestrel_qwen.markup import (
    CONTROL,
    IMAGE_PAD,
    THINK,
    THOUGHT,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    Markup,
    Piece,
    split_control,
)
from kestrel_qwen.template import thought_and_said
from kestrel_qwen.tool_calls import as_json

if TYPE_CHECKING:
    from jinja2 import Template

    from kestrel_qwen.sizes import TextConfig

__all__ = ["CheckpointTemplate", "read_template", "thinks_by_default"]

FILE = "chat_template.jinja"
MAX_CHARACTERS = 64 * 2**20  # far beyond any context
PRIVATE_USE = range(0xE000, 0xF900)
ALWAYS_THINKS = 2560  # hidden size of the 4B model; the smaller ones, 0.8B and 2B, think when asked to
PADS = (IMAGE_PAD, VIDEO_PAD)


def read_template(card: ModelCard) -> str | None:
    """The source of the checkpoint's template: its own file, or an entry of tokenizer_config.json; None without."""
    try:
        if FILE in card.files:
            return (card.directory / FILE).read_text(encoding="utf-8")
        if "tokenizer_config.json" not in card.files:
            return None
        found = json.loads((card.directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(
            f"the chat template of {card.model_id} cannot be read: {error}. Download it again"
        ) from error
    source = found.get("chat_template") if isinstance(found, dict) else None
    return source if isinstance(source, str) else None


def thinks_by_default(source: str | None, text: TextConfig) -> bool:
    """Whether the model thinks when nobody says so: as its template does, else as published models of its size."""
    opening = ""
    if source is not None:
        with suppress(LoadError, InvalidRequestError):  # a broken one is refused where it is asked for
            opening = CheckpointTemplate.compile(source).opening()
    if THINK in opening:
        return THOUGHT not in opening
    return text.moe is not None or text.hidden_size >= ALWAYS_THINKS


@dataclass(frozen=True, slots=True)
class CheckpointTemplate:
    """A compiled template."""

    template: Template

    @classmethod
    def compile(cls, source: str) -> CheckpointTemplate:
        """From its source. LoadError when it is no template."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            return cls(environment.from_string(source))
        except TemplateError as error:
            raise LoadError(
                f"{FILE} is no template that can be used: {error}. Leave chat_template at 'builtin'"
            ) from error

    def opening(self) -> str:
        """How the template opens an answer when nothing is said of thinking."""
        return self._write({"messages": [{"role": "user", "content": "?"}]}).rpartition("?")[2]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], kinds: Sequence[str], *, thinking: bool
    ) -> list[Piece]:
        """The prompt by this template; ``kinds`` are those of the conversation's media.

        InvalidRequestError when it refuses, fails or loses a media item.
        """
        values: dict[str, Any] = {"messages": [_as_json(message, kinds) for message in messages]}
        values |= {"tools": [as_json(tool) for tool in tools]} if tools else {}
        disguise = _Disguise.for_values(values)
        written = self._write({**disguise.on(values), "enable_thinking": thinking})
        items = [p.item for message in messages for p in message.parts if isinstance(p, MediaPart)]
        return list(_pieces(split_control(written), items, disguise))

    def _write(self, values: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        written: list[str] = []
        size = 0
        try:
            for block in self.template.generate(**values, add_generation_prompt=True):
                written.append(block)
                size += len(block)
                if size > MAX_CHARACTERS:
                    raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
        except InvalidRequestError:  # raised by the template itself; a ValueError too
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise InvalidRequestError(
                f"the checkpoint's chat template fails on this conversation: {error}. "
                "Change the conversation, or load the model with chat_template='builtin'"
            ) from error
        return "".join(written)


@dataclass(frozen=True, slots=True)
class _Disguise:
    """Three characters that occur in no text of a conversation."""

    less: str
    more: str
    mark: str

    @classmethod
    def for_values(cls, values: Mapping[str, Any]) -> _Disguise:
        used = set(json.dumps(values, ensure_ascii=False, default=str))
        free = (character for code in PRIVATE_USE if (character := chr(code)) not in used)
        found = [character for character, _ in zip(free, range(3), strict=False)]
        if len(found) < 3:
            raise InvalidRequestError("the conversation uses every private-use character; remove some")
        return cls(*found)

    def on(self, value: Any) -> Any:
        """``value`` with every text in it, keys too, disguised."""
        if isinstance(value, Mapping):
            return {self.on(key): self.on(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.on(item) for item in value]
        return self._worn(value) if isinstance(value, str) else value

    def off(self, text: str) -> str:
        """The text behind the disguise."""
        return text.replace(self.less, "<").replace(self.more, ">").replace(self.mark, "")

    def _worn(self, text: str) -> str:
        worn = text.replace("<", self.less).replace(">", self.more)
        core = worn.strip()
        return (
            worn.replace(core, core + self.mark) if f"<{core}>" in CONTROL else worn
        )  # a template's own brackets


def _pieces(parts: Sequence[str], items: Iterable[int], disguise: _Disguise) -> Iterator[Piece]:
    """What a template wrote: control tokens that it spelled, media in their places, and text."""
    left = list(items)
    places = sum(part in PADS for part in parts)
    if places != len(left):
        raise InvalidRequestError(
            f"the checkpoint's chat template writes places for {places} of {len(left)} media items. "
            "Load the model with chat_template='builtin'"
        )
    for part, before, after in zip(parts, ("", *parts), (*parts[1:], ""), strict=False):
        if part in PADS:
            yield MediaPart(left.pop(0))
        elif (part == VISION_START and after in PADS) or (part == VISION_END and before in PADS):
            continue  # media bring their own markers
        else:
            yield Markup(part) if part in CONTROL else Text(disguise.off(part))


def _as_json(message: Message, kinds: Sequence[str]) -> dict[str, Any]:
    """A message as templates expect it. Thinking that stands tagged in the text is taken out of it."""
    content: Any = message.text
    if any(isinstance(part, MediaPart) for part in message.parts):
        content = [_part(part, kinds) for part in message.parts]
    found: dict[str, Any] = {"role": message.role, "content": content}
    thought = message.reasoning
    if message.role == "assistant" and not thought and THOUGHT in message.text:
        thought, found["content"] = thought_and_said(message)
    if thought:
        found["reasoning_content"] = thought
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.name:
        found["name"] = message.name
    return found


def _part(part: TextPart | MediaPart, kinds: Sequence[str]) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": kinds[part.item]}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise InvalidRequestError(f"the checkpoint's chat template refuses this conversation: {message}")
