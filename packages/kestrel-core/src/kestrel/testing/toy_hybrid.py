"""A toy token model over every kind of state, written plainly over the views, and its oracle.

x = embedding + bins + position, media features in their place; then full attention, sliding-window attention, a
decaying recurrent state and (optionally) cross attention, each added to x; logits of the normalised x.
Letters: T tokens, C hidden, V vocabulary, W aux width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kestrel.spi.batch import Batch, CrossView, PagedView, RecurrentView, RowExtent
from kestrel.spi.driver import TokenDriver, TokenSpec
from kestrel.spi.media import MediaSpec
from kestrel.spi.states import AuxOutput, CrossKV, PagedKV, Recurrent, StatePart, StateSpec, WindowKV
from kestrel.testing.toy_oracle import HIDDEN, ToyWeights, oracle
from kestrel.types import Prepared

__all__ = ["COORD", "EOS", "NAN", "ToyHybrid"]

CPU = torch.device("cpu")

EOS, COORD, NAN = 1, 2, 3  # ends a sequence; comes with bins when aux is on; poisons its sequence


class ToyHybrid(TokenDriver):
    """``window`` None leaves the sliding-window state out; ``recurrent``, ``cross`` and ``aux`` turn the others on.

    Media kind "image" goes into positions, "audio" into cross attention.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        vocab_size: int = 32,
        window: int | None = 5,
        recurrent: bool = True,
        cross: bool = False,
        aux: bool = False,
        position_rows: int = 1,
        max_positions: int = 256,
        max_cost: int = 2,
        device: torch.device = CPU,
    ) -> None:
        self.weights = ToyWeights.make(seed, vocab_size, torch.float32, nan_id=NAN).to(device)
        self._device = device
        self.window, self.has_recurrent, self.has_cross, self.has_aux = window, recurrent, cross, aux
        self.seed, self.encoded_items = seed, 0
        states: list[StateSpec] = [PagedKV(name="full", layers=1, kv_heads=1, head_dim=HIDDEN)]
        if window is not None:
            states.append(WindowKV(name="local", layers=1, kv_heads=1, head_dim=HIDDEN, window=window))
        if recurrent:
            part = StatePart(name="s", shape=(HIDDEN,), dtype="float32")
            states.append(Recurrent(name="memory", layers=1, parts=(part,)))
        if cross:
            states.append(CrossKV(name="media", layers=1, kv_heads=1, head_dim=HIDDEN, max_len=8))
        media = [MediaSpec(kind="image", max_cost=max_cost)]
        if cross:
            media.append(MediaSpec(kind="audio", into="cross", max_items=1, max_cost=max_cost))
        self.spec = TokenSpec(
            vocab_size=vocab_size,
            hidden_size=HIDDEN,
            max_positions=max_positions,
            eos_ids=frozenset({EOS}),
            position_rows=position_rows,
            states=tuple(states),
            aux=(AuxOutput(name="xy", token_id=COORD, cardinality=8, width=2),) if aux else (),
            media=tuple(media),
        )

    def encode(self, kind: str, packed: Sequence[Prepared]) -> torch.Tensor:
        self.encoded_items += len(packed)
        return torch.cat([item.tensors["x"] for item in packed]).to(self._device) @ self.weights.media

    def write_cross(
        self, encoded: torch.Tensor, packed: Sequence[Prepared], views: Mapping[str, CrossView]
    ) -> None:
        view = views["media"]
        start = 0
        for item, entry in zip(packed, view.entries_B.tolist(), strict=True):
            x = encoded[start : start + len(item.tensors["x"])]
            view.k_LEKSD[0, entry, 0, : len(x)] = x @ self.weights.cross[1]
            view.v_LEKSD[0, entry, 0, : len(x)] = x @ self.weights.cross[2]
            start += len(x)

    def embed(self, batch: Batch) -> torch.Tensor:
        w = self.weights
        x_TC = w.embedding[batch.ids_T]
        if self.has_aux:
            x_TC = x_TC + batch.aux_TW.float() @ w.bins
        if batch.features_RC is not None:
            features = batch.features_RC[batch.media_rows_T.clamp(min=0)]
            x_TC = torch.where((batch.media_rows_T >= 0)[:, None], features, x_TC)
        angles = batch.positions_PT.sum(0).float()[:, None] * w.frequencies
        return x_TC + torch.sin(angles)

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        w = self.weights
        x_TC = x_TC + self._attend(x_TC, batch.paged("full"), w.full)
        if self.window is not None:
            x_TC = x_TC + self._attend(x_TC, batch.paged("local"), w.local)
        if self.has_recurrent:
            x_TC = x_TC + self._remember(x_TC, batch)
        if self.has_cross:
            x_TC = x_TC + self._cross(x_TC, batch)
        return x_TC

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        return self._normalised(h_NC) @ self.weights.unembedding

    def aux_logits(self, h_NC: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        return (self._normalised(h_NC) @ self.weights.aux_head).view(len(h_NC), 2, 8)

    def oracle(
        self,
        tokens: Sequence[int],
        *,
        bins: Sequence[Sequence[int]] = (),
        media: Sequence[tuple[int, Prepared]] = (),
        cross: Prepared | None = None,
        ranges: Sequence[tuple[int, int]] = (),
        positions: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Logits [n, V] in float64 of the whole sequence at once; ``media`` by start position."""
        weights = self._exact()
        h_NC = oracle(
            weights,
            tokens,
            bins=bins if self.has_aux else (),
            media=[(start, item.tensors["x"]) for start, item in media],
            cross=None if cross is None or not self.has_cross else cross.tensors["x"],
            ranges=ranges,
            positions=positions,
            window=self.window,
            recurrent=self.has_recurrent,
        )
        return h_NC @ weights.unembedding

    def oracle_bins(self, tokens: Sequence[int], bins: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The bins that come with a COORD after each position of a text-only sequence."""
        weights = self._exact()
        h_NC = oracle(
            weights,
            tokens,
            bins=bins,
            media=(),
            cross=None,
            ranges=(),
            positions=None,
            window=self.window,
            recurrent=self.has_recurrent,
        )
        best = (h_NC @ weights.aux_head).view(-1, 2, 8).argmax(-1)
        return [tuple(row) for row in best.tolist()]

    def _exact(self) -> ToyWeights:
        return ToyWeights.make(self.seed, self.spec.vocab_size, torch.float64, nan_id=NAN)

    @staticmethod
    def _normalised(h_NC: torch.Tensor) -> torch.Tensor:
        return h_NC / h_NC.square().mean(-1, keepdim=True).add(1e-6).sqrt()

    def _attend(self, x_TC: torch.Tensor, view: PagedView, qkvo: torch.Tensor) -> torch.Tensor:
        q, k, v = x_TC @ qkvo[0], x_TC @ qkvo[1], x_TC @ qkvo[2]
        size = view.page_size
        view.k_LPKSD[0, view.slots_T // size, 0, view.slots_T % size] = k
        view.v_LPKSD[0, view.slots_T // size, 0, view.slots_T % size] = v
        if view.extents is None:
            return _attend_captured(q, view) @ qkvo[3]
        out = torch.zeros_like(q)
        for b, tokens, extent in _sequences(view.extents):
            end = extent.computed + extent.query_len
            at = torch.arange(end, device=x_TC.device)
            pages = view.page_table_BN[b, at // size].long()
            keys, values = view.k_LPKSD[0, pages, 0, at % size], view.v_LPKSD[0, pages, 0, at % size]
            for t in range(extent.query_len):
                position = extent.computed + t
                last = max([position + 1, *(z for a, z in extent.bidirectional if a <= position < z)])
                first = 0 if view.window is None else max(0, position - view.window + 1)
                scores = keys[first:last] @ q[tokens.start + t] / HIDDEN**0.5
                out[tokens.start + t] = scores.softmax(0) @ values[first:last]
        return out @ qkvo[3]

    def _remember(self, x_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
        view, w = batch.recurrent("memory"), self.weights
        state = view.parts["s"][0]
        inputs = torch.tanh(x_TC @ w.memory_in)
        if view.extents is None:
            return _remember_captured(inputs, view, w.decay) @ w.memory_out
        out = torch.zeros_like(x_TC)
        for b, tokens, extent in _sequences(view.extents):
            slot = int(view.slots_B[b])
            stores = {count: target for row, count, target in view.host_stores if row == b}
            for t in range(extent.query_len):
                state[slot] = w.decay * state[slot] + inputs[tokens.start + t]
                out[tokens.start + t] = state[slot]
                if t + 1 in stores:
                    state[stores[t + 1]] = state[slot]
        return out @ w.memory_out

    def _cross(self, x_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
        view, w = batch.cross("media"), self.weights
        q = x_TC @ w.cross[0]
        if view.extents is None:
            return _cross_captured(q, view) @ w.cross[3]
        out = torch.zeros_like(q)
        for b, tokens, _ in _sequences(view.extents):
            length, entry = int(view.lens_B[b]), int(view.entries_B[b])
            if length:
                keys, values = view.k_LEKSD[0, entry, 0, :length], view.v_LEKSD[0, entry, 0, :length]
                out[tokens] = (q[tokens] @ keys.T / HIDDEN**0.5).softmax(-1) @ values
        return out @ w.cross[3]


def _rows(view: PagedView | RecurrentView | CrossView) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's row, and its place among the row's tokens, from what the device knows alone."""
    at_T = torch.arange(view.limits.max_tokens, device=view.cu_seqlens.device)
    if view.limits.is_decode:
        return at_T, torch.zeros_like(at_T)
    row_T = torch.searchsorted(view.cu_seqlens[1:], at_T, right=True)
    return row_T, at_T - view.cu_seqlens.index_select(0, row_T)


def _attend_captured(q_TC: torch.Tensor, view: PagedView) -> torch.Tensor:
    """Every query against all that a context may hold."""
    row_T, place_T = _rows(view)
    at_J = torch.arange(view.limits.max_context_len, device=q_TC.device)
    pages_TJ = view.page_table_BN.index_select(0, row_T)[:, at_J // view.page_size].long()
    keys, values = (pool[0, pages_TJ, 0, at_J % view.page_size] for pool in (view.k_LPKSD, view.v_LPKSD))
    position_T1 = (view.computed_B.index_select(0, row_T) + place_T)[:, None]
    end_T1 = position_T1 + 1
    if view.bidirectional_end_T is not None:
        end_T1 = torch.maximum(end_T1, view.bidirectional_end_T[:, None])
    hidden_TJ = at_J >= end_T1
    if view.window is not None:
        hidden_TJ = hidden_TJ | (at_J <= position_T1 - view.window)
    return _weighted(q_TC, keys, values, hidden_TJ)


def _remember_captured(inputs_TC: torch.Tensor, view: RecurrentView, decay: torch.Tensor) -> torch.Tensor:
    """The states after every token; all rows at once, as many times as the longest could have tokens."""
    pool = view.parts["s"][0]
    starts_B, ends_B = view.cu_seqlens[:-1], view.cu_seqlens[1:]
    state_BC = pool.index_select(0, view.slots_B)
    out_TC = torch.zeros_like(inputs_TC)
    last = len(inputs_TC) - 1
    for t in range(view.limits.max_query_len):
        goes_on_B1 = (starts_B + t < ends_B)[:, None]
        token_B = (starts_B + t).clamp(max=last)
        new_BC = decay * state_BC + inputs_TC.index_select(0, token_B)
        state_BC = torch.where(goes_on_B1, new_BC, state_BC)
        out_TC.index_add_(0, token_B, torch.where(goes_on_B1, new_BC, 0.0))
        stored_M = torch.where(view.stores[:, 1] == t + 1, view.stores[:, 2], 0)
        pool.index_copy_(0, stored_M, state_BC.index_select(0, view.stores[:, 0]))
    pool.index_copy_(0, view.slots_B, state_BC)
    return out_TC


def _cross_captured(q_TC: torch.Tensor, view: CrossView) -> torch.Tensor:
    row_T, _ = _rows(view)
    entries_T = view.entries_B.index_select(0, row_T)
    keys, values = view.k_LEKSD[0, entries_T, 0], view.v_LEKSD[0, entries_T, 0]
    lens_T1 = view.lens_B.index_select(0, row_T)[:, None]
    hidden_TJ = torch.arange(keys.shape[1], device=q_TC.device) >= lens_T1
    return _weighted(q_TC, keys, values, hidden_TJ).masked_fill(lens_T1 == 0, 0.0)


def _weighted(
    q_BC: torch.Tensor, keys_BJC: torch.Tensor, values_BJC: torch.Tensor, hidden_BJ: torch.Tensor
) -> torch.Tensor:
    scores_BJ = (keys_BJC @ q_BC[:, :, None])[..., 0] / HIDDEN**0.5
    weights_BJ = scores_BJ.masked_fill(hidden_BJ, float("-inf")).softmax(-1)
    seen_BJC = values_BJC.masked_fill(
        hidden_BJ[..., None], 0.0
    )  # a weight of 0 does not hide what is no number
    return torch.bmm(weights_BJ[:, None], seen_BJC)[:, 0]


def _sequences(extents: Sequence[RowExtent] | None) -> list[tuple[int, slice, RowExtent]]:
    """(row, its tokens in the batch, its extent) of each sequence."""
    assert extents is not None
    found, start = [], 0
    for b, extent in enumerate(extents):
        found.append((b, slice(start, start + extent.query_len), extent))
        start += extent.query_len
    return found
