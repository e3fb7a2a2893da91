"""Checks of values that somebody typed: each gives the value back as plain Python, or says what is wrong with it.

``None`` means "not given" and passes, except where a function says otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from kestrel.errors import InvalidRequestError, closest, shown

__all__ = ["choice", "flag", "is_finite", "items", "number", "path", "text", "texts", "whole"]

MANY = 2**53  # bounds above are there for the machine; a message names them where they matter


def items(name: str, value: Any) -> tuple[Any, ...]:
    """``value``, a list, as a tuple; never None."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}; give a list")
    try:
        return tuple(value)
    except Exception as error:  # an array without dimensions, or anybody's iterator
        raise InvalidRequestError(f"{name} is a {type(value).__name__} ({error}); give a list") from error


def flag(name: str, value: Any) -> bool:
    """``value``, a boolean; never None."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be true or false")
    return value


def number(
    name: str, value: Any, low: float | None = None, high: float | None = None, *, open_low: bool = False
) -> float | None:
    """``value`` as an int or float; those of numpy are taken too."""
    if value is None:
        return None
    if not is_finite(value):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a finite number")
    _within(name, value, low, high, open_low)
    return value if isinstance(value, int) else float(value)


def is_finite(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold; a boolean is none."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int beyond the largest float
        return False


def whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> int | None:
    """``value`` as an int; those of numpy are taken too."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a whole number")
    _within(name, int(value), low, high, False)
    return int(value)


def _within(name: str, value: float, low: float | None, high: float | None, open_low: bool) -> None:
    too_low = low is not None and (value <= low if open_low else value < low)
    too_high = high is not None and value > high
    if too_low or too_high:
        bounds = [] if low is None else [f"{'above' if open_low else 'at least'} {low:g}"]
        bounds += (
            []
            if high is None or (high > MANY and not too_high)
            else [f"at most {high if isinstance(high, int) else format(high, 'g')}"]
        )
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be {' and '.join(bounds)}")


def text(name: str, value: Any) -> str | None:
    """``value`` as it is, if it is a non-empty string that a file name or an address can hold."""
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a non-empty string")
    return value


def path(name: str, value: Any) -> str | os.PathLike[str] | None:
    """``value`` as it is, if it is a path."""
    return value if isinstance(value, os.PathLike) else text(name, value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """``value``, a list of non-empty strings, as a tuple."""
    return tuple(text(f"{name}[{place}]", item) or "" for place, item in enumerate(items(name, value)))


def choice(name: str, value: Any, choices: Collection[str]) -> str:
    """``value``, one of ``choices``; never None."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(f"{name} is {shown(value)}. {closest(shown(value), choices)}")
    return value
