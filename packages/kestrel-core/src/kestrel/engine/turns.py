"""How long a thread may keep the interpreter from one that waits for it, while an accelerator's device thread runs.

Every call into torch lets go of the interpreter. Python gives it back after 5 ms, if another thread computes without a
pause; what a step launches takes a few microseconds at a time, so a device would wait for most of its time.
"""

from __future__ import annotations

import math
import sys
import threading

__all__ = ["TURN_S", "lengthen", "shorten"]

TURN_S = 1e-4
PYTHONS_S = 5e-3


class _Turns:
    """The interpreter's one switch interval. Used from any thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._users = 0
        self._is_short = False

    def shorten(self) -> None:
        """Short turns, until ``lengthen`` was called as often. A program that chose an interval itself keeps it."""
        with self._changing:
            self._users += 1
            if _is(PYTHONS_S):
                sys.setswitchinterval(TURN_S)
                self._is_short = True

    def lengthen(self) -> None:
        """As before the first ``shorten``, once nobody needs short turns any more."""
        with self._changing:
            self._users -= 1
            if self._users or not self._is_short:
                return
            self._is_short = False
            if _is(TURN_S):
                sys.setswitchinterval(PYTHONS_S)


def _is(seconds: float) -> bool:
    """Whether that is the interval; Python keeps whole microseconds."""
    return math.isclose(sys.getswitchinterval(), seconds, abs_tol=1e-6)


_TURNS = _Turns()
shorten, lengthen = _TURNS.shorten, _TURNS.lengthen
