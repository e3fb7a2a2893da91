"""query: answer a question about images, a video or neither. ``{"answer"}``, and ``"reasoning"`` when it is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError
from kestrel.skills.channels import Channels
from kestrel.skills.inputs import check_names, flag, images, spatial_refs, text, video
from kestrel.skills.readers import reasoning_of
from kestrel.skills.text import TEXT_SETTINGS, text_request
from kestrel.spi.skill import Call, Request, Skill
from kestrel.types import FinishReason

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["QuerySkill"]

INPUTS = ("question", "image", "video", "spatial_refs", "reasoning")


class QuerySkill(Skill):
    """``Call.values``: ``question`` (stripped) and ``has_image``. Media: images, video, spatial references."""

    name = "query"
    description = "answer a question about an image"

    def parse(self, inputs: Mapping[str, Any], settings: Settings) -> Call:
        check_names(self.name, inputs, INPUTS)
        pictures = images(inputs.get("image"))
        clips, places = video(inputs.get("video")), spatial_refs(inputs.get("spatial_refs"))
        if places and not pictures:
            raise InvalidRequestError("spatial_refs point into an image and none was given; pass image=")
        return Call(
            skill=self.name,
            values={"question": text("question", inputs.get("question")), "has_image": bool(pictures)},
            media=(*pictures, *clips, *places),
            settings=settings,
            reasoning=flag("reasoning", inputs.get("reasoning")),
        )

    def request(self, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer) -> Request:
        def shape(channels: Channels, reason: FinishReason) -> dict[str, Any]:
            answer = {"answer": channels.text}
            return answer | {"reasoning": reasoning_of(channels)} if call.reasoning else answer

        return text_request(self.name, call, prompt, tokenizer, shape)

    def setting_names(self) -> frozenset[str]:
        return TEXT_SETTINGS | {"max_reasoning_tokens"}
