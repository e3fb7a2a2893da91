"""Prefill programs captured per number of tokens. What a launch does not fill is padding on scratch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kestrel.device.graphs import Graphs, Program
from kestrel.runner.chunks import NO_MEDIA, ChunkArrays
from kestrel.runner.mirror import PackedMirror
from kestrel.runner.programs import Programs
from kestrel.runner.rows import RowTables
from kestrel.runner.states import Places, StateMap
from kestrel.spi.batch import Batch, Limits
from kestrel.state import FeaturePool

__all__ = ["PrefillPrograms", "prefill_buckets"]

SIZES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_CHUNKS = 8  # launches of more chunks have so many tokens that the device is the slower side
STORES = 4 * MAX_CHUNKS  # recurrent checkpoints of a launch
ALWAYS_WORTH = 512  # tokens up to which padding costs less than launching op by op
LARGE = 2048  # tokens beyond which the device needs longer for a launch than the host to send it op by op
MAX_PADDING, MAX_PADDING_LARGE = 0.34, 0.06  # shares of larger programs that are tokens which nobody wants


def prefill_buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens for which prefill programs are captured, ascending."""
    return tuple(size for size in SIZES if size <= max_tokens)


@dataclass(slots=True, kw_only=True)
class PrefillPrograms:
    """Captured prefill of one model, for launches of up to ``MAX_CHUNKS`` chunks.

    ``aux_width``, ``position_rows``: the model's. ``max_len``: the longest context.
    """

    graphs: Graphs
    programs: Programs
    states: StateMap
    rows: RowTables
    features: FeaturePool | None
    aux_width: int
    position_rows: int
    max_len: int
    device: torch.device
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of tokens for which there are programs, ascending."""
        return tuple(sorted(self._buckets))

    def capture(self, max_tokens: int) -> None:
        """Capture launches without media, and with media where the model shows any; all on scratch.

        The largest comes first: the others then fit into the memory that it took.
        """
        for size in reversed(prefill_buckets(max_tokens)):
            bucket = _Bucket(self, size)
            bucket.push(None)
            for has_media in (False, True) if self.features is not None else (False,):
                bucket.capture(has_media)
            self._buckets[size] = bucket

    def has(self, arrays: ChunkArrays) -> bool:
        """Whether a launch has a program that is worth its padding. One that feeds bins back has none: few do (after a
        preemption, say), and programs for all would embed bins that are not there."""
        count, size = sum(arrays.lengths), self._size_for(arrays)
        if not size or len(arrays.lengths) > MAX_CHUNKS or len(arrays.stores) > STORES:
            return False
        if arrays.aux.any():
            return False
        share = MAX_PADDING_LARGE if size > LARGE else MAX_PADDING
        return size <= ALWAYS_WORTH or size - count <= share * size

    def launch(self, arrays: ChunkArrays) -> torch.Tensor:
        """Hidden states of a launch that ``has`` a program, then of padding; they stay until the next program runs."""
        bucket = self._buckets[self._size_for(arrays)]
        bucket.push(arrays)
        return bucket.programs[arrays.has_media or "range_ends" in arrays.tokens].replay()

    def _size_for(self, arrays: ChunkArrays) -> int:
        count = sum(arrays.lengths)
        return min((size for size in self._buckets if size >= count), default=0)


class _Bucket:
    """Buffers and programs of ``size`` tokens. ``programs``: by whether media may be shown.

    Behind the chunks comes a row of all padding tokens, which starts at position 0 of nobody's context; the rows behind
    it are empty.
    """

    def __init__(self, owner: PrefillPrograms, size: int) -> None:
        self._owner, self._size = owner, size
        rows, groups = MAX_CHUNKS + 1, len(owner.rows.tables)
        self._mirror = PackedMirror(
            {
                "ids": ((size,), np.int64),
                "media_rows": ((size,), np.int64),
                "positions": ((owner.position_rows, size), np.int64),
                "slots": ((groups, size), np.int64),
                "rows": ((rows,), np.int64),
                "state_slots": ((rows,), np.int64),
                "entries": ((rows,), np.int64),
                "adapters": ((rows,), np.int64),
                "stores": ((STORES, 3), np.int64),
                "range_ends": ((size,), np.int32),
                "computed": ((rows,), np.int32),
                "cross_lens": ((rows,), np.int32),
                "cu": ((rows + 1,), np.int32),
            },
            owner.device,
        )
        self._tables = [
            torch.zeros((rows, table.shape[1]), dtype=torch.int32, device=owner.device)
            for table in owner.rows.tables
        ]
        self._no_aux = torch.zeros((size, owner.aux_width), dtype=torch.int64, device=owner.device)
        self.programs: dict[bool, Program[torch.Tensor]] = {}

    def capture(self, has_media: bool) -> None:
        """Capture what ``push`` brought as the program for others like it."""
        batch = self._batch(has_media)
        run = partial(self._run, batch)
        for _ in range(2):  # the first makes what is made once, the second what it left to the next
            self._owner.graphs.rehearse(run)
        self.programs[has_media] = self._owner.graphs.capture(run)
        for view in batch.states.values():
            view.memo.clear()  # what ops kept there lies in the pool, and only this program needs it

    def push(self, arrays: ChunkArrays | None) -> None:
        """Bring a launch to the device; None: nothing but padding."""
        host = self._mirror.host
        lengths = [] if arrays is None else arrays.lengths
        count, chunks = sum(lengths), len(lengths)
        tokens = {} if arrays is None else arrays.tokens
        for name in ("ids", "media_rows", "positions", "slots", "range_ends"):
            if name in tokens:
                host[name][..., :count] = tokens[name]
                host[name][..., count:] = NO_MEDIA if name == "media_rows" else 0
            else:
                host[name][...] = NO_MEDIA if name == "media_rows" else 0
        host["rows"][:] = self._owner.rows.scratch
        host["stores"][:] = 0
        for name in ("state_slots", "entries", "adapters", "computed", "cross_lens"):
            host[name][chunks:] = 0
        if arrays is not None:
            for name, values in arrays.sequences.items():
                host[name][:chunks] = values
            if arrays.stores:
                host["stores"][: len(arrays.stores)] = arrays.stores
        host["cu"][1 : chunks + 1] = np.cumsum(lengths)
        host["cu"][chunks + 1 :] = self._size
        self._mirror.push()

    def _run(self, batch: Batch) -> torch.Tensor:
        rows_B = self._mirror.tensor["rows"]
        for table, staged in zip(self._owner.rows.tables, self._tables, strict=True):
            torch.index_select(table, 0, rows_B, out=staged)
        return self._owner.programs.forward(batch)

    def _batch(self, has_media: bool) -> Batch:
        owner, tensor = self._owner, self._mirror.tensor
        limits = Limits(
            max_rows=MAX_CHUNKS + 1,
            max_tokens=self._size,
            max_query_len=self._size,
            max_context_len=owner.max_len,
        )
        places = Places(
            computed_B=tensor["computed"],
            cu_seqlens=tensor["cu"],
            limits=limits,
            extents=None,
            slots=list(tensor["slots"].unbind(0)),
            tables=self._tables,
            state_slots_B=tensor["state_slots"],
            entries_B=tensor["entries"],
            lens_B=tensor["cross_lens"],
            stores=tensor["stores"],
            bidirectional_end_T=tensor["range_ends"] if has_media else None,
        )
        return Batch(
            ids_T=tensor["ids"],
            aux_TW=self._no_aux,
            media_rows_T=tensor["media_rows"],
            positions_PT=tensor["positions"],
            cu_seqlens=tensor["cu"],
            states=owner.states.views(places),
            adapter_slots_B=tensor["adapters"],
            limits=limits,
            features_RC=owner.features.tensor if owner.features is not None and has_media else None,
            has_aux=False,
        )
