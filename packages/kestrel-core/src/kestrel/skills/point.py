"""point: where objects are. ``{"points": [{"x", "y"}]}``, 0–1 of the upright original; ``label`` for a list."""

from kestrel.skills.objects import ObjectSkill

__all__ = ["PointSkill"]


class PointSkill(ObjectSkill):
    """A point on each object."""

    name = "point"
    description = "point at every object of a kind"
    key = "points"
