"""What state tests share: tiny caches that are checked after each test, prompts, and a simulated device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kestrel.spi.driver import TokenSpec
from kestrel.spi.states import CrossKV, PagedKV, Recurrent, StatePart, StateSpec, WindowKV
from kestrel.state import KeyRun, Lease, PoolSizes, StateCache
from kestrel.types import Layout, Prepared, Span

STATES: Mapping[str, StateSpec] = {
    "full": PagedKV(name="full", layers=1, kv_heads=1, head_dim=1),
    "window": WindowKV(name="window", layers=1, kv_heads=1, head_dim=1, window=6),
    "recurrent": Recurrent(name="recurrent", layers=1, parts=(StatePart(name="s", shape=(1,)),)),
    "cross": CrossKV(name="cross", layers=1, kv_heads=1, head_dim=1, max_len=2),
}

NewCache = Callable[..., StateCache]


def build_cache(
    *states: str | StateSpec,
    pages: int = 64,
    window_pages: int = 64,
    live: int = 8,
    checkpoints: int = 8,
    entries: int = 4,
    page_size: int = 4,
    max_ahead: int | None = None,
    prefix_cache: bool = True,
) -> StateCache:
    specs = tuple(STATES[state] if isinstance(state, str) else state for state in states)
    return StateCache(
        TokenSpec(vocab_size=1 << 20, hidden_size=1, max_positions=1 << 20, states=specs),
        device=torch.device("cpu"),
        dtype=torch.float32,
        page_size=page_size,
        sizes=PoolSizes(
            pages=pages,
            window_pages={spec.window: window_pages for spec in specs if isinstance(spec, WindowKV)},
            live_slots=live,
            checkpoint_slots=checkpoints,
            cross_entries=entries,
        ),
        max_ahead=max_ahead,
        prefix_cache=prefix_cache,
    )


@pytest.fixture
def new_cache() -> Iterator[NewCache]:
    """Makes caches; each is checked when the test ends, and again without leases and cached prefixes."""
    made: list[StateCache] = []

    def new(*states: str | StateSpec, **sizes: Any) -> StateCache:
        made.append(build_cache(*states, **sizes))
        return made[-1]

    yield new
    for cache in made:
        cache.check()


def prepared(name: str, positions: int = 0, kind: str = "image") -> Prepared:
    """A media item whose content is ``name``."""
    return Prepared(
        kind=kind, digest=hashlib.sha256(name.encode()).digest(), num_positions=positions, tensors={}
    )


@pytest.fixture(scope="session")
def media() -> Callable[..., Prepared]:
    """Makes media items."""
    return prepared


@pytest.fixture(scope="session")
def picture() -> Callable[..., Layout]:
    """Makes prompts as Moondream's: BOS and a picture as one bidirectional range, then text."""

    def layout(name: str, positions: int, text: tuple[int, ...]) -> Layout:
        end = positions + 1
        return Layout(
            tokens=(1, *[0] * positions, *text),
            spans=(Span(1, end, 0),),
            media=(prepared(name, positions),),
            bidirectional=((0, end),),
            marks=(end,),
        )

    return layout


@pytest.fixture(scope="session")
def run() -> Callable[..., Lease]:
    """Runs a prompt whole: opens it, computes and commits everything, appends ``output``, finishes."""

    def run(cache: StateCache, layout: Layout, *output: int, exact: bool = True) -> Lease:
        keys = KeyRun.of(layout, cache.interner)
        lease = cache.open(keys, reserve=len(keys) + len(output))
        assert lease is not None
        lease.stores(lease.computed, len(keys))
        lease.commit(len(keys))
        for token in output:
            keys.append(token)
            lease.commit(len(keys))
        lease.finish(exact=exact)
        return lease

    return run


# -- a simulated device: pools hold a number per prefix instead of keys and values


@dataclass(eq=False)
class Sequence:
    """A prompt and what it generates, with the lease it holds and the ends of its steps in flight."""

    layout: Layout
    atoms: list[object]  # what each position is, without any of the cache's coding
    keys: KeyRun
    lease: Lease
    launched: int
    flights: list[tuple[Lease, int]] = field(default_factory=list)


class Simulation:
    """Runs sequences on a cache as a lane would, in stream order, and checks every number that a launch reads."""

    def __init__(self, cache: StateCache, *states: str) -> None:
        self.cache = cache
        self.states = states
        self.sequences: list[Sequence] = []
        self.waiting: list[tuple[Layout, list[object], KeyRun]] = []
        self.orphans: list[Lease] = []  # pins of sequences that are gone
        self.hits = 0
        self._numbers: dict[object, int] = {}

    def open(self, layout: Layout) -> None:
        atoms: list[object] = [
            (token, layout.aux[i] if layout.aux else ()) for i, token in enumerate(layout.tokens)
        ]
        for span in layout.spans:
            digest = layout.media[span.item].digest
            atoms[span.start : span.end] = [(digest, offset) for offset in range(span.end - span.start)]
        self._start(layout, atoms, KeyRun.of(layout, self.cache.interner))

    def resume(self) -> None:
        if self.waiting:
            self._start(*self.waiting.pop(0))

    def _start(self, layout: Layout, atoms: list[object], keys: KeyRun) -> None:
        lease = self.cache.open(keys, reserve=len(keys))
        if lease is None:
            return
        assert lease.cached < len(keys)
        assert not keys.splits_range(lease.cached)
        self.hits += lease.cached > 0
        if "cross" in self.states and keys.namespace.cross:
            entry, is_new = lease.cross_entry("cross")
            if is_new:
                self.cache.pool("cross").k_LEKSD[0, entry] = self._number(keys.namespace.cross)
                lease.cross_written(2)
        self.sequences.append(Sequence(layout, atoms, keys, lease, lease.cached))

    def launch(self, sequence: Sequence, count: int) -> None:
        start, end = sequence.launched, sequence.launched + count
        while len(sequence.atoms) < end:  # decode feeds what the device just sampled, one token a step
            end = min(end, max(len(sequence.atoms), start + 1))
            if len(sequence.atoms) < end:
                sequence.atoms.append((len(sequence.atoms) % 3, ()))
        for first, last in sequence.layout.bidirectional:
            if first < end < last:
                end = first if first > start else last
        if not sequence.lease.reserve(end):
            self.preempt(sequence)
            return
        self._verify(sequence, start)
        self._write(sequence, start, end)
        sequence.lease.pin()
        sequence.flights.append((sequence.lease, end))
        sequence.launched = end

    def commit(self, sequence: Sequence) -> None:
        if sequence.flights:
            lease, end = sequence.flights.pop(0)
            while len(sequence.keys) < end:
                token, _ = sequence.atoms[len(sequence.keys)]
                sequence.keys.append(token)
            lease.unpin()
            lease.commit(end)

    def preempt(self, sequence: Sequence) -> None:
        self.abort(sequence)
        known = sequence.atoms[: len(sequence.keys)]
        self.waiting.append((sequence.layout, known, sequence.keys))

    def abort(self, sequence: Sequence) -> None:
        sequence.lease.close()
        sequence.lease.close()
        self.orphans += [lease for lease, _ in sequence.flights]
        self.sequences.remove(sequence)

    def finish(self, sequence: Sequence) -> None:
        exact = not sequence.flights
        sequence.lease.finish(exact=exact)
        self.orphans += [lease for lease, _ in sequence.flights]
        self.sequences.remove(sequence)

    def settle(self) -> None:
        """The steps of those that are gone commit, into nothing."""
        for lease in self.orphans:
            lease.unpin()
            lease.commit(10**9)
        self.orphans.clear()

    def end(self) -> None:
        """Everything is aborted; the cache must come back to its idle state."""
        for sequence in list(self.sequences):
            self.abort(sequence)
        self.settle()
        self.cache.check()
        assert self.cache.stats().pages_live == 0
        self.cache.clear()
        self.cache.check()
        stats = self.cache.stats()
        assert (stats.nodes, stats.pages_cached, stats.checkpoints) == (0, 0, 0)

    def _number(self, content: object) -> int:
        """A number of its own for each content, never 0, exact in float32."""
        return self._numbers.setdefault(content, len(self._numbers) + 1)

    def _state(self, sequence: Sequence, position: int) -> int:
        """What the model keeps of ``position``: a number for all that it depends on."""
        end = position + 1
        for first, last in sequence.layout.bidirectional:
            if first <= position < last:
                end = last
        return self._number((sequence.keys.namespace, position, tuple(sequence.atoms[:end])))

    def _carried(self, sequence: Sequence, computed: int) -> int:
        """What the model carries after ``computed`` positions."""
        return self._state(sequence, computed - 1) if computed else 0

    def _verify(self, sequence: Sequence, computed: int) -> None:
        for name in {"full", "window"} & set(self.states):
            first = 0 if name == "full" else max(0, computed - STATES["window"].window + 1)
            table = sequence.lease.table(name)
            pool = self.cache.pool(name).k_LPKSD
            size = self.cache.page_size
            for position in range(first, computed):
                found = pool[0, table[position // size], 0, position % size, 0].item()
                assert found == self._state(sequence, position), f"{name}: position {position} of {computed}"
        if "recurrent" in self.states:
            slot = sequence.lease.state_slot("recurrent")
            found = self.cache.pool("recurrent").parts["s"][0, slot, 0].item()
            assert found == self._carried(sequence, computed)
        if "cross" in self.states and sequence.keys.namespace.cross:
            entry, is_new = sequence.lease.cross_entry("cross")
            assert not is_new
            found = self.cache.pool("cross").k_LEKSD[0, entry, 0, 0, 0].item()
            assert found == self._number(sequence.keys.namespace.cross)

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        size = self.cache.page_size
        for name in {"full", "window"} & set(self.states):
            table = sequence.lease.table(name)
            for position in range(start, end):
                page = table[position // size]
                assert page, f"{name}: position {position} has no place"
                self.cache.pool(name).k_LPKSD[0, page, 0, position % size, 0] = self._state(
                    sequence, position
                )
        if "recurrent" in self.states:
            parts = self.cache.pool("recurrent").parts["s"]
            parts[0, sequence.lease.state_slot("recurrent"), 0] = self._carried(sequence, end)
            for position, slot in sequence.lease.stores(start, end):
                parts[0, slot, 0] = self._carried(sequence, position)


@pytest.fixture(scope="session")
def simulate() -> Callable[..., Simulation]:
    """Makes simulations over a cache of the given states."""

    def simulate(*states: str, **sizes: Any) -> Simulation:
        return Simulation(build_cache(*states, **sizes), *states)

    return simulate
