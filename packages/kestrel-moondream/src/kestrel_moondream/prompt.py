"""Moondream's prompts: ids per skill from the checkpoint's templates, with the user's text between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrel.errors import InvalidRequestError, closest
from kestrel.spi import Call, Decoding, MediaPart, Parser, Part, PromptFormat, TextPart, TokensPart
from kestrel.types import Media, Segment, Text, Tokens
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.conversation import turns_of
from kestrel_moondream.decoding import AnswerDecodings
from kestrel_moondream.parser import BoxParser, Coordinates, PointParser, ReasoningParser

__all__ = ["MoondreamPrompt", "skills_of"]

TEXT_DEFAULTS = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 768}
MAX_OBJECTS = 50
REGION_DEFAULTS = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 768, "max_objects": MAX_OBJECTS}
SPATIAL_KINDS = ("point", "box")
REASONS = ("query", "chat")


def skills_of(config: MoondreamConfig) -> tuple[str, ...]:
    """Skills that the checkpoint has templates for."""
    templates = config.tokenizer.templates
    by_template = {"query": templates.query, "caption": templates.caption, "point": templates.point,
                   "detect": templates.detect, "chat": templates.query}  # fmt: skip
    return (*(skill for skill, template in by_template.items() if template is not None), "generate")


def defaults_of(skill: str) -> Mapping[str, Any]:
    """Default settings of ``skill``; reasoning is off unless asked for."""
    match skill:
        case "point" | "detect":
            return REGION_DEFAULTS
        case "generate":
            return {"temperature": 0.0}
        case "query" | "chat":
            return TEXT_DEFAULTS | {"reasoning": False}
    return TEXT_DEFAULTS


class MoondreamPrompt(PromptFormat):
    """Prompts of one loaded checkpoint."""

    def __init__(self, config: MoondreamConfig) -> None:
        self.skills = frozenset(skills_of(config))
        self._ids = config.tokenizer
        self._templates = config.tokenizer.templates
        self._decodings = AnswerDecodings(config.tokenizer)
        self._coordinates = Coordinates(config.region)
        self._vocab_size = config.text.vocab_size

    def segments(self, skill: str, call: Call) -> list[Segment]:
        self.require(skill)
        if skill == "generate":
            return [_raw(part, call) for part in call.values["parts"]]
        begin = Tokens((self._ids.bos_id,))
        if skill == "chat":
            return [begin, *self._chat(call)]
        images = [Media(item) for item in call.of_kind("image")]
        return [begin, *images, *self._ask(skill, call)]

    def decoding(self, skill: str, call: Call) -> Decoding:
        if skill in ("point", "detect"):
            return self._decodings.objects(skill, call.settings.max_objects or MAX_OBJECTS)
        if skill == "generate":
            return self._decodings.raw()
        if call.reasoning and skill in REASONS:
            return self._decodings.reasoning(call.settings.max_reasoning_tokens)
        return self._decodings.text()

    def parser(self, skill: str, call: Call) -> Parser | None:
        if skill == "point":
            return PointParser(self._ids, self._coordinates)
        if skill == "detect":
            return BoxParser(self._ids, self._coordinates)
        if call.reasoning and skill in REASONS:
            return ReasoningParser(self._ids, self._coordinates)
        return None

    def defaults(self, skill: str) -> Mapping[str, Any]:
        return defaults_of(skill)

    def validate(self, skill: str, call: Call) -> None:
        self.require(skill)
        roles = {role for role, _ in call.media}
        if "image" not in roles and (skill in ("caption", "point", "detect") or "spatial" in roles):
            what = "spatial_refs" if "spatial" in roles else skill
            raise InvalidRequestError(
                f"{what} on a Moondream model needs an image, and none was given. Pass one."
            )
        if call.reasoning and skill not in REASONS:
            raise InvalidRequestError(f"{skill} does not reason on a Moondream model; leave reasoning out")
        if call.values.get("tools"):
            raise InvalidRequestError("Moondream calls no tools; leave tools out")
        if skill == "caption":
            self._caption(call)
        if skill == "chat":
            turns_of(call.values["messages"])
        if skill == "generate":
            self._check_ids(call.values["parts"])

    def _check_ids(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, TokensPart) and not all(0 <= i < self._vocab_size for i in part.ids):
                raise InvalidRequestError(
                    f"token_ids holds {max(part.ids)}; this model's ids go from 0 to {self._vocab_size - 1}"
                )

    def _chat(self, call: Call) -> list[Segment]:
        turns = turns_of(call.values["messages"])
        segments: list[Segment] = []
        for turn in turns:
            prefix, opener = self._query(call.reasoning and turn is turns[-1])
            segments += [Media(call.prepared[item]) for item in turn.images]
            segments += [prefix, Text(turn.question), opener]
            if turn.answer is not None:
                segments.append(Text(turn.answer))
        return segments

    def _ask(self, skill: str, call: Call) -> list[Segment]:
        if skill == "caption":
            return [Tokens(self._caption(call))]
        spatial = [Media(item) for item in call.prepared if item.kind in SPATIAL_KINDS]
        if skill == "query":
            prefix, opener = self._query(call.reasoning)
            return [prefix, *spatial, Text(call.values["question"]), opener]
        template = self._templates.point if skill == "point" else self._templates.detect
        assert template is not None, f"{skill} was required"
        prefix_ids, suffix_ids = template
        return [Tokens(prefix_ids), *spatial, Text(" " + call.values["object"]), Tokens(suffix_ids)]

    def _query(self, reasoning: bool) -> tuple[Tokens, Tokens]:
        """What stands before a question, and what opens its answer or its reasoning."""
        assert self._templates.query is not None, "query was required"
        prefix, suffix = self._templates.query
        opener = (self._ids.thinking_id,) if reasoning else self._ids.answer_opener
        return Tokens(prefix), Tokens(suffix + opener)

    def _caption(self, call: Call) -> tuple[int, ...]:
        lengths = self._templates.caption
        assert lengths is not None, "caption was required"
        length = call.values.get("length") or "normal"
        if length not in lengths:
            raise InvalidRequestError(f"caption length {length!r} is not offered. {closest(length, lengths)}")
        return lengths[length]


def _raw(part: Part, call: Call) -> Segment:
    match part:
        case TextPart(text):
            return Text(text)
        case TokensPart(ids):
            return Tokens(tuple(ids))
        case MediaPart(item):
            return Media(call.prepared[item])
