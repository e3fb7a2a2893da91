"""Which parts of a recording to transcribe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kestrel.errors import InvalidRequestError, shown
from kestrel.skills.inputs import is_list

__all__ = ["Clip", "clips_of"]

Clip = tuple[float, float | None]


def clips_of(values: dict[str, Any]) -> tuple[Clip, ...]:
    """The clips that ``values`` names, which are taken out of it: (start, end) in seconds; no end is the file's.

    ``clip_start_seconds`` and ``clip_end_seconds``; or ``clip_timestamps``: "start,end,start,…", a list of numbers, or
    of {"start", "end"}. InvalidRequestError unless every clip ends after its start, and the next begins behind it.
    """
    start, end = values.pop("clip_start_seconds", None), values.pop("clip_end_seconds", None)
    listed = values.pop("clip_timestamps", None)
    if listed is not None and (start is not None or end is not None):
        raise InvalidRequestError(
            "clip_timestamps and clip_start_seconds or clip_end_seconds contradict each other; give one of them"
        )
    if listed is None:
        if start is None and end is None:
            return ()
        clips = [(_seconds("clip_start_seconds", start or 0), _end("clip_end_seconds", end))]
    else:
        clips = _listed(listed)
    at = 0.0
    for clip_start, clip_end in clips:
        if clip_start < at or (clip_end is not None and clip_end <= clip_start):
            raise InvalidRequestError(
                f"the clip from {clip_start:g} to {'the end' if clip_end is None else format(clip_end, 'g')} does not "
                f"lie behind {at:g} s with a positive length; order clips by time, without overlaps"
            )
        at = math.inf if clip_end is None else clip_end
    return tuple(clips)


def _listed(value: Any) -> list[Clip]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not is_list(value):
        raise InvalidRequestError(f"clip_timestamps is a {type(value).__name__}; give a list of seconds")
    if value and all(isinstance(item, Mapping) for item in value):
        return [
            (_seconds("clip start", item.get("start")), _end("clip end", item.get("end"))) for item in value
        ]
    edges = [_seconds("clip_timestamps", item) for item in value]
    ends: list[float | None] = [*edges[1::2], None]
    if len(edges) == 1 and edges[0] == 0:
        return []
    return list(zip(edges[::2], ends, strict=False))


def _end(name: str, value: Any) -> float | None:
    return None if value is None else _seconds(name, value)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a number of seconds from 0")
    return seconds
