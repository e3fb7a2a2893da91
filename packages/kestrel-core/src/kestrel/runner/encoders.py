"""Encoder launches: media features, and cross entries written from them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kestrel.device import Staging
from kestrel.device.graphs import Graphs, Program
from kestrel.runner.states import StateMap
from kestrel.spi.batch import CrossView, Limits
from kestrel.spi.driver import TokenDriver
from kestrel.state import Lease
from kestrel.types import Prepared

__all__ = ["Encoders"]

log = logging.getLogger("kestrel.runner")

MAX_PROGRAMS = 24  # encoder programs that are kept, those used last
REPLACE_EVERY = 128  # launches between captures once so many are kept: one costs as much as ten launches
RING = 2  # launches whose media lie in pinned memory: pictures are large, and one launch is made per tick

Shapes = tuple[str, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]


@dataclass(slots=True)
class _Captured:
    """A program and the tensors that it reads."""

    inputs: list[torch.Tensor]
    program: Program[torch.Tensor]


class Encoders:
    """The media part of one model. ``graphs``: captures what ``TokenDriver.features`` does, the second time that it is
    given tensors of the same shapes; None: nothing is captured."""

    def __init__(self, driver: TokenDriver, states: StateMap, staging: Staging) -> None:
        self._driver, self._states, self._staging = driver, states, staging
        self._media = Staging(staging.device, ring=RING)
        self._met: OrderedDict[Shapes, None] = OrderedDict()  # once, lately, and not captured
        self._since_capture = 0
        self._captured: OrderedDict[Shapes, _Captured] = OrderedDict()
        self.graphs: Graphs | None = None

    @property
    def num_captured(self) -> int:
        """Encoder programs that are kept now."""
        return len(self._captured)

    def encode(self, kind: str, items: Sequence[Prepared]) -> torch.Tensor:
        """Features of ``items``, concatenated; what a program gives is gone with the next launch."""
        packed = self._driver.pack(kind, items)
        if packed is None:
            return self._driver.encode(kind, items)
        inputs = [self._media.put_all(parts) for parts in packed]
        self._media.send()
        features_RC = self._features(kind, inputs)
        rows = sum(item.num_positions for item in items)
        return features_RC[:rows] if rows else features_RC

    def _features(self, kind: str, inputs: list[torch.Tensor]) -> torch.Tensor:
        shapes: Shapes = (kind, tuple((x.dtype, tuple(x.shape)) for x in inputs))
        self._since_capture += 1
        entry = self._captured.get(shapes)
        if entry is not None:
            self._captured.move_to_end(shapes)
            torch._foreach_copy_(entry.inputs, inputs)
            return entry.program.replay()
        if self.graphs is not None and self._is_worth_it(shapes):
            return self._capture(self.graphs, shapes, kind, inputs)
        return self._driver.features(kind, inputs)

    def _is_worth_it(self, shapes: Shapes) -> bool:
        """Whether inputs of ``shapes`` were met twice lately, and no program was captured in place of another a moment
        ago: with pictures of all sizes, few programs would be used again."""
        is_full = len(self._captured) >= MAX_PROGRAMS
        if shapes in self._met and not (is_full and self._since_capture < REPLACE_EVERY):
            del self._met[shapes]
            self._since_capture = 0
            return True
        self._met[shapes] = None
        self._met.move_to_end(shapes)
        if len(self._met) > MAX_PROGRAMS:
            self._met.popitem(last=False)
        return False

    def _capture(self, graphs: Graphs, shapes: Shapes, kind: str, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The features of ``inputs``, and a program for others of their shapes."""
        kept = [x.clone() for x in inputs]
        run = partial(self._driver.features, kind, kept)
        features_RC = graphs.rehearse(run)
        try:
            self._captured[shapes] = _Captured(kept, graphs.capture(run))
        except Exception as error:  # the features are there; only the next ones come slower
            log.warning(
                "the encoder of %s runs op by op, since it could not be captured", kind, exc_info=error
            )
            self.graphs = None
        if len(self._captured) > MAX_PROGRAMS:
            self._captured.popitem(last=False)
        return features_RC

    def write_cross(self, items: Sequence[Prepared], leases: Sequence[Lease]) -> None:
        """Encode ``items`` of one kind, one per lease, and project each into its lease's cross entry."""
        encoded = self.encode(items[0].kind, items)
        share = encoded.shape[0] // len(items)
        lengths = [item.cross_positions or share for item in items]
        name = self._states.cross[0]
        entries = [lease.cross_entry(name)[0] for lease in leases]
        views = self._views(entries, lengths, encoded.shape[0])
        self._driver.write_cross(encoded, items, views)
        for lease, length in zip(leases, lengths, strict=True):
            lease.cross_written(length)

    def _views(
        self, entries: Sequence[int], lengths: Sequence[int], num_tokens: int
    ) -> Mapping[str, CrossView]:
        """A view per cross state of ``entries`` with ``lengths`` valid positions, one row each."""
        put, states = self._staging.put, self._states
        entries_B = put(np.array(entries, dtype=np.int64))
        lens_B = put(np.array(lengths, dtype=np.int32))
        cu = put(np.cumsum([0, *lengths], dtype=np.int32))
        self._staging.send()
        longest = max(lengths)
        limits = Limits(
            max_rows=len(entries),
            max_tokens=num_tokens,
            max_query_len=longest,
            max_context_len=longest,
        )
        return {name: states.cross_view(name, entries_B, lens_B, cu, limits, None) for name in states.cross}
