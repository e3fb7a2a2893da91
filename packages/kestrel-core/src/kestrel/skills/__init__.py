"""The built-in skills, one file each, and what plugins build others from: readers, acceptors, input checks.

A skill owns validation and the shape of its result; prompts, decoding rules and parsers are the family's.
"""

from kestrel.skills.acceptors import ObjectLimit, ReasoningBudget, StopStrings
from kestrel.skills.caption import CaptionSkill
from kestrel.skills.channels import Channels
from kestrel.skills.chat import ChatSkill
from kestrel.skills.detect import DetectSkill
from kestrel.skills.detokenize import Detokeniser, StopFilter
from kestrel.skills.generate import GenerateSkill
from kestrel.skills.ladder import Ladder
from kestrel.skills.objects import ObjectSkill
from kestrel.skills.point import PointSkill
from kestrel.skills.query import QuerySkill
from kestrel.skills.readers import ObjectReader, TextReader, reasoning_of
from kestrel.skills.segment import SegmentSkill
from kestrel.skills.text import TEXT_SETTINGS, text_request
from kestrel.skills.transcribe import TranscribeSkill, ladder_of, options_of
from kestrel.skills.transcribe_options import TranscribeOptions
from kestrel.skills.transcript import SpokenSegment, SpokenWord, Transcript
from kestrel.spi.skill import Skill

__all__ = [
    "CaptionSkill",
    "Channels",
    "ChatSkill",
    "DetectSkill",
    "Detokeniser",
    "GenerateSkill",
    "Ladder",
    "ObjectLimit",
    "ObjectReader",
    "ObjectSkill",
    "PointSkill",
    "QuerySkill",
    "ReasoningBudget",
    "SegmentSkill",
    "SpokenSegment",
    "SpokenWord",
    "StopFilter",
    "StopStrings",
    "TEXT_SETTINGS",
    "TextReader",
    "TranscribeOptions",
    "TranscribeSkill",
    "Transcript",
    "builtin_skills",
    "ladder_of",
    "options_of",
    "reasoning_of",
    "text_request",
]


def builtin_skills() -> tuple[Skill, ...]:
    """The skills that core brings; a model does those that its family's prompt format names."""
    return (
        QuerySkill(),
        CaptionSkill(),
        PointSkill(),
        DetectSkill(),
        SegmentSkill(),
        ChatSkill(),
        GenerateSkill(),
        TranscribeSkill(),
    )
