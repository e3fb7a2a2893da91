"""Python's collector of cycles, kept from what an accelerator's models consist of.

A full collection walks through every object of the process, holding the interpreter: 100 ms and more beside torch and a
captured model, and the tokens of a few hundred requests bring one about. Nothing is launched meanwhile.
"""

from __future__ import annotations

import gc
import threading

__all__ = ["freeze", "thaw"]


class _Heap:
    """What the interpreter's one collector leaves out. Used from any thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._is_frozen = False

    def freeze(self) -> None:
        """Leave all objects that live now out of collections, until ``thaw``. A program that froze some itself keeps
        its say: nothing happens then."""
        with self._changing:
            if gc.get_freeze_count() and not self._is_frozen:
                return
            gc.collect()
            gc.freeze()
            self._is_frozen = True

    def thaw(self) -> None:
        """Collect everything again, if ``freeze`` did anything: something that was loaded goes."""
        with self._changing:
            if self._is_frozen:
                gc.unfreeze()
                self._is_frozen = False


_HEAP = _Heap()
freeze, thaw = _HEAP.freeze, _HEAP.thaw
