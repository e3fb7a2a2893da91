"""Drawing what was found into copies of the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.cli.inputs import Picture
from kestrel.cli.targets import plan_paths
from kestrel.config import RuntimeConfig
from kestrel.errors import InvalidRequestError

__all__ = ["Drawing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A path to draw into for each picture; ``config`` holds the limits under which pictures are read again."""

    paths: Mapping[str, Path]
    config: RuntimeConfig
    verb: str = "drawn in"

    @classmethod
    def plan(cls, target: str | None, pictures: Sequence[Picture], config: RuntimeConfig) -> Drawing | None:
        """Paths for ``target``: a file (one picture), a directory, or a pattern with ``{stem}`` or ``{index}``.

        None when ``target`` is None. Raises InvalidRequestError when two pictures would share a path or a picture
        would overwrite an input.
        """
        if target is None:
            return None
        paths = plan_paths(target, pictures, ".annotated.png")
        return cls(paths=paths, config=config)

    def write(self, picture: Picture, output: Mapping[str, Any]) -> str:
        """The path of a copy of ``picture`` with what ``output`` found drawn in; missing folders are made."""
        from kestrel.media import MediaLimits, annotate, normalise_image

        assert picture.source is not None
        path = self.paths[picture.name]
        image = normalise_image(picture.source, MediaLimits.of(self.config))
        points = output.get("points", ())
        boxes = [*output.get("objects", ()), *(found["bbox"] for found in output.get("segments", ()))]
        labels = [str(found.get("label", "")) for found in (*boxes, *points)]
        drawn = annotate(image.pixels, points=points, boxes=boxes, labels=labels)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn.save(path)
        except (OSError, ValueError) as error:  # ValueError: Pillow knows no format for the file's suffix
            raise InvalidRequestError(
                f"cannot draw into {str(path)!r}: {error}. Choose another --output, ending in .png or .jpg"
            ) from error
        return str(path)
