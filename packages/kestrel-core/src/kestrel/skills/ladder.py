"""The ladder of temperatures: attempts at a window of speech until one is neither repetitive nor improbable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kestrel.checks import is_finite
from kestrel.errors import InvalidRequestError, shown

__all__ = ["LADDER_ALIASES", "LADDER_NAMES", "Ladder"]

MAX_BEST_OF = 8
LADDER_ALIASES = {"log_prob_threshold": "logprob_threshold", "temperatures": "temperature"}
LADDER_NAMES = frozenset(
    "temperature best_of compression_ratio_threshold logprob_threshold no_speech_threshold".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """``temperatures``: tried in order. An attempt fails when its text compresses by more than
    ``compression_ratio_threshold`` or its mean log-probability is below ``logprob_threshold``; a window whose
    probability of no speech exceeds ``no_speech_threshold`` and that is improbable is silence. None: not looked at.
    ``best_of``: samples drawn per attempt above temperature 0, of which the most probable counts."""

    temperatures: tuple[float, ...] = (0.0,)
    best_of: int = 1
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Ladder:
        """From settings by name; those left out are off. None turns a threshold off."""
        return cls().with_(**given)

    def with_(self, **changes: Any) -> Ladder:
        """A copy with ``changes``, checked; ``temperature`` is one number or a schedule."""
        if "temperature" in changes:
            changes["temperatures"] = _temperatures(changes.pop("temperature"))
        if changes.get("best_of", 1) is None:
            del changes["best_of"]
        ladder = replace(self, **changes)
        ladder._check()
        return ladder

    def _check(self) -> None:
        if (
            isinstance(self.best_of, bool)
            or not isinstance(self.best_of, int)
            or not 1 <= self.best_of <= MAX_BEST_OF
        ):
            raise InvalidRequestError(
                f"best_of is {shown(self.best_of)}; it must be a whole number from 1 to {MAX_BEST_OF}"
            )
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            if value is not None and not is_finite(value):
                raise InvalidRequestError(
                    f"{name} is {shown(value)}; it must be a finite number, or None to turn it off"
                )
        if self.no_speech_threshold is not None and not 0 <= self.no_speech_threshold <= 1:
            raise InvalidRequestError(
                f"no_speech_threshold is {shown(self.no_speech_threshold)}; it is a probability, from 0 to 1"
            )


def _temperatures(value: Any) -> tuple[float, ...]:
    steps = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    fits = bool(steps) and all(is_finite(step) and 0 <= step <= 1 for step in steps)
    if not fits or any(a >= b for a, b in pairwise(steps)):
        raise InvalidRequestError(
            f"temperature is {shown(value)}; give one number from 0 to 1, or a list of them that strictly increases"
        )
    return tuple(float(step) for step in steps)
