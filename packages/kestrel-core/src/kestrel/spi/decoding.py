"""Constrained decoding: four kinds of rule, stop ids, and the host's say after each token.

Masks of all rules are intersected; logit rules come last. The first three kinds keep their state on the device,
forced ids advance it, and preemption rebuilds it by replay. Rules are values: build one per prompt format and
share it between requests, since the sampler keeps a device copy per distinct object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kestrel.errors import InvalidRequestError
from kestrel.types import FinishReason, Token

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Acceptor",
    "Automaton",
    "Continue",
    "Decoding",
    "Finish",
    "Force",
    "Host",
    "HostMask",
    "LogitRule",
    "Rule",
    "Static",
    "TokenSet",
]


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of token ids as sorted, disjoint, half-open ranges; ``inverted`` means every id except those."""

    ranges: tuple[tuple[int, int], ...] = ()
    inverted: bool = False

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenSet:
        """The set of exactly ``ids``."""
        ranges: list[tuple[int, int]] = []
        for i in sorted(set(ids)):
            if ranges and ranges[-1][1] == i:
                ranges[-1] = (ranges[-1][0], i + 1)
            else:
                ranges.append((i, i + 1))
        return cls(tuple(ranges))

    @classmethod
    def span(cls, start: int, end: int) -> TokenSet:
        """Ids ``start`` to ``end`` (exclusive)."""
        return cls(((start, end),) if end > start else ())

    @classmethod
    def all(cls) -> TokenSet:
        """Every id."""
        return cls((), True)

    def but(self) -> TokenSet:
        """Every id except these."""
        return TokenSet(self.ranges, not self.inverted)

    def __contains__(self, token_id: int) -> bool:
        return any(start <= token_id < end for start, end in self.ranges) != self.inverted

    def __or__(self, other: TokenSet) -> TokenSet:
        if self.inverted or other.inverted:
            raise ValueError("a union of inverted token sets is not supported; build the set directly")
        merged: list[tuple[int, int]] = []
        for start, end in sorted(self.ranges + other.ranges):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        return TokenSet(tuple(merged))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Static:
    """Only ``allowed`` ids, at output indices ``first`` (included) to ``last`` (excluded; None: to the end).

    The output index counts sampled and forced ids from 0.
    """

    allowed: TokenSet
    first: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Automaton:
    """A finite automaton over token classes; in each state only the ids of its mask may follow.

    ``classes``: class k holds the ids of the k-th set that are in no earlier one; ids in none form the last class,
    ``len(classes)``. ``next[state][class]`` is the following state (rows, or for large ones an array [states,
    classes]); ``mask[state]`` the ids allowed there.
    """

    classes: tuple[TokenSet, ...]
    next: Sequence[Sequence[int]] | NDArray[np.int32]
    mask: Sequence[TokenSet]
    start: int = 0

    def __post_init__(self) -> None:
        width = len(self.classes) + 1
        if len(self.next) != len(self.mask) or any(len(row) != width for row in self.next):
            raise ValueError(
                f"an automaton of {len(self.mask)} states needs as many next rows of {width} classes"
            )
        named: Iterable[int]
        if isinstance(self.next, Sequence):
            named = (state for row in self.next for state in row)
        else:  # millions of entries: no loop over them
            named = (int(self.next.min()), int(self.next.max()))
        for state in (self.start, *named):
            if not 0 <= state < len(self.mask):
                raise ValueError(f"state {state} is not one of the automaton's {len(self.mask)} states")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitRule:
    """A named change of the masked logits, applied last.

    ``op`` "prefer_group": when the log-sum-exp over ``params["group"]`` (a TokenSet) exceeds the largest logit
    outside it, everything outside is masked (Whisper's timestamp rule). ``params["unless"]`` (a TokenSet,
    optional) is left out of both sides.
    """

    op: str
    params: Mapping[str, Any] = field(default_factory=dict)


class HostMask(ABC):
    """A grammar's state for one sequence, on the host. Only the sampling of such a row waits for it."""

    @abstractmethod
    def allowed(self) -> TokenSet:
        """The ids that may follow what was accepted so far. An empty set is an error of that request."""

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Advance by one sampled or forced id."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Host:
    """A rule computed on the host after each accepted token; ``start`` makes a fresh state per sequence."""

    start: Callable[[], HostMask]


Rule = Static | Automaton | LogitRule | Host


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on sampling."""


@dataclass(frozen=True, slots=True)
class Force:
    """Take ``ids`` next instead of sampling. They count as output and may be the last (a stop id ends the row)."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """End the sequence after this token."""

    reason: FinishReason = "stop"


class Acceptor(ABC):
    """The host's say after each committed token of one sequence.

    ``may_force`` rows never have two steps in flight, since a forced id would contradict one under way.
    """

    may_force: bool = False

    @abstractmethod
    def accept(self, token: Token) -> Continue | Force | Finish:
        """What follows ``token``. Called once per committed token, forced ones included, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoding:
    """How a request's tokens are chosen and when it ends.

    ``stop_ids`` end the row with "stop" (unless ``ignore_eos``). ``needs_aux``: aux outputs are computed and fed
    back. ``acceptors`` make fresh host state per sequence; the first one that does not continue wins.
    ``greedy`` forces argmax whatever the temperature. ``max_tokens`` caps the settings' own.
    """

    rules: tuple[Rule, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    needs_aux: bool = False
    acceptors: tuple[Callable[[], Acceptor], ...] = ()
    greedy: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens}; it must be at least 1")
