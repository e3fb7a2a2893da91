"""generate: raw continuation; nothing is added to the prompt, not even BOS. ``{"text", "token_ids"}``."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError, shown
from kestrel.skills.channels import Channels
from kestrel.skills.inputs import Role, check_names, is_list, plain_text
from kestrel.skills.parts import PROMPT_TYPES, part_type
from kestrel.skills.text import TEXT_SETTINGS, text_request
from kestrel.spi.chat import MediaPart, Part, TextPart, TokensPart
from kestrel.spi.skill import Call, Request, Skill
from kestrel.types import FinishReason

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["GenerateSkill"]


class GenerateSkill(Skill):
    """``Call.values``: ``parts`` (``Part`` values). Media: as parts name them.

    ``token_ids`` of the result are the generated ids without a final stop id.
    """

    name = "generate"
    description = "continue a raw prompt"

    def parse(self, inputs: Mapping[str, Any], settings: Settings) -> Call:
        check_names(self.name, inputs, ("prompt",))
        parts, media = _parts(inputs.get("prompt"))
        return Call(skill=self.name, values={"parts": parts}, media=media, settings=settings)

    def request(self, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer) -> Request:
        for part in call.values["parts"]:
            _check_ids(part, tokenizer)

        def shape(channels: Channels, reason: FinishReason) -> dict[str, Any]:
            return {"text": channels.text, "token_ids": channels.token_ids}

        return text_request(self.name, call, prompt, tokenizer, shape)

    def setting_names(self) -> frozenset[str]:
        return TEXT_SETTINGS


def _parts(value: Any) -> tuple[tuple[Part, ...], tuple[Role, ...]]:
    if isinstance(value, str):
        value = [{"type": "text", "text": value}]
    if not is_list(value):
        raise InvalidRequestError(f"prompt is a {type(value).__name__}; give a string or a list of parts")
    parts: list[Part] = []
    media: list[Role] = []
    for place, item in enumerate(value):
        name = f"prompt[{place}]"
        kind, content = part_type(name, item, PROMPT_TYPES)
        if kind == "text":
            parts.append(TextPart(plain_text(f"{name}.text", content)))
        elif kind == "tokens":
            parts.append(TokensPart(_ids(f"{name}.token_ids", content)))
        else:
            parts.append(MediaPart(len(media)))
            media.append((kind, content))
    if not any(_has_positions(part) for part in parts):
        raise InvalidRequestError("prompt is empty; give at least one character, token or media item")
    return tuple(parts), tuple(media)


def _has_positions(part: Part) -> bool:
    match part:
        case TextPart(text):
            return bool(text)
        case TokensPart(ids):
            return bool(ids)
    return True


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not is_list(value):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}; give a list of token ids")
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or token_id < 0:
            raise InvalidRequestError(f"{name} holds {shown(token_id)}; token ids are whole numbers from 0")
    return tuple(map(int, value))


def _check_ids(part: Part, tokenizer: TextTokenizer) -> None:
    outside = [i for i in part.ids if i >= tokenizer.vocab_size] if isinstance(part, TokensPart) else []
    if outside:
        raise InvalidRequestError(
            f"prompt holds token {outside[0]}, outside this model's vocabulary; use ids from 0 to "
            f"{tokenizer.vocab_size - 1}"
        )
