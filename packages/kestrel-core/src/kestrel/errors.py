"""The exception tree. Callers branch on types, never on text.

KestrelError
├── InvalidRequestError   400  also a ValueError; change the request
│   └── InvalidMediaError 400  the image, audio or video cannot be used
├── UnknownModelError     404  no installed family or registered name answers to it
├── CapacityError         413  can never fit; shorten the request or raise a limit
├── EngineBusyError       429  retry after ``retry_after_s``
├── RequestTimeoutError   504  retry, or raise ``timeout_s``
├── RequestCancelledError 499  the caller gave up; nothing to retry
├── ModelOutputError      502  the model's text could not be read as what was asked; retrying may help when sampling
├── ModelFaultError       500  non-finite logits, a failed kernel or package; this request alone is lost
├── EngineStoppedError    503  the engine is stopped or stopping
├── LoadError             500  a checkpoint does not fit its model; lists what is missing, unexpected or misshapen
├── PluginError           500  a plugin is broken, outdated or claims a taken name
└── NoKernelError         500  no provider of an op supports what the model needs
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

__all__ = [
    "CapacityError",
    "EngineBusyError",
    "EngineStoppedError",
    "InvalidMediaError",
    "InvalidRequestError",
    "KestrelError",
    "LoadError",
    "ModelFaultError",
    "ModelOutputError",
    "NoKernelError",
    "PluginError",
    "RequestCancelledError",
    "RequestTimeoutError",
    "UnknownModelError",
    "closest",
    "likeliest",
    "shown",
]

MAX_SHOWN = 200


class KestrelError(Exception):
    """Base of every error that Kestrel raises on purpose."""

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class InvalidRequestError(KestrelError, ValueError):
    """The request itself is wrong. Change it; retrying as it is cannot help."""

    http_status = 400


class InvalidMediaError(InvalidRequestError):
    """An image, clip or frame cannot be read, is too large, or has a shape the model cannot take."""


class UnknownModelError(KestrelError):
    """No registered name, installed family or reachable repository answers to the model asked for."""

    http_status = 404


class CapacityError(KestrelError):
    """The request, or the model, can never fit the memory or context that it was given."""

    http_status = 413


class EngineBusyError(KestrelError):
    """The queue (or the decoded-media memory) is full. Retry after ``retry_after_s`` seconds."""

    http_status = 429
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(KestrelError):
    """``timeout_s`` ran out, queue time included. Retrying may help."""

    http_status = 504
    retryable = True


class RequestCancelledError(KestrelError):
    """The caller cancelled the request or closed its stream."""

    http_status = 499


class ModelOutputError(KestrelError):
    """The model's output cannot be read as what was asked for; ``raw_text`` is what it wrote."""

    http_status = 502
    retryable = True

    def __init__(self, message: str, *, raw_text: str = "") -> None:
        super().__init__(message)
        self.raw_text = raw_text


class ModelFaultError(KestrelError):
    """The model produced non-finite numbers, or a kernel or its package failed. Only this request is lost."""


class EngineStoppedError(KestrelError):
    """The engine is stopped, stopping or was never started."""

    http_status = 503


class LoadError(KestrelError):
    """A checkpoint does not fit its model, or cannot be read.

    ``missing``, ``unexpected`` and ``misshapen`` name tensors; they are empty when the file itself is at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshapen: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshapen = tuple(misshapen)


class PluginError(KestrelError):
    """A plugin failed to load, was written for another SPI version, or claims a name that is taken."""


class NoKernelError(KestrelError):
    """No provider of an op, the reference included, supports a query (``strict_ops``), or an override names none.

    ``reasons`` maps each provider to why it said no.
    """

    def __init__(self, message: str, *, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


def closest(name: str, choices: Iterable[str]) -> str:
    """A phrase for an error message: the closest choice first, then the rest, in order of likeness."""
    listed = sorted(set(choices))
    near = likeliest(name, listed)
    rest = ", ".join(listed) or "none"
    return f"Did you mean {near!r}? Choices: {rest}" if near else f"Choices: {rest}"


def likeliest(name: str, choices: Iterable[str]) -> str:
    """The choice that ``name`` is most like; "" when it is like none."""
    near = difflib.get_close_matches(name, sorted(set(choices)), n=1, cutoff=0.5)
    return near[0] if near else ""


def shown(value: object) -> str:
    """``repr(value)`` for an error message: never longer than a line's worth, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, or anybody's __repr__
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 20]}… ({len(text)} characters)"
