"""Sampling kernels behind the sampler, and which tokens exactly they leave to draw from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.config import Settings
from kestrel.ops import resolve_ops
from kestrel.ops.sample_cases import TableShape, make_rows, make_tables
from kestrel.ops.sample_tables import SampleTables
from kestrel.sampling import Sampled, Sampler, SamplingParams
from kestrel.spi import Automaton, Available, Decoding, LogitRule, Rule, Static, TokenSet, TokenSpec
from kestrel_kernels_cuda.backend import CudaBackend
from kestrel_kernels_cuda.sampling_parts import chained
from kestrel_kernels_cuda.sampling_select import select_launches

V = 2500  # two chunks
SPEC = TokenSpec(vocab_size=V, hidden_size=3, max_positions=64)


class AnywhereBackend(CudaBackend):
    """The backend, on a CPU too: there its kernels are interpreted."""

    def probe(self, device: torch.device) -> Available:
        return Available()


def automaton() -> Automaton:
    return Automaton(
        classes=(TokenSet.span(0, 1200),),
        next=((1, 0), (0, 1)),
        mask=(TokenSet.all(), TokenSet.span(3, 2100)),
    )


def kinds() -> list[SamplingParams]:
    """Rows of every kind."""
    prefer = LogitRule(
        op="prefer_group", params={"group": TokenSet.span(2000, 2400), "unless": TokenSet.of([7])}
    )
    settings: list[tuple[dict[str, object], tuple[Rule, ...]]] = [
        ({"temperature": 0.0}, ()),
        ({"temperature": 0.9, "top_p": 0.8, "logprobs": True, "top_logprobs": 5}, ()),
        (
            {"temperature": 1.2, "top_k": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
            (automaton(),),
        ),
        ({"temperature": 1.0, "min_p": 0.02}, (Static(allowed=TokenSet.span(20, 900), first=1),)),
        ({"temperature": 0.0, "logit_bias": {3: 4.0}, "presence_penalty": 1.0}, (prefer,)),
        ({"temperature": 2.5, "top_p": 0.95, "top_k": 200}, ()),
        ({"temperature": 1.0}, ()),
    ]
    return [
        SamplingParams.resolve(
            Settings.from_mapping(values),
            Decoding(rules=rules, stop_ids=frozenset({5, 9})),
            SPEC,
        )
        for values, rules in settings
    ]


def sampler(place: torch.device, *, by_kernels: bool) -> Sampler:
    ops = resolve_ops(device=place, backends=[AnywhereBackend()] if by_kernels else [])
    return Sampler(SPEC, 9, place, ops=ops, branch_free=True)


def logits(step: int, rows: int, place: torch.device) -> torch.Tensor:
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(step)) * 3).to(place)


def steps(
    made: Sampler, places: list[int], params: list[SamplingParams], device: torch.device, pick: slice
) -> list[Sampled]:
    for n, (row, own) in enumerate(zip(places, params, strict=True)):
        made.set_row(row, own, seed=70 + n + (pick.start or 0), prompt_ids=[1, 2])
    rows = torch.tensor(places, device=device)
    return [made.sample(logits(step, len(kinds()), device)[pick], places, rows) for step in range(4)]


def test_kernels_choose_the_tokens_that_the_references_choose(place: torch.device) -> None:
    places = [6, 1, 0, 7, 3, 2, 8]
    got = steps(sampler(place, by_kernels=True), places, kinds(), place, slice(None))
    want = steps(sampler(place, by_kernels=False), places, kinds(), place, slice(None))

    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.status, b.status)
        assert torch.equal(a.stopped, b.stopped)
        assert a.logprob is not None
        assert b.logprob is not None
        torch.testing.assert_close(a.logprob, b.logprob, atol=1e-5, rtol=1e-5)


def test_a_row_draws_the_same_alone_and_among_neighbours(place: torch.device) -> None:
    together = steps(sampler(place, by_kernels=True), [6, 1, 0, 7, 3, 2, 8], kinds(), place, slice(None))

    for n in (1, 2, 5):
        alone = steps(sampler(place, by_kernels=True), [4], kinds()[n : n + 1], place, slice(n, n + 1))
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole.ids[n : n + 1], single.ids)


def left_by_sorting(logits_V: torch.Tensor, tables: SampleTables, row: int) -> set[int]:
    """What top-k and top-p leave, in float64."""
    temperature, top_p = tables.floats_R6[row, :2].tolist()
    top_k = int(tables.ints_R4[row, 0])
    scaled = (logits_V.double() - logits_V.double().max()) / temperature
    order = scaled.sort(descending=True, stable=True).indices[: top_k or None]
    mass = scaled[order].softmax(0)
    return set(order[(mass.cumsum(0) - mass <= top_p) | (top_p >= 1)].tolist())


def keys_of(logits_V: torch.Tensor) -> torch.Tensor:
    """As order_of, without a kernel."""
    bits = (logits_V + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@pytest.mark.parametrize(
    ("kind", "few"),
    [
        ("spread", 512),
        ("ties", 512),
        ("few", 512),
        ("peaked", 512),
        ("flat", 512),
        ("spread", 16),
        ("ties", 16),
    ],
    ids=["spread", "ties", "few", "peaked", "flat", "spread by bisection", "ties by bisection"],
)
def test_exactly_the_ranks_of_top_k_and_top_p_are_left(kind: str, few: int, place: torch.device) -> None:
    shape = TableShape(num_rows=9, vocab=V, kind="ranks")
    tables, rows = make_tables(shape, 3, place), make_rows(shape, 3, place)
    table = logits(5, 9, place)
    table = {
        "spread": table,
        "ties": (table * 2).round(),
        "flat": torch.zeros_like(table),
        "few": table.masked_fill(torch.arange(V, device=place) > 2, -math.inf),
        "peaked": table * 40,
    }[kind]
    best = table.amax(1)

    kept, launches = select_launches(table, best, rows, tables)
    for launch in chained(launches, place):
        meta = {**launch.meta, "FEW": few} if "FEW" in launch.meta else launch.meta
        replace(launch, meta=meta).run()

    ids = torch.arange(V, device=place)
    for n, row in enumerate(rows.tolist()):
        order, least, cut = keys_of(table[n]), kept.order_N[n], kept.cut_N[n]
        is_left = (order > least) | ((order == least) & (ids <= cut))
        if float(tables.floats_R6[row, 0]) > 0:
            assert set(ids[is_left].tolist()) == left_by_sorting(table[n], tables, row), (row, kind)
