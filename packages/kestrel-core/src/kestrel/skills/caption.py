"""caption: describe an image, short, normal or long. ``{"caption"}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError, closest, shown
from kestrel.skills.channels import Channels
from kestrel.skills.inputs import check_names, one_image
from kestrel.skills.text import TEXT_SETTINGS, text_request
from kestrel.spi.skill import Call, Request, Skill
from kestrel.types import FinishReason

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["CaptionSkill"]

LENGTHS = ("short", "normal", "long")


class CaptionSkill(Skill):
    """``Call.values``: ``length``. Media: one image."""

    name = "caption"
    description = "describe an image"

    def parse(self, inputs: Mapping[str, Any], settings: Settings) -> Call:
        check_names(self.name, inputs, ("image", "length"))
        length = inputs.get("length")
        length = "normal" if length is None else length
        if length not in LENGTHS:
            raise InvalidRequestError(f"length is {shown(length)}. {closest(shown(length), LENGTHS)}")
        media = one_image(self.name, inputs.get("image"))
        return Call(skill=self.name, values={"length": length}, media=tuple(media), settings=settings)

    def request(self, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer) -> Request:
        def shape(channels: Channels, reason: FinishReason) -> dict[str, Any]:
            return {"caption": channels.text}

        return text_request(self.name, call, prompt, tokenizer, shape)

    def setting_names(self) -> frozenset[str]:
        return TEXT_SETTINGS
