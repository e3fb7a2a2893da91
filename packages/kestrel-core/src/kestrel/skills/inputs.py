"""Checks of what callers pass to skills, before anything is decoded or queued."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

from kestrel.errors import InvalidRequestError, closest, shown

__all__ = [
    "Role",
    "check_names",
    "flag",
    "images",
    "is_list",
    "one_image",
    "plain_text",
    "spatial_refs",
    "text",
    "video",
]

Role = tuple[str, Any]


def check_names(skill: str, inputs: Mapping[str, Any], names: Collection[str]) -> None:
    """InvalidRequestError for an input that the skill does not take, naming the closest."""
    for name in inputs:
        if name not in names:
            raise InvalidRequestError(f"{skill} takes no input {name!r}. {closest(str(name), names)}")


def plain_text(name: str, value: Any) -> str:
    """``value`` as it is, if it is text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}; give a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} holds a lone surrogate at {error.start}; remove it") from None
    return value


def text(name: str, value: Any) -> str:
    """``value`` without outer whitespace; it must not be empty."""
    if value is None:
        raise InvalidRequestError(f"{name} is missing; give a non-empty string")
    stripped = plain_text(name, value).strip()
    if not stripped:
        raise InvalidRequestError(f"{name} is empty; give a non-empty string")
    return stripped


def flag(name: str, value: Any) -> bool:
    """A boolean; None is off."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be true or false")
    return value


def is_list(value: Any) -> bool:
    """Whether ``value`` is a plain list or tuple (arrays and strings are single values)."""
    return isinstance(value, list | tuple)


def images(value: Any) -> list[Role]:
    """None, one image or a list of images as media."""
    if value is None:
        return []
    if is_list(value) and not value:
        raise InvalidRequestError("image is an empty list; give an image, a list of images, or leave it out")
    return [("image", _image(item)) for item in (value if is_list(value) else [value])]


def one_image(skill: str, value: Any) -> list[Role]:
    """Exactly one image as media."""
    found = images(value)
    if len(found) != 1:
        raise InvalidRequestError(
            f"{skill} needs one image and was given {len(found) or 'none'}; pass image="
        )
    return found


def video(value: Any) -> list[Role]:
    """None or one video as media."""
    return [] if value is None else [("video", value)]


def spatial_refs(value: Any) -> list[Role]:
    """Points ``[x, y]`` and boxes ``[x_min, y_min, x_max, y_max]``, 0–1 of the image, as media in order."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise InvalidRequestError(
            f"spatial_refs is a {type(value).__name__}; give a list of [x, y] or [x_min, y_min, x_max, y_max]"
        )
    return [("spatial", _spatial(place, ref)) for place, ref in enumerate(value)]


def _image(value: Any) -> Any:
    if value is None or is_list(value) or isinstance(value, bool | int | float | Mapping):
        raise InvalidRequestError(
            f"an image is a {type(value).__name__}; give a path, bytes, a file, a PIL image, an array, a data URI "
            "or a prepared handle"
        )
    return value


def _spatial(place: int, ref: Any) -> tuple[float, ...]:
    name = f"spatial_refs[{place}]"
    if isinstance(ref, str | bytes) or not isinstance(ref, Sequence) or len(ref) not in (2, 4):
        raise InvalidRequestError(f"{name} is {shown(ref)}; give [x, y] or [x_min, y_min, x_max, y_max]")
    for number in ref:
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        if not is_number or not 0 <= number <= 1:  # which no NaN is
            raise InvalidRequestError(
                f"{name} holds {shown(number)}; coordinates are numbers from 0 to 1 of the image"
            )
    if len(ref) == 4 and (ref[0] > ref[2] or ref[1] > ref[3]):
        raise InvalidRequestError(f"{name} is {list(ref)}; x_min and y_min must not exceed x_max and y_max")
    return tuple(float(number) for number in ref)
