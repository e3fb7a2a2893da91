"""Toy drivers: real subclasses of the driver classes, small enough to check by hand. Float32, seeded, no checkpoint.

``FakeTokenDriver`` computes nothing and costs nothing; ``ToyHybrid`` (see ``toy_hybrid``) uses every kind of state and
has an independent ``oracle``; ``ToyStep`` is a transducer for the step lane.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kestrel.spi.batch import Batch
from kestrel.spi.driver import Progress, StepDriver, StepSpec, TokenDriver, TokenSpec
from kestrel.spi.media import MediaSpec
from kestrel.spi.states import PagedKV
from kestrel.testing.toy_hybrid import COORD, EOS, NAN, ToyHybrid
from kestrel.types import Prepared, Token

__all__ = ["COORD", "EOS", "NAN", "FakeTokenDriver", "ToyHybrid", "ToyState", "ToyStep", "toy_media"]

CPU = torch.device("cpu")


def toy_media(kind: str, seed: int, rows: int, *, positions: int | None = None, cost: int = 1) -> Prepared:
    """A prepared item of ``rows`` random rows, as ``ToyHybrid`` and ``ToyStep`` encode it.

    ``positions`` None: ``rows``; 0: for cross attention.
    """
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
    digest = hashlib.sha256(f"{kind} {seed} {rows}".encode()).digest()
    return Prepared(
        kind=kind,
        digest=digest,
        num_positions=rows if positions is None else positions,
        tensors={"x": x},
        cost=cost,
        cross_positions=rows if positions == 0 else 0,
    )


class FakeTokenDriver(TokenDriver):
    """After id i comes (i · 5 + 3) mod vocab, whatever was before: a model without maths, to measure the lane with.

    ``follows`` replaces the rule. One paged state is declared and never touched.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        *,
        max_positions: int = 1 << 20,
        follows: Callable[[int], int] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.spec = TokenSpec(
            vocab_size=vocab_size,
            hidden_size=1,
            max_positions=max_positions,
            states=(PagedKV(name="kv", layers=1, kv_heads=1, head_dim=1),),
        )
        rule = follows or (lambda i: (i * 5 + 3) % vocab_size)
        self._logits = torch.zeros(vocab_size, vocab_size)
        for i in range(vocab_size):
            self._logits[i, rule(i)] = 1.0
        self._logits = self._logits.to(device)

    def embed(self, batch: Batch) -> torch.Tensor:
        return batch.ids_T

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        return x_TC

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        return self._logits.index_select(0, h_NC)


@dataclass(slots=True, eq=False)
class ToyState:
    """One clip of ``ToyStep``: what is left to emit, and how many frames earlier clips had."""

    left: list[int]
    frame: int
    is_closed: bool = False


class ToyStep(StepDriver):
    """Emits up to ``per_step`` tokens per step, one per row of its item: the row's first number, scaled to an id.

    ``output`` at the end is the number of frames so far, carried clips included. ``single_pass`` ends in one step.
    Every state handed out is in ``states``, so that tests can see that each was closed once.
    """

    def __init__(
        self, *, per_step: int = 2, max_rows: int = 4, max_units: int = 6, single_pass: bool = False
    ) -> None:
        self.spec = StepSpec(media=(MediaSpec(kind="audio"),), max_rows=max_rows, max_units=max_units)
        self._per_step = 1 << 30 if single_pass else per_step
        self.states: list[ToyState] = []
        self.launches: list[int] = []

    def start(self, prepared: Sequence[Prepared], carried: Sequence[Any | None]) -> list[Any]:
        started: list[Any] = []
        for item, earlier in zip(prepared, carried, strict=True):
            state = ToyState(
                [abs(int(v * 100)) for v in item.tensors["x"][:, 0]], earlier.frame if earlier else 0
            )
            self.states.append(state)
            started.append(state)
        return started

    def step(self, states: Sequence[Any]) -> list[Progress]:
        self.launches.append(len(states))
        return [self._advance(state) for state in states]

    def _advance(self, state: ToyState) -> Progress:
        now, state.left = state.left[: self._per_step], state.left[self._per_step :]
        frames = tuple(range(state.frame, state.frame + len(now)))
        state.frame += len(now)
        done = not state.left
        return Progress(
            tokens=tuple(Token(i) for i in now),
            frames=frames,
            durations=(1,) * len(now),
            done=done,
            output=state.frame if done else None,
        )

    def close(self, state: Any) -> None:
        assert not state.is_closed, "a state was closed twice"
        state.is_closed = True
