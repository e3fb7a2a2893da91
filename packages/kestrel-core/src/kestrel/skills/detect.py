"""detect: boxes. ``{"objects": [{"x_min", "y_min", "x_max", "y_max"}]}``, 0–1 of the upright original."""

from kestrel.skills.objects import ObjectSkill

__all__ = ["DetectSkill"]


class DetectSkill(ObjectSkill):
    """A box around each object, ``label`` for a list of names."""

    name = "detect"
    description = "draw a box around every object of a kind"
    key = "objects"
    with_places = False
