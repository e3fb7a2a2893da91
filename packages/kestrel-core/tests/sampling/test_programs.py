"""What captured programs rely on: bits select them, and tensors stay where they are."""

from __future__ import annotations

import pytest
import torch

from kestrel.config import Settings
from kestrel.device import Staging
from kestrel.sampling import Sampler, SamplingParams
from kestrel.sampling.params import Needs
from kestrel.sampling.records import Field, Records
from kestrel.spi import Automaton, Decoding, Host, LogitRule, Static, TokenSet, TokenSpec

V = 200
SPEC = TokenSpec(vocab_size=V, hidden_size=3, max_positions=64)
CPU = torch.device("cpu")
EVERYTHING = int(~Needs.NONE & ~Needs.AUX)


def resolve(*rules, **values: object) -> SamplingParams:
    return SamplingParams.resolve(Settings.from_mapping(values), Decoding(rules=rules), SPEC)


def automaton() -> Automaton:
    return Automaton(
        classes=(TokenSet.span(0, 80),), next=((1, 0), (0, 1)), mask=(TokenSet.all(), TokenSet.span(3, 150))
    )


SHARED = automaton()  # as a family's, which is one for all requests


def kinds() -> list[SamplingParams]:
    host = Host(start=lambda: pytest.fail("the lane starts host rules"))
    return [
        resolve(),
        resolve(stop_token_ids=[5]),
        resolve(temperature=0.9, top_p=0.8),
        resolve(temperature=1.2, top_k=4, repetition_penalty=1.3),
        resolve(Static(allowed=TokenSet.span(2, 90)), temperature=1.0, min_p=0.02),
        resolve(SHARED, logit_bias={3: 4.0}, logprobs=True),
        resolve(LogitRule(op="prefer_group", params={"group": TokenSet.span(100, 180)}), host),
    ]


def sampler(params: list[SamplingParams]) -> Sampler:
    made = Sampler(SPEC, 9, CPU, branch_free=True)
    for row, own in enumerate(params):
        made.set_row(row, own, seed=8, prompt_ids=[1, 2])
    return made


def logits(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(step)) * 2


def test_a_program_that_can_do_more_gives_a_row_the_same_token():
    params = kinds()
    exact, rounded, whole = (
        (sampler([own]) for own in params),
        (sampler([own]) for own in params),
        sampler(params),
    )
    whole.prepare(EVERYTHING)
    rows = torch.arange(len(params))
    together = [whole.sample_as(logits(step, len(params)), EVERYTHING, rows) for step in range(5)]

    for n, (alone, other) in enumerate(zip(exact, rounded, strict=True)):
        for step in range(5):
            table = logits(step, len(params))[n : n + 1]
            needs = alone.needs_of([0])
            want = alone.sample_as(table, needs, torch.tensor([0]))
            got = other.sample_as(table, other.program_of(needs), torch.tensor([0]))
            assert torch.equal(got.ids, want.ids)
            assert torch.equal(together[step].ids[n : n + 1], want.ids)
            assert torch.equal(together[step].stopped[n : n + 1], got.stopped)


def test_rows_that_come_and_go_leave_the_tensors_where_they_are():
    made = sampler([])
    made.prepare(int(Needs.PENALTIES))
    made.set_row(0, resolve(SHARED), seed=0)
    before = made.generation
    for turn in range(12):
        for row, own in enumerate(kinds()):
            made.set_row((row + turn) % 9, own, seed=turn, prompt_ids=range(turn))
        made.set_host_mask((6 + turn) % 9, TokenSet.of(range(0, 100, 2)))
        made.sample(logits(turn, 9), range(9), torch.arange(9))
        for row in range(9):
            made.clear_row(row)

    assert made.generation == before


@pytest.mark.parametrize(
    "grow",
    [
        lambda made: made.set_row(0, resolve(logit_bias=dict.fromkeys(range(190), 1.0)), seed=0),
        lambda made: made.set_row(0, resolve(stop_token_ids=list(range(30))), seed=0),
        lambda made: made.set_row(0, resolve(repetition_penalty=2.0), seed=0),
        lambda made: made.set_row(0, resolve(*(automaton() for _ in range(9))), seed=0),
        lambda made: made.set_host_mask(0, TokenSet.of(range(0, V, 2))),
        lambda made: made.set_row(
            0,
            resolve(*(LogitRule(op="prefer_group", params={"group": TokenSet.of([i])}) for i in (1, 2))),
            seed=0,
        ),
    ],
)
def test_what_outgrows_its_room_makes_programs_stale(grow):
    made = sampler([])
    before = made.generation

    grow(made)

    assert made.generation > before


def test_a_step_that_is_captured_reads_the_tensors_it_read_before():
    made = sampler(kinds())
    made.prepare(EVERYTHING)
    tables = made._rows.tables

    made.clear_row(3)
    made.set_row(3, kinds()[2], seed=1)
    made.sample(logits(0, 7), range(7), torch.arange(7))

    assert made._rows.tables is tables


def test_steps_that_look_at_no_value_run_as_kinds_that_kernels_were_compiled_for():
    params = [resolve(temperature=0.7, top_p=0.9), resolve(Static(allowed=TokenSet.span(2, 90)))]
    blind, looking = sampler(params), Sampler(SPEC, 9, CPU)
    for row, own in enumerate(params):
        looking.set_row(row, own, seed=8)

    assert blind.kind_of([0]) == int(Needs.STOP | Needs.DRAW | Needs.SORT | Needs.MIN_P)
    assert blind.kind_of([1]) == int(Needs.STOP | Needs.BIAS | Needs.STATIC | Needs.AUTOMATA)
    assert looking.kind_of([0]) == looking.needs_of([0])


def test_few_programs_serve_every_mix_of_rows():
    made = sampler([])
    programs = {
        made.program_of(sum(int(need) for i, need in enumerate(Needs) if mix >> i & 1))
        for mix in range(2**12)
    }

    assert len(programs) < 2**12 / 16


@pytest.fixture
def staging():
    made = Staging(CPU)
    made.is_shared = False  # as on an accelerator
    return made


def test_lists_grow_and_what_the_device_wrote_stays(staging):
    records = Records(staging, 3, {"state": Field((0,)), "short": Field((-1,), 2), "pairs": Field((7, 7))})
    records.put(1, "state", [(4,)])
    records.put(1, "short", [(1,), (2,)])
    staging.send()
    records.list("state").items_RKD[1] = 5  # the device's own
    before = records.generation

    records.put(1, "pairs", [(1, 2), (3, 4), (5, 6)])
    staging.send()

    assert records.generation == before + 1
    assert records.list("state").items_RKD[1].tolist() == [[5]]
    assert records.list("short").items_RKD[1].tolist() == [[1], [2]]
    assert records.list("pairs").items_RKD[1].tolist() == [[1, 2], [3, 4], [5, 6], [7, 7]]
    assert records.list("pairs").length_R.tolist() == [0, 3, 0]


def test_lists_that_shrink_leave_padding_behind(staging):
    records = Records(staging, 2, {"ids": Field((-1,), 4)})
    records.put(0, "ids", [(1,), (2,), (3,)])
    records.put(0, "ids", [(9,)])
    staging.send()

    assert records.list("ids").items_RKD[0].flatten().tolist() == [9, -1, -1, -1]
    records.clear(0)
    staging.flush()
    assert records.list("ids").items_RKD[0].flatten().tolist() == [-1] * 4


def test_what_was_cleared_is_clear_once_anything_is_written(staging):
    records = Records(staging, 2, {"ids": Field((-1,), 1)})
    records.put(0, "ids", [(1,)])
    staging.send()
    records.clear(0)
    staging.send()
    assert records.list("ids").length_R.tolist() == [1, 0], "nobody names a row that was cleared"
    records.put(1, "ids", [(2,), (3,)])  # moves every list
    staging.send()
    assert records.list("ids").items_RKD.flatten(1).tolist() == [[-1, -1], [2, 3]]
    assert records.list("ids").length_R.tolist() == [0, 2]


def test_nothing_reaches_the_device_before_it_is_sent(staging):
    records = Records(staging, 2, {"ids": Field((-1,), 4)})
    records.put(0, "ids", [(1,)])

    assert records.list("ids").items_RKD[0].flatten().tolist() == [-1] * 4
