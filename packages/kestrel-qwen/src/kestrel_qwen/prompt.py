"""Qwen's prompts, decodings and parsers per skill. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kestrel.errors import InvalidRequestError, LoadError
from kestrel.spi import Call, Decoding, MediaPart, Message, Parser, Part, PromptFormat, TextPart, TokensPart
from kestrel.types import Segment, Text, Tokens
from kestrel_qwen.checkpoint_template import FILE, CheckpointTemplate, read_template, thinks_by_default
from kestrel_qwen.markup import END, END_OF_TEXT, TOOL_CALL, Markers, Piece
from kestrel_qwen.parser import AnswerParser
from kestrel_qwen.places import BOX_KEY, POINT_KEY, PlaceParser
from kestrel_qwen.reasoning import REASONS, budget_of, thinks
from kestrel_qwen.template import check_conversation, render

if TYPE_CHECKING:
    from kestrel.config import RuntimeConfig
    from kestrel.spi import ModelCard, TextTokenizer
    from kestrel_qwen.config import QwenConfig

__all__ = ["QwenPromptFormat", "defaults_of", "skills_of", "thinks_of"]

MAX_TOKENS = 4096  # thinking and answer together
MAX_OBJECTS = 50
CAPTIONS = {
    "short": "Describe this image in one short sentence.",
    "normal": "Describe this image in a few sentences.",
    "long": "Describe this image in detail: what it shows, where things are, and any text in it.",
}
# The keys and the scale are those that the models are trained to write.
POINT = (
    "Point at every instance of the following in the image: {object}. Answer with a JSON list alone, one entry for "
    'each instance: [{{"point_2d": [x, y], "label": "..."}}]. Coordinates go from 0 to 1000 of the image. '
    "If there is none, answer []."
)
DETECT = (
    "Locate every instance of the following in the image: {object}. Answer with a JSON list alone, one entry for "
    'each instance: [{{"bbox_2d": [x1, y1, x2, y2], "label": "..."}}]. Coordinates go from 0 to 1000 of the image. '
    "If there is none, answer []."
)
PLACES = {"point": (POINT, POINT_KEY), "detect": (DETECT, BOX_KEY)}


def skills_of(config: QwenConfig) -> tuple[str, ...]:
    """Skills of a checkpoint: those about pictures need its vision tower."""
    spoken = ("query", "chat", "generate")
    return spoken if config.vision is None else ("query", "caption", "point", "detect", "chat", "generate")


def defaults_of(skill: str, config: QwenConfig, *, thinks: bool) -> Mapping[str, Any]:
    """Default settings of ``skill``: what the checkpoint recommends; greedy where places or raw text are wanted."""
    if skill == "generate":
        return {"temperature": 0.0}
    if skill in PLACES:
        return {"temperature": 0.0, "max_tokens": MAX_TOKENS, "max_objects": MAX_OBJECTS}
    settings: dict[str, Any] = {**config.sampling, "max_tokens": MAX_TOKENS}
    return settings | {"reasoning": thinks} if skill in REASONS else settings


def thinks_of(card: ModelCard, config: QwenConfig) -> bool:
    """Whether ``card`` thinks unless told not to."""
    return thinks_by_default(read_template(card), config.text)


class QwenPromptFormat(PromptFormat):
    """Prompts of one loaded checkpoint; by ``template``, its own, where one is given."""

    def __init__(
        self,
        config: QwenConfig,
        tokenizer: TextTokenizer,
        *,
        thinks: bool | None = None,
        template: CheckpointTemplate | None = None,
    ) -> None:
        self.skills = frozenset(skills_of(config))
        self._config = config
        self._markers = Markers(tokenizer, config)
        self._template = template
        self._thinks = thinks_by_default(None, config.text) if thinks is None else thinks
        ends = (self._markers.ids.get(name) for name in (END, END_OF_TEXT))
        self._stop = config.eos_ids | {i for i in ends if i is not None}

    @classmethod
    def of(
        cls, card: ModelCard, config: QwenConfig, tokenizer: TextTokenizer, runtime: RuntimeConfig
    ) -> QwenPromptFormat:
        """The prompts of ``card``, by its own template if ``runtime`` asks for it. LoadError when it has none."""
        source, template = read_template(card), None
        if runtime.chat_template == "checkpoint":
            if source is None:
                raise LoadError(
                    f"chat_template is 'checkpoint' and {card.model_id} has no {FILE}. "
                    "Put one beside config.json, or leave chat_template at 'builtin'"
                )
            template = CheckpointTemplate.compile(source)
        return cls(config, tokenizer, thinks=thinks_by_default(source, config.text), template=template)

    def segments(self, skill: str, call: Call) -> list[Segment]:
        self.require(skill)
        if skill == "generate":
            return [segment for part in call.values["parts"] for segment in self._raw(part, call)]
        messages = call.values["messages"] if skill == "chat" else (_question(skill, call),)
        return self._markers.segments(self._render(messages, skill, call), call.prepared)

    def decoding(self, skill: str, call: Call) -> Decoding:
        return Decoding(stop_ids=self._stop, acceptors=budget_of(skill, call, self._markers))

    def parser(self, skill: str, call: Call) -> Parser | None:
        if skill == "generate":
            return None
        answer = AnswerParser(
            self._markers, thinking=thinks(skill, call), tools=call.values.get("tools") or ()
        )
        if skill not in PLACES:
            return answer
        return PlaceParser(answer, PLACES[skill][1], call.settings.max_objects or MAX_OBJECTS)

    def defaults(self, skill: str) -> Mapping[str, Any]:
        return defaults_of(skill, self._config, thinks=self._thinks)

    def validate(self, skill: str, call: Call) -> None:
        self.require(skill)
        if call.reasoning and skill not in REASONS:
            raise InvalidRequestError(f"{skill} does not reason on a Qwen model; leave reasoning out")
        budget_of(skill, call, self._markers)
        if skill == "chat":
            self._check_chat(call)
        if skill == "generate":
            self._check_ids(call.values["parts"])

    def _check_chat(self, call: Call) -> None:
        if call.values.get("tools") and TOOL_CALL not in self._markers.ids:
            raise InvalidRequestError(
                f"tools need the token {TOOL_CALL}, which this checkpoint's tokenizer lacks. Leave tools out"
            )
        if self._template is None:
            check_conversation(call.values["messages"])

    def _check_ids(self, parts: Sequence[Part]) -> None:
        pads = {self._config.image_token_id, self._config.video_token_id}
        for part in parts:
            if isinstance(part, TokensPart) and not pads.isdisjoint(part.ids):
                raise InvalidRequestError(
                    f"token_ids holds {next(i for i in part.ids if i in pads)}, which stands for media. "
                    "Give the image or video as a part of its own"
                )

    def _render(self, messages: Sequence[Message], skill: str, call: Call) -> list[Piece]:
        tools = call.values.get("tools") or ()
        thinking = thinks(skill, call)
        if self._template is None:
            return render(messages, tools, thinking=thinking)
        kinds = [role for role, _ in call.media]
        return self._template.render(messages, tools, kinds, thinking=thinking)

    def _raw(self, part: Part, call: Call) -> list[Segment]:
        match part:
            case TextPart(text):
                return [Text(text)]
            case TokensPart(ids):
                return [Tokens(tuple(ids))]
            case MediaPart(item):
                return self._markers.media(call.prepared[item], enclosed=False)


def _question(skill: str, call: Call) -> Message:
    """The user's message of a skill that is no conversation: its media, then its words."""
    if skill == "query":
        words = call.values["question"]
    elif skill == "caption":
        words = CAPTIONS[call.values.get("length") or "normal"]
    else:
        words = PLACES[skill][0].format(object=call.values["object"])
    media = tuple(MediaPart(i) for i in range(len(call.media)))
    return Message(role="user", parts=(*media, TextPart(words)))
