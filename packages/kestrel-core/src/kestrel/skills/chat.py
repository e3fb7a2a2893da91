"""chat: the next message of a conversation. ``{"message": {"role", "content", …}, "finish_reason"}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kestrel.config import Settings
from kestrel.skills.channels import Channels
from kestrel.skills.inputs import check_names, flag
from kestrel.skills.messages import parse_messages
from kestrel.skills.text import TEXT_SETTINGS, text_request
from kestrel.skills.tools import parse_tools
from kestrel.spi.skill import Call, Request, Skill
from kestrel.types import FinishReason

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["ChatSkill"]


class ChatSkill(Skill):
    """``Call.values``: ``messages`` (``Message`` values) and ``tools`` (``Tool`` values). Media: as parts name them."""

    name = "chat"
    description = "continue a conversation, pictures included"

    def parse(self, inputs: Mapping[str, Any], settings: Settings) -> Call:
        check_names(self.name, inputs, ("messages", "tools", "reasoning"))
        messages, media = parse_messages(inputs.get("messages"))
        return Call(
            skill=self.name,
            values={"messages": messages, "tools": parse_tools(inputs.get("tools"))},
            media=media,
            settings=settings,
            reasoning=flag("reasoning", inputs.get("reasoning")),
        )

    def request(self, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer) -> Request:
        def shape(channels: Channels, reason: FinishReason) -> dict[str, Any]:
            message: dict[str, Any] = {"role": "assistant", "content": channels.text}
            if call.reasoning:
                message["reasoning"] = channels.reasoning
                message |= {"grounding": channels.grounding} if channels.grounding else {}
            if not channels.tool_calls:
                return {"message": message, "finish_reason": reason}
            message["tool_calls"] = channels.tool_calls
            return {"message": message, "finish_reason": "tool_calls" if reason == "stop" else reason}

        return text_request(self.name, call, prompt, tokenizer, shape)

    def setting_names(self) -> frozenset[str]:
        return TEXT_SETTINGS | {"max_reasoning_tokens"}
