"""What one launch of a token model receives. Frozen; tensors live on the model's device.

Letters: B sequences, T tokens, W aux width, P position rows, L layers, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "CrossView", "Limits", "PagedView", "RecurrentView", "RowExtent", "View"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Ceilings of a launch, known on the host. Python under ``forward`` may branch on these alone.

    ``is_deterministic``: how a row is computed must not depend on the other rows, down to the order of sums.
    """

    max_rows: int
    max_tokens: int
    max_query_len: int
    max_context_len: int
    is_deterministic: bool = False

    @property
    def is_decode(self) -> bool:
        """Every sequence brings exactly one token."""
        return self.max_query_len == 1


@dataclass(frozen=True, slots=True)
class RowExtent:
    """Host copy of one sequence's extent in this launch, for reference ops (a captured program has none).

    ``query_len`` new tokens follow ``computed`` positions whose state exists. ``bidirectional`` lists ranges of
    absolute positions that see each other fully and lie inside this chunk.
    """

    query_len: int
    computed: int
    bidirectional: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedView:
    """Pages of a full-attention or sliding-window state.

    ``k_LPKSD`` and ``v_LPKSD``: [layers, pages, kv_heads, page_size, head_dim]; page 0 is scratch.
    ``page_table_BN``: int32 [B, N] page ids per sequence (0 where none, also for released window pages).
    ``slots_T``: int64 [T], where each token's key and value go (page_id * page_size + offset; scratch when dead).
    ``computed_B``: int32 [B], positions whose state exists before this launch.
    ``cu_seqlens``: int32 [B + 1], token offsets of each sequence. ``window``: None for full attention.
    ``extents``: host copies, or None in a captured program. ``limits``: as the batch's.
    ``bidirectional_end_T``: int32 [T], the exclusive end of the bidirectional range a token lies in, or 0.
    ``memo``: where ops keep what they compute from the view once for all layers; an op renews it at layer 0, so a
    view may be refilled between launches. Each view has its own, copies included.
    """

    k_LPKSD: torch.Tensor
    v_LPKSD: torch.Tensor
    page_table_BN: torch.Tensor
    slots_T: torch.Tensor
    computed_B: torch.Tensor
    cu_seqlens: torch.Tensor
    limits: Limits
    page_size: int
    window: int | None = None
    extents: Sequence[RowExtent] | None = None
    bidirectional_end_T: torch.Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentView:
    """Slots of a constant-size state.

    ``parts``: name to [layers, slots, *shape]; slot 0 is scratch. ``slots_B``: int64 [B], the live state slot of
    each sequence (scratch when dead). ``cu_seqlens``: int32 [B + 1].
    ``stores``: int64 [M, 3] rows of (row in this batch, token count within this launch after which to store,
    destination slot): ops copy the live state there as they pass it. Empty for most launches. Rows (0, 0, 0) are
    padding of a captured program: slot 0 is scratch, so an op may copy any state there, or none.
    ``extents``: host copies, or None in a captured program; ``host_stores``: likewise of ``stores``.
    ``memo``: as ``PagedView``'s.
    """

    parts: Mapping[str, torch.Tensor]
    slots_B: torch.Tensor
    cu_seqlens: torch.Tensor
    stores: torch.Tensor
    limits: Limits
    extents: Sequence[RowExtent] | None = None
    host_stores: tuple[tuple[int, int, int], ...] = ()
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossView:
    """Encoded media that decoder layers attend to.

    ``k_LEKSD``, ``v_LEKSD``: [layers, entries, kv_heads, max_len, head_dim]; entry 0 is scratch.
    ``entries_B``: int64 [B], each sequence's entry. ``lens_B``: int32 [B], valid positions in it.
    ``memo``: as ``PagedView``'s.
    """

    k_LEKSD: torch.Tensor
    v_LEKSD: torch.Tensor
    entries_B: torch.Tensor
    lens_B: torch.Tensor
    cu_seqlens: torch.Tensor
    limits: Limits
    extents: Sequence[RowExtent] | None = None
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


View = PagedView | RecurrentView | CrossView


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One launch of a token model.

    ``ids_T`` int64 [T]; ``aux_TW`` int64 [T, W]; ``media_rows_T`` int64 [T], a row of ``features_RC`` or −1 for
    text; ``positions_PT`` int64 [P, T]; ``cu_seqlens`` int32 [B + 1]; ``states``: a view per declared state;
    ``adapter_slots_B`` int64 [B], 0 = none. ``has_media`` is fixed per program (decode never has media), and so is
    ``has_aux``: False when the host knows that ``aux_TW`` is all zeros.
    """

    ids_T: torch.Tensor
    aux_TW: torch.Tensor
    media_rows_T: torch.Tensor
    positions_PT: torch.Tensor
    cu_seqlens: torch.Tensor
    states: Mapping[str, View]
    adapter_slots_B: torch.Tensor
    limits: Limits
    features_RC: torch.Tensor | None = None
    extents: Sequence[RowExtent] | None = None
    has_aux: bool = True

    @property
    def has_media(self) -> bool:
        """Some tokens may take their embedding from ``features_RC``."""
        return self.features_RC is not None

    def paged(self, name: str) -> PagedView:
        """The pages of state ``name``; KeyError or AssertionError when the driver declared no such state."""
        view = self.states[name]
        assert isinstance(view, PagedView), f"state {name!r} is a {type(view).__name__}, not pages"
        return view

    def recurrent(self, name: str) -> RecurrentView:
        """The recurrent slots of state ``name``."""
        view = self.states[name]
        assert isinstance(view, RecurrentView), f"state {name!r} is a {type(view).__name__}, not recurrent"
        return view

    def cross(self, name: str) -> CrossView:
        """The cross-attention entries of state ``name``."""
        view = self.states[name]
        assert isinstance(view, CrossView), f"state {name!r} is a {type(view).__name__}, not cross"
        return view
