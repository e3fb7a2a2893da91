"""Values that cross module borders: tokens, segments, layouts, stream chunks, results. No torch, no numpy at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from kestrel.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ChunkKind",
    "EngineResult",
    "FinishReason",
    "Layout",
    "Media",
    "Metrics",
    "Prepared",
    "Segment",
    "Span",
    "StreamChunk",
    "Text",
    "Token",
    "TokenLogprobs",
    "Tokens",
]

FinishReason = Literal["stop", "length", "cancelled"]


class ChunkKind(str, Enum):
    """What a stream chunk carries."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    OBJECT = "object"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The natural-log probability of a token, and of the most likely ones beside it (most likely first)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: its id, the aux bins produced with it (empty for most models), its log-probability."""

    id: int
    aux: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Text to be tokenised. It never yields control ids, whatever it spells."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids taken as they are. ``aux`` is empty, or one tuple of bins per id."""

    ids: tuple[int, ...]
    aux: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.aux and len(self.aux) != len(self.ids):
            raise InvalidRequestError(
                f"{len(self.ids)} token ids came with {len(self.aux)} aux entries; give one per id"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A media item ready for the encoder.

    ``digest`` is the full SHA-256 of the prepared tensors and the preparation version: it is the cache key.
    ``num_positions`` is how many sequence positions the item fills (0 when its states go to cross attention).
    ``cost`` counts encoder units (crops, windows), for the encode budget. ``meta`` reaches the result
    (original size, crops, duration). ``cross_positions``: valid positions of its cross entry (0: the encoder's rows,
    shared equally between the items of a launch).
    """

    kind: str
    digest: bytes
    num_positions: int
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)
    cost: int = 1
    cross_positions: int = 0

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise ValueError(
                f"a prepared item's digest is a full SHA-256 (32 bytes), not {len(self.digest)} bytes"
            )


@dataclass(frozen=True, slots=True)
class Media:
    """A prepared media item at this place of the prompt."""

    prepared: Prepared


Segment = Text | Tokens | Media


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``start`` to ``end`` (exclusive) are filled by media item ``item`` (an index into ``Layout.media``)."""

    start: int
    end: int
    item: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A prompt as positions.

    ``tokens``: n ids (any valid id at media positions). ``aux``: empty, or n tuples of width W.
    ``positions``: P rows of n position ids; empty means 0 … n − 1 in each row.
    ``spans``: where media items sit, in order. ``media``: the items, cross items included (they have no span).
    ``bidirectional``: ``(start, end)`` ranges whose positions see each other fully; never split by a chunk.
    ``marks``: positions (a count of positions before the mark) at which the prefix tree also ends a node.
    ``stable``: the last position that the next turn will repeat, or None; recurrent state is checkpointed there.
    ``decode_offset``: per position row, what decode adds to a position's index.
    """

    tokens: tuple[int, ...]
    aux: tuple[tuple[int, ...], ...] = ()
    positions: tuple[tuple[int, ...], ...] = ()
    spans: tuple[Span, ...] = ()
    media: tuple[Prepared, ...] = ()
    bidirectional: tuple[tuple[int, int], ...] = ()
    marks: tuple[int, ...] = ()
    stable: int | None = None
    decode_offset: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A piece of a stream as the user sees it. Joined ``text`` of kind "text" is the answer exactly."""

    kind: ChunkKind
    text: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a request cost. Times in milliseconds; TTFT counts from submission, queue included."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_time_ms: float = 0.0
    prefill_time_ms: float = 0.0
    decode_time_ms: float = 0.0
    ttft_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """What a request returned. ``outputs`` lists all ``n`` outputs; ``output`` is the first.

    ``tokens`` are the generated ids of the first output, a final stop id included. ``logprobs`` (one per token,
    when asked for) are log-softmax values after masks, bias and penalties, before temperature.
    """

    output: dict[str, Any]
    finish_reason: FinishReason
    metrics: Metrics
    request_id: str
    seed: int
    model_id: str = ""
    outputs: tuple[dict[str, Any], ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    media: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
