"""Python's collector of cycles, kept from what an accelerator's models consist of.

A full collection walks through every object of the process, holding the interpreter: 100 ms and more beside torch and a
captured model, and the tokens of a few hundred requests bring one about. Nothing is launched meanwhile.
"""

from __future__ import annotations

import gc
import threading

__all__ = ["freeze", "thaw"]

_changing = threading.Lock()
_frozen_here = False


def freeze() -> None:
    """Leave all objects that live now out of collections, until ``thaw``. A program that froze some itself keeps its
    say: nothing happens then."""
    global _frozen_here
    with _changing:
        if gc.get_freeze_count() and not _frozen_here:
            return
        gc.collect()
        gc.freeze()
        _frozen_here = True


def thaw() -> None:
    """Collect everything again, if ``freeze`` did anything: something that was loaded goes."""
    global _frozen_here
    with _changing:
        if _frozen_here:
            gc.unfreeze()
            _frozen_here = False
