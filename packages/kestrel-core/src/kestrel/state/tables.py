"""Page tables of one sequence: of its full-attention states, and of each sliding-window group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel.state.places import Places

__all__ = ["PageTable", "WindowGroup", "WindowTable"]


class PageTable:
    """Page ids in order of position, in an int32 array that grows by doubling."""

    __slots__ = ("_array", "size")

    def __init__(self) -> None:
        self._array: NDArray[np.int32] = np.zeros(16, dtype=np.int32)
        self.size = 0

    def extend(self, pages: list[int]) -> None:
        """Add ``pages`` at the end."""
        end = self.size + len(pages)
        self._grow(end)
        self._array[self.size : end] = pages
        self.size = end

    def _grow(self, size: int) -> None:
        if size > len(self._array):
            grown = np.zeros(max(size, 2 * len(self._array)), dtype=np.int32)
            grown[: self.size] = self._array[: self.size]
            self._array = grown

    def __getitem__(self, index: int) -> int:
        return int(self._array[index])

    def __setitem__(self, index: int, page: int) -> None:
        self._array[index] = page

    def view(self, size: int) -> NDArray[np.int32]:
        """The first ``size`` ids, read-only; zeros beyond those set."""
        self._grow(size)
        view = self._array[:size]
        view.flags.writeable = False
        return view

    def pages(self, start: int = 0) -> list[int]:
        """The ids from index ``start`` on."""
        ids: list[int] = self._array[start : self.size].tolist()
        return ids


class WindowGroup:
    """The pool that states of one window length share, and how many of its pages are promised to leases.

    ``width``: the most pages that one lease holds at a time, or None without a bound. Promises never exceed the pool,
    so a lease that reserved finds its next pages whenever it advances.
    """

    __slots__ = ("places", "promised", "width", "window")

    def __init__(self, window: int, total: int, *, page_size: int, max_ahead: int | None) -> None:
        self.window = window
        self.places = Places(total)
        self.promised = 0
        self.width = (
            None if max_ahead is None else window_width(window, page_size=page_size, max_ahead=max_ahead)
        )


def window_width(window: int, *, page_size: int, max_ahead: int) -> int:
    """The most pages that a lease holds: the window behind, what launches run ahead, and a page of slack at each
    side, since releasing and taking wait for a page boundary."""
    return -(-(window - 1 + max_ahead + 2 * page_size) // page_size) + 1


class WindowTable:
    """One lease's pages in one window group: from index ``first`` on; earlier ones are holes."""

    __slots__ = ("first", "group", "promised", "table")

    def __init__(self, group: WindowGroup) -> None:
        self.group = group
        self.table = PageTable()
        self.first = 0
        self.promised = 0

    def share(self, end: int, pages: list[int], page_size: int) -> None:
        """Start after a hit of ``end`` positions over full ``pages``: hold those that the window still sees."""
        self.first = max(0, end - self.group.window + 1) // page_size
        tail = pages[self.first :]
        self.table.extend([0] * (len(pages) - len(tail)) + tail)
        for page in tail:
            self.group.places.share(page)

    def wants(self, num_pages: int) -> int:
        """Pages to be promised for a sequence of ``num_pages`` pages in all."""
        pages = max(0, num_pages - self.first)
        return pages if self.group.width is None else min(pages, self.group.width)

    def can_promise(self, num_pages: int) -> bool:
        """The pool has enough that is not promised to others."""
        group = self.group
        return group.promised - self.promised + self.wants(num_pages) <= group.places.total

    def promise(self, num_pages: int) -> None:
        """Promise what ``num_pages`` pages in all need, no more."""
        wanted = self.wants(num_pages)
        self.group.promised += wanted - self.promised
        self.promised = wanted

    def release_before(self, first: int) -> bool:
        """Release the pages before index ``first``; True when there were any."""
        last = min(first, self.table.size)
        if last <= self.first:
            return False
        for index in range(self.first, last):
            self.group.places.release(self.table[index])
            self.table[index] = 0
        self.first = last
        return True

    def close(self) -> None:
        """Release every page and the promise."""
        for page in self.table.pages(self.first):
            self.group.places.release(page)
        self.table = PageTable()
        self.first = 0
        self.group.promised -= self.promised
        self.promised = 0
