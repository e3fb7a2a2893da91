"""Prefix-cache keys: one exact 64-bit code per position, so that comparing prompts is comparing bytes.

A code is a token id; or (aux id, token id) where aux bins were fed with it; or (media id, offset) inside a span; or
(range id, offset) inside a bidirectional range, whose positions all depend on the range's whole content.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kestrel.types import Layout

__all__ = ["CODE_BYTES", "Interner", "KeyRun", "Namespace"]

CODE_BYTES = 8
_LOW_BITS = 25  # token ids, offsets in a span or range: below 33 million
_ID_BITS = 36
_AUX, _MEDIA, _RANGE = (
    kind << (_LOW_BITS + _ID_BITS) for kind in (1, 2, 3)
)  # 0: a plain token id; 63 bits in all
_CODE = struct.Struct("<q")


class Interner:
    """Small ids for digests and aux tuples, stable as long as they stay among the ``max_entries`` used last.

    Ids count up and are never given twice, so forgetting an entry is safe: its content gets a new id, which costs
    a hit and can never make one. Memory is bounded by ``max_entries``. Thread-safe.
    """

    def __init__(self, max_entries: int = 1 << 17) -> None:
        self._max_entries = max_entries
        self._ids: OrderedDict[Hashable, int] = OrderedDict()
        self._next = 1
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def id(self, content: Hashable) -> int:
        """The id of ``content`` (compared in full), from 1."""
        with self._lock:
            found = self._ids.get(content)
            if found is not None:
                self._ids.move_to_end(content)
                return found
            new, self._next = self._next, self._next + 1
            assert new < 1 << _ID_BITS, "interned ids are used up"  # 2 000 years at one a second
            self._ids[content] = new
            if len(self._ids) > self._max_entries:
                self._ids.popitem(last=False)
            return new


@dataclass(frozen=True, slots=True)
class Namespace:
    """What else the state depends on: the adapter load (0: none) and the digests of cross-attention media."""

    adapter_load: int = 0
    cross: tuple[bytes, ...] = ()


class KeyRun:
    """The keys of one sequence: its prompt's, then one per token that it generates.

    ``marks``: positions in ascending order at which the tree ends a node besides page boundaries (the layout's
    marks, span ends, the stable mark), none inside a bidirectional range. ``ranges``: the bidirectional ranges.
    """

    __slots__ = ("_codes", "_interner", "_starts", "marks", "namespace", "ranges", "stable")

    def __init__(
        self,
        codes: bytearray,
        interner: Interner,
        *,
        namespace: Namespace,
        marks: tuple[int, ...] = (),
        ranges: tuple[tuple[int, int], ...] = (),
        stable: int | None = None,
    ) -> None:
        self._codes = codes
        self._interner = interner
        self._starts = [start for start, _ in ranges]
        self.namespace = namespace
        self.ranges = ranges
        self.stable = stable
        self.marks = marks

    @classmethod
    def of(cls, layout: Layout, interner: Interner, *, adapter_load: int = 0) -> KeyRun:
        """The keys of ``layout``; on any thread. Media without a span (cross attention) make the namespace."""
        codes = np.array(layout.tokens, dtype=np.int64)
        assert not len(codes) or (codes.min() >= 0 and codes.max() < 1 << _LOW_BITS), (
            "a token id is out of range"
        )
        for i, bins in enumerate(layout.aux):
            if any(bins):
                codes[i] |= _AUX | interner.id(tuple(bins)) << _LOW_BITS
        for span in layout.spans:
            item = layout.media[span.item]
            media = interner.id((item.kind, item.digest))  # one digest may be encoded in two ways
            codes[span.start : span.end] = (_MEDIA | media << _LOW_BITS) + np.arange(span.end - span.start)
        ranges = tuple(sorted((start, end) for start, end in layout.bidirectional if end - start > 1))
        for start, end in ranges:
            content = hashlib.sha256(codes[start:end].astype("<i8").tobytes()).digest()
            whole = interner.id(("range", content))
            codes[start:end] = (_RANGE | whole << _LOW_BITS) + np.arange(end - start)
        spanned = {span.item for span in layout.spans}
        cross = tuple(item.digest for i, item in enumerate(layout.media) if i not in spanned)
        keys = cls(
            bytearray(codes.astype("<i8").tobytes()),
            interner,
            namespace=Namespace(adapter_load, cross),
            ranges=ranges,
            stable=layout.stable,
        )
        marks = {*layout.marks, *(span.end for span in layout.spans), layout.stable or 0}
        keys.marks = tuple(sorted(m for m in marks if 0 < m <= len(codes) and not keys.splits_range(m)))
        return keys

    def __len__(self) -> int:
        return len(self._codes) // CODE_BYTES

    def append(self, token_id: int, aux: Sequence[int] = ()) -> None:
        """Add the key of a generated token."""
        code = token_id
        if any(aux):
            code |= _AUX | self._interner.id(tuple(aux)) << _LOW_BITS
        self._codes += _CODE.pack(code)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the keys of generated tokens that came without bins."""
        self._codes += struct.pack(f"<{len(token_ids)}q", *token_ids)

    def fork(self) -> KeyRun:
        """A copy that grows on its own, for another output of the same request."""
        return KeyRun(
            bytearray(self._codes),
            self._interner,
            namespace=self.namespace,
            marks=self.marks,
            ranges=self.ranges,
            stable=self.stable,
        )

    def bytes(self, start: int = 0, end: int | None = None) -> bytes:
        """The codes of positions ``start`` to ``end``, 8 bytes each."""
        return bytes(self._codes[start * CODE_BYTES : None if end is None else end * CODE_BYTES])

    def splits_range(self, position: int) -> bool:
        """A sequence cut at ``position`` would part a bidirectional range."""
        i = bisect_right(self._starts, position) - 1
        return i >= 0 and self.ranges[i][0] < position < self.ranges[i][1]
