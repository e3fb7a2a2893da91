"""segment: outlines. ``{"segments": [{"svg_path", "bbox", …}]}``; a path's coordinates are 0–1 of its box."""

from kestrel.skills.objects import ObjectSkill

__all__ = ["SegmentSkill"]


class SegmentSkill(ObjectSkill):
    """The outline of an object; what else a segment holds is the family's."""

    name = "segment"
    description = "outline an object"
    key = "segments"
