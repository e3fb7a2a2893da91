"""One schedulable unit, as the engine hands it to a lane. Built on a pool thread; never changed by the lane."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel.spi.decoding import Decoding
from kestrel.types import Layout, Prepared

if TYPE_CHECKING:
    from kestrel.sampling import SamplingParams
    from kestrel.state import KeyRun

__all__ = ["StepWork", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A prompt and how to continue it.

    ``keys`` are the prompt's cache keys; the lane copies them, so siblings may share one run. ``choice`` is the
    index among ``n`` outputs; works with one ``group`` share a prompt: the later ones wait until the first has it
    cached. ``deadline`` and ``submitted`` are ``time.monotonic`` seconds. ``exempt_queue`` works (children of an
    admitted call) are taken although the queue is full.
    """

    id: int
    layout: Layout
    keys: KeyRun
    params: SamplingParams
    decoding: Decoding
    seed: int
    submitted: float
    choice: int = 0
    group: Hashable | None = None
    n_siblings: int = 1
    probes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    deadline: float | None = None
    priority: int = 0
    exempt_queue: bool = False
    adapter: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """An item for a step model. ``carried`` continues an earlier clip's state; the lane owns it once it took the work.

    ``keep_state``: at a good end the state is handed over in ``Finished.carried`` instead of closed.
    """

    id: int
    prepared: Prepared
    submitted: float
    carried: Any | None = None
    keep_state: bool = False
    deadline: float | None = None
    priority: int = 0
    exempt_queue: bool = False
