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

_changing = threading.Lock()
_users = 0


def shorten() -> None:
    """Short turns, until ``lengthen`` was called as often. A program that chose an interval itself keeps it."""
    global _users
    with _changing:
        _users += 1
        if _is(PYTHONS_S):
            sys.setswitchinterval(TURN_S)


def lengthen() -> None:
    """As before the first ``shorten``, once nobody needs short turns any more."""
    global _users
    with _changing:
        _users -= 1
        if not _users and _is(TURN_S):
            sys.setswitchinterval(PYTHONS_S)


def _is(seconds: float) -> bool:
    """Whether that is the interval; Python keeps whole microseconds."""
    return math.isclose(sys.getswitchinterval(), seconds, abs_tol=1e-6)
