"""Golden conversations as the chat skill parses them, and pieces spelled out as the template writes them."""

import json
from pathlib import Path

import torch

from kestrel.skills.messages import parse_messages
from kestrel.skills.tools import parse_tools
from kestrel.spi import MediaPart
from kestrel.types import Prepared

GOLDENS = json.loads((Path(__file__).parent / "qwen-chat-goldens.json").read_text(encoding="utf-8"))["cases"]


def conversation(case):
    """Messages, tools and the kinds of media of a golden case."""
    messages, media = parse_messages([_with_media(message) for message in case["messages"]])
    return messages, parse_tools(case["tools"]), [kind for kind, _ in media]


def _with_media(message):
    content = message["content"]
    if isinstance(content, str):
        return message
    return message | {
        "content": [part if part["type"] == "text" else part | {part["type"]: "m"} for part in content]
    }


def items(kinds):
    """One small prepared item for each kind; a video has one slice, at 0.25 s."""
    grid = torch.tensor([[1, 2, 2]])
    return [
        Prepared(
            kind=kind,
            digest=bytes([i + 1]) * 32,
            num_positions=1,
            tensors={"patches": torch.zeros(4, 1), "grid": grid},
            meta={
                "slice_times_s": (0.25,),
                "slice_digests": (bytes([i + 1]) * 32,),
                "width": 32,
                "height": 32,
            },
        )
        for i, kind in enumerate(kinds)
    ]


def spelled_out(pieces, kinds):
    """The prompt as one string; each media item a placeholder between its markers."""
    return "".join(
        f"<|vision_start|><|{kinds[p.item]}_pad|><|vision_end|>" if isinstance(p, MediaPart) else p.text
        for p in pieces
    )
