"""The kinds of state a token model keeps: declared by its driver, allocated and shared by ``kestrel.state``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AuxOutput", "CrossKV", "PagedKV", "Recurrent", "StatePart", "StateSpec", "WindowKV"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Keys and values of full-attention layers, in pages. ``dtype`` is a torch dtype name, or "auto" (the model's)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowKV:
    """Keys and values of sliding-window layers: a query at position p sees keys at positions > p − ``window``."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    window: int
    dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """One tensor of a recurrent state: its shape per layer and sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """Constant-size state per sequence (gated delta, convolution tails). Starts as zeros; checkpointed by position."""

    name: str
    layers: int
    parts: tuple[StatePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossKV:
    """Keys and values that decoder layers read from an encoded media item (encoder–decoder models)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    max_len: int
    dtype: str = "auto"


StateSpec = PagedKV | WindowKV | Recurrent | CrossKV


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxOutput:
    """``width`` small integers below ``cardinality`` produced with token ``token_id`` (None: with every token) and
    fed back with it. Columns of a batch's aux matrix follow the order of ``TokenSpec.aux``; the unused hold 0."""

    name: str
    token_id: int | None
    cardinality: int
    width: int = 1
