"""One work inside the token lane: its tokens, where it stands, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from kestrel.lanes.hold import MediaHold
from kestrel.lanes.work import Work
from kestrel.spi.decoding import Acceptor, HostMask
from kestrel.state import KeyRun, Lease
from kestrel.types import Layout, Metrics, Token

__all__ = ["Phase", "Prompt", "Sequence"]


class Phase(Enum):
    """Where a sequence is."""

    HELD = auto()  # waits for a sibling's prompt
    WAITING = auto()  # in the queue, holding nothing
    PREFILL = auto()  # has a row; state is behind its tokens
    DECODE = auto()  # one token per step
    LAST = auto()  # its last token is under way
    ENDED = auto()


@dataclass(slots=True)
class Prompt:
    """A layout as arrays: ``ids`` [n], ``aux`` [n, W], ``positions`` [P, n]; ``offsets`` [P] for what follows."""

    ids: NDArray[np.int64]
    aux: NDArray[np.int64]
    positions: NDArray[np.int64]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, aux_width: int, position_rows: int) -> Prompt:
        """The arrays of ``layout``."""
        n = len(layout)
        aux = np.zeros((n, aux_width), dtype=np.int64)
        if layout.aux:
            aux[:] = layout.aux
        if layout.positions:
            positions = np.array(layout.positions, dtype=np.int64)
        else:
            positions = np.tile(np.arange(n, dtype=np.int64), (position_rows, 1))
        return cls(
            np.array(layout.tokens, dtype=np.int64),
            aux,
            positions,
            layout.decode_offset or (0,) * position_rows,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """A work and its progress.

    ``limit``: most output tokens. ``tokens``: committed output. ``sampled``: output tokens launched, those in flight
    included. ``scheduled``: positions launched, while in PREFILL. ``keyed``: output tokens whose keys are known.
    ``gated``: the host has a say before each next step, so no second step may be in flight.
    ``host_rules``: grammars; ``acceptors``: the host's say. Both keep their state over a preemption.
    """

    work: Work
    arrival: int
    limit: int
    id: int = 0
    prompt_len: int = 0
    phase: Phase = Phase.WAITING
    tokens: list[Token] = field(default_factory=list)
    sampled: int = 0
    scheduled: int = 0
    keyed: int = 0
    row: int = -1
    lease: Lease | None = None
    keys: KeyRun | None = None
    prompt: Prompt | None = None
    media: MediaHold | None = None
    acceptors: tuple[Acceptor, ...] = ()
    host_rules: tuple[HostMask, ...] = ()
    gated: bool = False
    is_plain: bool = True
    shares_prompt: bool = False
    probes: dict[int, tuple[float, ...]] = field(default_factory=dict)
    cached: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.id = self.work.id
        self.prompt_len = len(self.work.layout)
        decoding, params = self.work.decoding, self.work.params
        self.acceptors = tuple(start() for start in decoding.acceptors)
        self.host_rules = tuple(rule.start() for rule in params.hosts)
        self.gated = bool(self.host_rules) or any(acceptor.may_force for acceptor in self.acceptors)
        self.is_plain = not (self.acceptors or self.host_rules or params.needs_aux)

    @property
    def known(self) -> int:
        """Positions whose token the host knows."""
        return self.prompt_len + len(self.tokens)

    @property
    def computed(self) -> int:
        """Positions whose state exists by what has committed, once the prompt is done and nothing is forced."""
        return self.prompt_len + len(self.tokens) - 1

    @property
    def held_lease(self) -> Lease:
        """The lease; only while the sequence has a row."""
        assert self.lease is not None, f"work {self.id} holds no lease"
        return self.lease

    def is_overdue(self, positions: int) -> bool:
        """The lease knows of at least ``positions`` less than have committed."""
        return self.computed - self.held_lease.computed >= positions

    def settle(self, computed: int) -> None:
        """Tell the lease that positions up to ``computed`` committed, their keys first."""
        lease, keys = self.held_lease, self.keys
        assert keys is not None
        wanted = min(computed - self.prompt_len, len(self.tokens))
        if wanted > self.keyed:
            new = self.tokens[self.keyed : wanted]
            if self.work.params.needs_aux:
                for token in new:
                    keys.append(token.id, token.aux)
            else:
                keys.extend([token.id for token in new])
            self.keyed = wanted
        lease.commit(computed)

    def metrics(self, now: float) -> Metrics:
        """What the work cost until ``now``."""
        submitted = self.work.submitted
        admitted = now if self.admitted_at is None else self.admitted_at
        first = now if self.first_token_at is None else self.first_token_at
        started = self.admitted_at is not None
        return Metrics(
            input_tokens=self.prompt_len,
            output_tokens=len(self.tokens),
            cached_tokens=self.cached,
            queue_time_ms=(admitted - submitted) * 1e3,
            prefill_time_ms=(first - admitted) * 1e3 if started else 0.0,
            decode_time_ms=(now - first) * 1e3 if self.first_token_at is not None else 0.0,
            ttft_ms=(first - submitted) * 1e3 if self.first_token_at is not None else 0.0,
        )
