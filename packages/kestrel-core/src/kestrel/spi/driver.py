"""Drivers: a loaded model as the engine runs it. Tensors only; no skills, no scheduling, no sampling.

Letters: T tokens, B sequences, N rows whose logits are wanted, C hidden, V vocabulary, W aux width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel.errors import InvalidRequestError
from kestrel.spi.backend import OpQuery
from kestrel.spi.batch import Batch, CrossView
from kestrel.spi.media import MediaItem, MediaSpec
from kestrel.spi.states import AuxOutput, StateSpec
from kestrel.types import Layout, Media, Prepared, Segment, Span, Text, Token, Tokens

if TYPE_CHECKING:
    import torch

    from kestrel.spi.family import TextTokenizer

__all__ = ["Progress", "SinglePassDriver", "StepDriver", "StepSpec", "TokenDriver", "TokenSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec:
    """What a token model needs and makes. ``max_positions`` is its context; ``position_rows`` is P."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    eos_ids: frozenset[int] = frozenset()
    position_rows: int = 1
    states: tuple[StateSpec, ...] = ()
    aux: tuple[AuxOutput, ...] = ()
    media: tuple[MediaSpec, ...] = ()
    op_needs: tuple[OpQuery, ...] = ()
    lora_targets: tuple[str, ...] = ()

    @property
    def aux_width(self) -> int:
        """W: columns of the aux matrix, all aux outputs side by side."""
        return sum(output.width for output in self.aux)

    def media_spec(self, kind: str) -> MediaSpec:
        """The declaration of media ``kind``; InvalidRequestError when the model takes none of it."""
        for spec in self.media:
            if spec.kind == kind:
                return spec
        kinds = ", ".join(spec.kind for spec in self.media) or "no media"
        raise InvalidRequestError(f"this model takes {kinds}; it was given {kind!r}")


class TokenDriver(ABC):
    """An autoregressive model. ``forward``, ``logits``, ``aux_logits`` and ``features`` are branch-free (no sync, no
    ``.item()``). ``device``: where the model is; only the default ``encode`` asks."""

    spec: TokenSpec
    tokenizer: TextTokenizer
    device: torch.device

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        """``item`` ready for ``encode``, on a pool thread: geometry, uint8 tensors or exact floats, digest.

        ``settings`` holds the media settings (``min_pixels``, ``max_pixels``, …) that the caller gave.
        Raises InvalidMediaError when the model cannot take the item.
        """
        raise InvalidRequestError(f"this model takes no {item.kind}")

    def layout(self, segments: Sequence[Segment]) -> Layout:
        """The prompt's positions, on a pool thread.

        The default puts tokens and media side by side, each media span filled with the id 0, ends a tree node
        after every span, and makes no range bidirectional.
        """
        ids: list[int] = []
        bins: dict[int, Sequence[tuple[int, ...]]] = {}  # by where they begin
        spans: list[Span] = []
        media: list[Prepared] = []
        for segment in segments:
            match segment:
                case Text(text):
                    ids += self.tokenizer.encode(text)
                case Tokens(new_ids, new_aux):
                    if any(map(any, new_aux)):
                        bins[len(ids)] = new_aux
                    ids += new_ids
                case Media(prepared):
                    if prepared.num_positions:
                        spans.append(Span(len(ids), len(ids) + prepared.num_positions, len(media)))
                    media.append(prepared)
                    ids += [0] * prepared.num_positions
        aux = [(0,) * self.spec.aux_width] * len(ids) if bins else []
        for start, found in bins.items():
            aux[start : start + len(found)] = found
        return Layout(
            tokens=tuple(ids),
            aux=tuple(aux),
            spans=tuple(spans),
            media=tuple(media),
            marks=tuple(span.end for span in spans),
        )

    def encode(self, kind: str, packed: Sequence[Prepared]) -> torch.Tensor:
        """Features of several items of one kind, concatenated: [sum of positions, C] on the device.

        For ``into="cross"`` kinds the rows are the encoder's output, ``write_cross`` splits them. The default runs
        ``features`` over what ``pack`` gives; a driver overrides either this, or those two.
        """
        inputs = self.pack(kind, packed)
        if inputs is None:
            raise NotImplementedError(f"{type(self).__name__} declares media {kind!r} but does not encode it")
        features = self.features(kind, [_joined(parts, self.device) for parts in inputs])
        rows = sum(item.num_positions for item in packed)
        return features[:rows] if rows else features

    def pack(self, kind: str, packed: Sequence[Prepared]) -> Sequence[Sequence[torch.Tensor]] | None:
        """The inputs of ``features`` as host tensors, in order; the tensors of one input are laid side by side along
        their first dimension on the way to the device, without a wait. None: use ``encode``.

        Cheap: on the device thread. ``features`` runs as a program per tuple of shapes, so shapes that vary a lot are
        better filled up to a few sizes; rows of padding come last.
        """
        return None

    def features(self, kind: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """As ``encode``, of what ``pack`` gave, on the device: [rows, C], rows of padding behind those of the items.

        Branch-free but for the shapes of ``inputs``, since it is captured: nothing on the host may steer it.
        """
        raise NotImplementedError(f"{type(self).__name__} packs media {kind!r} but computes no features")

    def write_cross(
        self, encoded: torch.Tensor, packed: Sequence[Prepared], views: Mapping[str, CrossView]
    ) -> None:
        """Project ``encoded`` into the cross entries of ``views``, once per new entry, before its first forward.

        Of a driver that packs, it is captured with ``features`` where all of ``packed`` say their cross positions: the
        entries then lie in tensors, and of ``packed`` only the number and those positions may steer it.
        """
        raise NotImplementedError(f"{type(self).__name__} declares cross states but does not write them")

    @abstractmethod
    def embed(self, batch: Batch) -> torch.Tensor:
        """Input embeddings [T, C]; media features and aux bins already in place."""

    @abstractmethod
    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, C] *before* the final norm; states are read and written through ``batch.states``."""

    @abstractmethod
    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states; applies the final norm."""

    def aux_logits(self, h_NC: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        """Bin logits [N, W, largest cardinality] of the hidden states that produced ``ids``.

        Every column for every row; core keeps the columns of the aux output that the id names.
        """
        raise NotImplementedError(f"{type(self).__name__} declares aux outputs but does not compute them")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What a step model takes: at most ``max_rows`` states and ``max_units`` of cost together in one launch."""

    media: tuple[MediaSpec, ...] = ()
    max_rows: int = 8
    max_units: int = 64
    op_needs: tuple[OpQuery, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one step added to one state: tokens, or (when ``done``) an ``output`` of any shape."""

    tokens: tuple[Token, ...] = ()
    frames: tuple[int, ...] = ()
    durations: tuple[int, ...] = ()
    output: Any = None
    done: bool = False


class StepDriver(ABC):
    """A transducer, detector or embedder: ``start`` encodes, ``step`` advances all states together a bounded amount.

    A single-pass model finishes in its first step. States are the driver's own objects; the lane only holds them.
    """

    spec: StepSpec
    tokenizer: TextTokenizer | None = None

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        """As ``TokenDriver.prepare``."""
        raise InvalidRequestError(f"this model takes no {item.kind}")

    def cost(self, prepared: Prepared) -> int:
        """Units that ``prepared`` takes of ``StepSpec.max_units``."""
        return prepared.cost

    @abstractmethod
    def start(self, prepared: Sequence[Prepared], carried: Sequence[Any | None]) -> list[Any]:
        """A new state per item, encoded together; ``carried`` continues an earlier clip of the same stream."""

    @abstractmethod
    def step(self, states: Sequence[Any]) -> list[Progress]:
        """Advance every state by a bounded amount of work."""

    def close(self, state: Any) -> None:
        """Give back what ``state`` holds. Called exactly once per state, also after a failure."""


class SinglePassDriver(ABC):
    """A pass beside the main driver (alignment, refinement) that shares its modules."""

    @abstractmethod
    def infer(self, inputs: Sequence[Mapping[str, Any]], encoded: Sequence[Any]) -> list[Any]:
        """One output per input; ``encoded`` holds each input's media features or cross views, leased for the call."""


def _joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """``parts`` side by side on ``device``; without importing torch, which the interface does not need."""
    first = parts[0]
    joined = first.new_empty((sum(part.shape[0] for part in parts), *first.shape[1:]), device=device)
    start = 0
    for part in parts:
        joined[start : start + part.shape[0]].copy_(part)
        start += part.shape[0]
    return joined
