"""``BareLoop``: a token driver run by hand, without scheduler, prefix cache or engine. What those must agree with.

Every sequence owns a row with room for ``max_len`` positions; launches are put together in the plainest way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kestrel.config import Settings
from kestrel.sampling import Sampler, SamplingParams
from kestrel.spi import (
    Acceptor,
    Batch,
    CrossKV,
    CrossView,
    Decoding,
    Finish,
    Force,
    Limits,
    PagedKV,
    PagedView,
    Recurrent,
    RecurrentView,
    RowExtent,
    TokenDriver,
    View,
    WindowKV,
)
from kestrel.state.tensors import CrossTensors, PagedTensors, RecurrentTensors
from kestrel.types import Layout, Prepared, Token

__all__ = ["BareLoop", "BareSequence"]


@dataclass(slots=True, kw_only=True, eq=False)
class BareSequence:
    """A prompt in row ``row``, the tokens that followed it, and how many positions are computed."""

    row: int
    layout: Layout
    features_RC: torch.Tensor | None
    media_rows: list[int]
    output: list[Token] = field(default_factory=list)
    computed: int = 0

    def __len__(self) -> int:
        return len(self.layout) + len(self.output)


class BareLoop:
    """Launches of ``driver`` over states that it declares. ``captured``: batches without host copies, as in a program
    captured on an accelerator."""

    def __init__(
        self,
        driver: TokenDriver,
        *,
        max_rows: int = 4,
        max_len: int = 1024,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        captured: bool = False,
    ) -> None:
        self.driver, self.spec = driver, driver.spec
        self.page_size, self.captured = page_size, captured
        self.device = device or torch.device("cpu")
        self._pages = -(-max_len // page_size)
        self._free = list(range(max_rows))
        self._sampler = Sampler(driver.spec, max_rows, self.device)
        self._tensors: dict[str, PagedTensors | RecurrentTensors | CrossTensors] = {}
        for state in driver.spec.states:
            match state:
                case PagedKV() | WindowKV():
                    self._tensors[state.name] = PagedTensors.allocate(
                        state, max_rows * self._pages, page_size, dtype=dtype, device=self.device
                    )
                case Recurrent():
                    self._tensors[state.name] = RecurrentTensors.allocate(
                        state, max_rows, dtype=dtype, device=self.device
                    )
                case CrossKV():
                    self._tensors[state.name] = CrossTensors.allocate(
                        state, max_rows, dtype=dtype, device=self.device
                    )

    def open(self, layout: Layout) -> BareSequence:
        """A sequence of ``layout``, its media encoded, nothing computed."""
        row = self._free.pop(0)
        for tensors in self._tensors.values():
            if isinstance(tensors, RecurrentTensors):
                tensors.zero(row + 1)
        spanned = {span.item for span in layout.spans}
        media_rows = [-1] * len(layout)
        parts: list[torch.Tensor] = []
        for span in layout.spans:
            start = sum(len(part) for part in parts)
            media_rows[span.start : span.end] = range(start, start + span.end - span.start)
            parts.append(self.encode([layout.media[span.item]]))
        sequence = BareSequence(
            row=row, layout=layout, features_RC=torch.cat(parts) if parts else None, media_rows=media_rows
        )
        cross = [item for i, item in enumerate(layout.media) if i not in spanned]
        if cross:
            extent = RowExtent(query_len=0, computed=0)
            views = self._views([sequence], [extent], self._limits([extent]))
            only_cross = {name: view for name, view in views.items() if isinstance(view, CrossView)}
            self.driver.write_cross(self.encode(cross), cross, only_cross)
        return sequence

    def close(self, sequence: BareSequence) -> None:
        """Give the row back."""
        self._sampler.clear_row(sequence.row)
        self._free.append(sequence.row)

    def encode(self, items: Sequence[Prepared]) -> torch.Tensor:
        """Features of items of one kind."""
        return self.driver.encode(items[0].kind, items)

    def launch(self, work: Sequence[tuple[BareSequence, int]]) -> torch.Tensor:
        """Compute the next ``count`` positions of each sequence; hidden states [T, C] of all of them."""
        batch = self.batch(work)
        hidden_TC = self.driver.forward(batch, self.driver.embed(batch))
        for sequence, count in work:
            sequence.computed += count
        return hidden_TC

    def batch(self, work: Sequence[tuple[BareSequence, int]]) -> Batch:
        """What the driver is given for the next ``count`` positions of each sequence."""
        sequences = [sequence for sequence, _ in work]
        extents = [_extent(sequence, count) for sequence, count in work]
        limits = self._limits(extents)
        ids: list[int] = []
        aux: list[tuple[int, ...]] = []
        rows: list[int] = []
        positions: list[list[int]] = [[] for _ in range(self.spec.position_rows)]
        features: list[torch.Tensor] = []
        for sequence, count in work:
            base = sum(len(part) for part in features)
            span = range(sequence.computed, sequence.computed + count)
            tokens = [_token(sequence, at, self.spec.aux_width) for at in span]
            ids += [token.id for token in tokens]
            aux += [token.aux for token in tokens]
            picked = [sequence.media_rows[at] if at < len(sequence.layout) else -1 for at in span]
            rows += [row + base if row >= 0 else -1 for row in picked]
            if sequence.features_RC is not None and any(row >= 0 for row in picked):
                features.append(sequence.features_RC)
            for p, values in enumerate(positions):
                values += [_position(sequence.layout, p, at) for at in span]
        return Batch(
            ids_T=self._long(ids),
            aux_TW=self._long(aux).reshape(len(ids), self.spec.aux_width),
            media_rows_T=self._long(rows),
            positions_PT=self._long(positions),
            cu_seqlens=self._offsets(extents),
            states=self._views(sequences, extents, limits),
            adapter_slots_B=self._long([0] * len(work)),
            limits=limits,
            features_RC=torch.cat(features) if features else None,
            extents=None if self.captured else extents,
            has_aux=self.captured or any(any(bins) for bins in aux),
        )

    def prefill(self, sequences: Sequence[BareSequence], chunk: int | None = None) -> torch.Tensor:
        """Compute all that is not, in chunks of about ``chunk``; hidden states [B, C] of the last positions."""
        last: dict[int, torch.Tensor] = {}
        while waiting := [s for s in sequences if s.computed < len(s)]:
            work = [(s, _chunk_end(s, chunk) - s.computed) for s in waiting]
            hidden_TC = self.launch(work)
            at = 0
            for sequence, count in work:
                at += count
                last[sequence.row] = hidden_TC[at - 1]
        return torch.stack([last[s.row] for s in sequences])

    def run(
        self,
        layouts: Sequence[Layout],
        decodings: Sequence[Decoding],
        settings: Settings | None = None,
        *,
        max_tokens: int = 32,
        chunk: int | None = None,
    ) -> list[list[Token]]:
        """The tokens of several requests run together, a final stop id included; ``max_tokens`` each at most."""
        settings = Settings(temperature=0.0) if settings is None else settings
        sequences = [self.open(layout) for layout in layouts]
        limits, acceptors = {}, {}
        for sequence, decoding in zip(sequences, decodings, strict=True):
            params = SamplingParams.resolve(settings, decoding, self.spec)
            self._sampler.set_row(
                sequence.row, params, seed=settings.seed or 0, prompt_ids=sequence.layout.tokens
            )
            limits[sequence.row] = min(max_tokens, params.max_tokens or max_tokens)
            acceptors[sequence.row] = [make() for make in decoding.acceptors]
        hidden_BC = self.prefill(sequences, chunk)
        live = list(sequences)
        while live:
            ended = self._sample(live, hidden_BC, acceptors, limits)
            live = [s for s in live if s.row not in ended]
            if live:
                hidden_BC = self.prefill(live)
        for sequence in sequences:
            self.close(sequence)
        return [sequence.output for sequence in sequences]

    def _sample(
        self,
        live: Sequence[BareSequence],
        hidden_BC: torch.Tensor,
        acceptors: Mapping[int, Sequence[Acceptor]],
        limits: Mapping[int, int],
    ) -> set[int]:
        """Sample a token of every live sequence, then take what its acceptors force; rows that ended."""
        rows = [s.row for s in live]
        logits_NV = self.driver.logits(hidden_BC)
        sampled = self._sampler.sample(logits_NV, rows, self._long(rows), hidden_BC, self.driver.aux_logits)
        assert bool(sampled.finite.all()), "a row has no finite logits or no allowed token"
        ended: set[int] = set()
        for i, sequence in enumerate(live):
            row, limit = sequence.row, limits[sequence.row]
            stopped = bool(sampled.stopped[i])
            forced = [Token(int(sampled.ids[i]), tuple(sampled.aux[i].tolist()))]
            while forced and len(sequence.output) < limit and row not in ended:
                token = forced.pop(0)
                sequence.output.append(token)
                says = [acceptor.accept(token) for acceptor in acceptors[row]]
                for say in says:
                    if isinstance(say, Force):
                        self._sampler.force(row, say.ids)
                        forced += [Token(i, (0,) * self.spec.aux_width) for i in say.ids]
                    elif isinstance(say, Finish):
                        ended.add(row)
            if stopped or len(sequence.output) >= limit:
                ended.add(row)
        return ended

    def _views(
        self, sequences: Sequence[BareSequence], extents: Sequence[RowExtent], limits: Limits
    ) -> dict[str, View]:
        common: dict[str, Any] = {
            "cu_seqlens": self._offsets(extents),
            "limits": limits,
            "extents": None if self.captured else extents,
        }
        views: dict[str, View] = {}
        for name, tensors in self._tensors.items():
            entries = self._long([s.row + 1 for s in sequences])
            match tensors:
                case PagedTensors():
                    views[name] = self._paged(tensors, sequences, extents, common)
                case RecurrentTensors():
                    nothing = torch.zeros(0, 3, dtype=torch.int64, device=self.device)
                    views[name] = RecurrentView(
                        parts=tensors.parts, slots_B=entries, stores=nothing, **common
                    )
                case CrossTensors():
                    lens = self._int([tensors.k_LEKSD.shape[3]] * len(sequences))
                    views[name] = CrossView(
                        k_LEKSD=tensors.k_LEKSD,
                        v_LEKSD=tensors.v_LEKSD,
                        entries_B=entries,
                        lens_B=lens,
                        **common,
                    )
        return views

    def _paged(
        self,
        tensors: PagedTensors,
        sequences: Sequence[BareSequence],
        extents: Sequence[RowExtent],
        common: Mapping[str, Any],
    ) -> PagedView:
        size = self.page_size
        tables = [[1 + s.row * self._pages + i for i in range(self._pages)] for s in sequences]
        slots, ends = [], []
        for sequence, extent, table in zip(sequences, extents, tables, strict=True):
            for at in range(extent.computed, extent.computed + extent.query_len):
                slots.append(table[at // size] * size + at % size)
                ends.append(
                    max([end for start, end in sequence.layout.bidirectional if start <= at < end], default=0)
                )
        return PagedView(
            k_LPKSD=tensors.k_LPKSD,
            v_LPKSD=tensors.v_LPKSD,
            page_table_BN=self._int(tables),
            slots_T=self._long(slots),
            computed_B=self._int([extent.computed for extent in extents]),
            page_size=size,
            window=tensors.window,
            bidirectional_end_T=self._int(ends) if any(ends) else None,
            **common,
        )

    def _limits(self, extents: Sequence[RowExtent]) -> Limits:
        counts = [extent.query_len for extent in extents]
        return Limits(
            max_rows=len(extents),
            max_tokens=sum(counts),
            max_query_len=max(counts),
            max_context_len=max(extent.computed + extent.query_len for extent in extents),
        )

    def _offsets(self, extents: Sequence[RowExtent]) -> torch.Tensor:
        offsets = [0]
        for extent in extents:
            offsets.append(offsets[-1] + extent.query_len)
        return self._int(offsets)

    def _long(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _int(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _extent(sequence: BareSequence, count: int) -> RowExtent:
    start, end = sequence.computed, sequence.computed + count
    inside = tuple(r for r in sequence.layout.bidirectional if start <= r[0] and r[1] <= end)
    return RowExtent(query_len=count, computed=start, bidirectional=inside)


def _chunk_end(sequence: BareSequence, chunk: int | None) -> int:
    """Where a chunk of about ``chunk`` positions ends: never inside a bidirectional range."""
    end = len(sequence) if chunk is None else min(len(sequence), sequence.computed + chunk)
    for start, stop in sequence.layout.bidirectional:
        if start < end < stop:
            return start if start > sequence.computed else stop
    return end


def _token(sequence: BareSequence, at: int, aux_width: int) -> Token:
    none = (0,) * aux_width
    layout = sequence.layout
    if at < len(layout):
        return Token(layout.tokens[at], layout.aux[at] if layout.aux else none)
    token = sequence.output[at - len(layout)]
    return token if token.aux else Token(token.id, none)


def _position(layout: Layout, row: int, at: int) -> int:
    if at < len(layout):
        return layout.positions[row][at] if layout.positions else at
    return at + (layout.decode_offset[row] if layout.decode_offset else 0)
