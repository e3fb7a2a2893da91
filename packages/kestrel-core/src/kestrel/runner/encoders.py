"""Encoder launches: media features, and cross entries written from them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
SCRATCH = 0  # the entry that nobody reads
RING = 2  # launches whose media lie in pinned memory: pictures are large, and one launch is made per tick

Shapes = tuple[str, tuple[tuple[torch.dtype, tuple[int, ...]], ...], tuple[int, ...]]
Launch = Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(slots=True)
class _Captured:
    """A program and the tensors that it reads."""

    inputs: list[torch.Tensor]
    program: Program[torch.Tensor]


class Encoders:
    """The media part of one model. ``graphs``: captures what ``TokenDriver.features`` does, and with it the writes of
    cross entries, the second time that it is given tensors of the same shapes; None: nothing is captured."""

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
        features_RC = self._replayed(kind, packed)
        if features_RC is None:
            inputs = [self._media.put_all(parts) for parts in packed]
            self._media.send()
            features_RC = self._run(_shapes(kind, inputs), inputs, partial(self._driver.features, kind))
        rows = sum(item.num_positions for item in items)
        return features_RC[:rows] if rows else features_RC

    def _replayed(self, kind: str, packed: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
        """What a program makes of ``packed`` whose memory the device reads by itself; None where there is no program,
        or other memory, and nothing was done."""
        if not self._captured or not all(part.is_pinned() for parts in packed for part in parts):
            return None
        shapes = kind, tuple((parts[0].dtype, _joined(parts)) for parts in packed), ()
        entry = self._captured.get(shapes)
        if entry is None:
            return None
        self._captured.move_to_end(shapes)
        self._since_capture += 1
        for target, parts in zip(entry.inputs, packed, strict=True):
            for part, place in zip(parts, torch.split(target, [len(part) for part in parts]), strict=True):
                place.copy_(part, non_blocking=True)
        return entry.program.replay()

    def _run(self, shapes: Shapes, inputs: list[torch.Tensor], launch: Launch) -> torch.Tensor:
        """What ``launch`` makes of ``inputs``, by the program of ``shapes`` where there is one."""
        self._since_capture += 1
        entry = self._captured.get(shapes)
        if entry is not None:
            self._captured.move_to_end(shapes)
            torch._foreach_copy_(entry.inputs, inputs)
            return entry.program.replay()
        if self.graphs is not None and self._is_worth_it(shapes):
            return self._capture(self.graphs, shapes, inputs, launch)
        return launch(inputs)

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

    def _capture(
        self, graphs: Graphs, shapes: Shapes, inputs: list[torch.Tensor], launch: Launch
    ) -> torch.Tensor:
        """What ``launch`` makes of ``inputs``, and a program for others of their shapes."""
        kept = [x.clone() for x in inputs]
        run = partial(launch, kept)
        features_RC = graphs.rehearse(run)
        try:
            self._captured[shapes] = _Captured(kept, graphs.capture(run))
        except Exception as error:  # the features are there; only the next ones come slower
            log.warning(
                "the encoder of %s runs op by op, since it could not be captured", shapes[0], exc_info=error
            )
            self.graphs = None
        if len(self._captured) > MAX_PROGRAMS:
            self._captured.popitem(last=False)
        return features_RC

    def write_cross(self, items: Sequence[Prepared], leases: Sequence[Lease]) -> None:
        """Encode ``items`` of one kind, one per lease, and project each into its lease's cross entry: in one program
        where ``items`` say how long their entries are."""
        entries = [lease.cross_entry(self._states.cross[0])[0] for lease in leases]
        for lease, length in zip(leases, self._write(items, entries), strict=True):
            lease.cross_written(length)

    def capture_cross(self, item: Prepared, max_items: int) -> None:
        """Capture launches of 1, 2, 4, … up to ``max_items`` items like ``item``, where anything is captured. The
        largest comes first: the others then fit into the memory that it took."""
        if self.graphs is None or not item.cross_positions:
            return
        for power in reversed(range(max_items.bit_length())):
            for _ in range(2):  # met once, and captured then
                self._write([item] * (1 << power), [SCRATCH] * (1 << power))

    def _write(self, items: Sequence[Prepared], entries: Sequence[int]) -> Sequence[int]:
        """Encode ``items`` into cross ``entries``: their lengths."""
        lengths = [item.cross_positions for item in items]
        packed = self._driver.pack(items[0].kind, items) if all(lengths) else None
        if packed is None:
            return self._write_apart(items, entries)
        inputs = [self._media.put_all(parts) for parts in packed]
        places = self._places(self._media, entries, lengths)
        self._media.send()
        shapes = _shapes(items[0].kind, inputs, lengths)
        self._run(shapes, [*inputs, *places], partial(self._encode_and_write, items, lengths))
        return lengths

    def _encode_and_write(
        self, items: Sequence[Prepared], lengths: Sequence[int], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The encoder's rows of ``inputs``, whose last three say where they are written."""
        encoded = self._driver.features(items[0].kind, inputs[:-3])
        self._driver.write_cross(encoded, items, self._views(inputs[-3:], lengths, encoded.shape[0]))
        return encoded

    def _write_apart(self, items: Sequence[Prepared], entries: Sequence[int]) -> list[int]:
        """As ``_write``, op by op behind the encoder, whose rows may say how long the entries are: the lengths."""
        encoded = self.encode(items[0].kind, items)
        share = encoded.shape[0] // len(items)
        lengths = [item.cross_positions or share for item in items]
        places = self._places(self._staging, entries, lengths)
        self._staging.send()
        self._driver.write_cross(encoded, items, self._views(places, lengths, encoded.shape[0]))
        return lengths

    def _places(
        self, staging: Staging, entries: Sequence[int], lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Entries, lengths and first rows, on the device with the next ``send`` of ``staging``."""
        return (
            staging.put(np.array(entries, dtype=np.int64)),
            staging.put(np.array(lengths, dtype=np.int32)),
            staging.put(np.cumsum([0, *lengths], dtype=np.int32)),
        )

    def _views(
        self, places: Sequence[torch.Tensor], lengths: Sequence[int], num_tokens: int
    ) -> Mapping[str, CrossView]:
        """A view per cross state of entries with ``lengths`` valid positions, one row each."""
        entries_B, lens_B, cu = places
        longest = max(lengths)
        limits = Limits(
            max_rows=len(lengths),
            max_tokens=num_tokens,
            max_query_len=longest,
            max_context_len=longest,
        )
        states = self._states
        return {name: states.cross_view(name, entries_B, lens_B, cu, limits, None) for name in states.cross}


def _joined(parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape of ``parts`` side by side."""
    return (sum(len(part) for part in parts), *parts[0].shape[1:])


def _shapes(kind: str, inputs: Sequence[torch.Tensor], lengths: Sequence[int] = ()) -> Shapes:
    """What a program is kept by."""
    return kind, tuple((x.dtype, tuple(x.shape)) for x in inputs), tuple(lengths)
