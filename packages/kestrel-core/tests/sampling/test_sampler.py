"""The sampler's edges: ties, filters, seeds, stop ids, faults, aux bins."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kestrel.config import Settings
from kestrel.sampling import RowStatus, Sampler, SamplingParams, token_logprobs
from kestrel.spi import Automaton, AuxOutput, Decoding, Host, LogitRule, Static, TokenSet, TokenSpec
from kestrel.testing.capture import CaptureGuard
from kestrel.types import Token

V = 17
SPEC = TokenSpec(vocab_size=V, hidden_size=3, max_positions=64)
CPU = torch.device("cpu")


def resolve(decoding: Decoding | None = None, **values: object) -> SamplingParams:
    return SamplingParams.resolve(Settings.from_mapping(values), decoding or Decoding(), SPEC)


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.fixture(params=[True, False], ids=["on the host", "on a device"])
def place(request, monkeypatch):
    """Where rows are drawn: on the host, as for a CPU, or with the operations of an accelerator."""
    start = Sampler.__init__

    def begin(self, *args):
        start(self, *args, branch_free=not request.param)

    monkeypatch.setattr(Sampler, "__init__", begin)


def run(params: SamplingParams, steps: int = 8, *, seed: int = 5, choice: int = 0, table=None) -> list[int]:
    """Ids of one sequence alone, in row 0."""
    sampler = Sampler(SPEC, 1, CPU)
    sampler.set_row(0, params, seed=seed, choice=choice)
    rows = torch.tensor([0])
    return [
        int(sampler.sample(logits(step) if table is None else table, [0], rows).ids) for step in range(steps)
    ]


def greedy(steps: int = 8) -> list[int]:
    return [int(logits(step).argmax()) for step in range(steps)]


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0}, {"temperature": 0, "top_k": 3}, {"logprobs": True}]
)
def test_temperature_0_takes_the_lowest_id_of_equal_logits(values):
    tied = torch.zeros(1, V)
    tied[0, [4, 9, 12]] = 2.5

    assert run(resolve(**values), 2, table=tied) == [4, 4]


@pytest.mark.parametrize(
    "values", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-30}, {"temperature": 1e-5}]
)
@pytest.mark.usefixtures("place")
def test_a_filter_that_leaves_one_token_is_greedy(values):
    assert run(resolve(**{"temperature": 1.5, **values})) == greedy()


@pytest.mark.usefixtures("place")
def test_tiny_top_p_takes_the_lowest_id_of_equal_logits():
    tied = torch.zeros(1, V)
    tied[0, [4, 9, 12]] = 2.5

    assert run(resolve(temperature=1.0, top_p=1e-9), 6, table=tied) == [4] * 6


@pytest.mark.parametrize(
    "values", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": V}, {"top_k": 10**9}, {"min_p": 0.0}]
)
@pytest.mark.usefixtures("place")
def test_filters_that_are_off_change_no_draw(values):
    assert run(resolve(temperature=1.5, **values), 40) == run(resolve(temperature=1.5), 40)


@pytest.mark.usefixtures("place")
def test_top_k_keeps_exactly_k_tokens_when_logits_tie():
    drawn = run(resolve(temperature=1.0, top_k=3), 200, table=torch.zeros(1, V))

    assert set(drawn) == {0, 1, 2}


@pytest.mark.usefixtures("place")
def test_top_p_keeps_the_token_that_crosses_it():
    table = torch.full((1, V), -50.0)
    table[0, :3] = torch.tensor([0.5, 0.3, 0.2]).log()

    drawn = run(resolve(temperature=1.0, top_p=0.6), 300, table=table)

    assert set(drawn) == {0, 1}


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, V),
        ({"top_k": 5}, 5),
        ({"top_p": 0.7}, None),
        ({"min_p": 0.1}, None),
        ({"top_k": 6, "top_p": 0.8}, None),
    ],
)
@pytest.mark.usefixtures("place")
def test_draws_follow_the_filtered_distribution(values, kept):
    temperature, num_rows, steps = 1.3, 200, 20
    sampler = Sampler(SPEC, num_rows, CPU)
    params = resolve(temperature=temperature, **values)
    for row in range(num_rows):
        sampler.set_row(row, params, seed=row)
    table = logits(3)

    rows, draws = torch.arange(num_rows), num_rows * steps
    ids = torch.cat(
        [sampler.sample(table.expand(num_rows, V), range(num_rows), rows).ids for _ in range(steps)]
    )

    expected = filtered(table[0].double(), temperature, **values)
    if kept is not None:
        assert int((expected > 0).sum()) == kept
    counts = torch.bincount(ids, minlength=V).double()
    assert counts[expected == 0].sum() == 0
    there = expected > 0
    chi_square = ((counts - draws * expected)[there] ** 2 / (draws * expected[there])).sum().item()
    freedom = int(there.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations; the seeds are fixed


def filtered(values, temperature, top_k=0, top_p=1.0, min_p=0.0):
    order = values.sort(descending=True).indices
    order = order[:top_k] if top_k else order
    mass = (values[order] / temperature).softmax(0)
    keep = (mass.cumsum(0) - mass <= top_p) & (mass >= min_p * mass.max())
    out = torch.zeros(len(values), dtype=torch.float64)
    out[order[keep]] = mass[keep] / mass[keep].sum()
    return out


def test_a_seed_repeats_its_draws_and_another_does_not():
    params = resolve(temperature=2.0)

    assert run(params, 20, seed=1) == run(params, 20, seed=1)
    assert run(params, 20, seed=1) != run(params, 20, seed=2)
    assert run(params, 20, seed=1) != run(params, 20, seed=1 + 2**40)


def test_choices_of_one_seed_draw_independently():
    params = resolve(temperature=2.0)

    assert run(params, 20, choice=0) != run(params, 20, choice=1)


def test_a_rows_result_is_bitwise_the_same_alone_and_among_neighbours():
    kinds = [
        resolve(temperature=0.9, top_p=0.8, logprobs=True, top_logprobs=5),
        resolve(),
        resolve(temperature=1.2, top_k=4, repetition_penalty=1.3, frequency_penalty=0.4),
        resolve(Decoding(rules=(Static(allowed=TokenSet.span(2, 9)),)), temperature=1.0, min_p=0.02),
        resolve(logit_bias={3: 4.0}, presence_penalty=1.0, logprobs=True),
    ]
    together = Sampler(SPEC, 8, CPU)
    places = [6, 1, 0, 7, 3]
    alone = [Sampler(SPEC, 8, CPU) for _ in kinds]
    for row, (place, params) in enumerate(zip(places, kinds, strict=True)):
        together.set_row(place, params, seed=100 + row, prompt_ids=[1, 2])
        alone[row].set_row(2, params, seed=100 + row, prompt_ids=[1, 2])
    for step in range(12):
        table = logits(step, len(kinds))
        batch = together.sample(table, places, torch.tensor(places))
        for row, sampler in enumerate(alone):
            single = sampler.sample(table[row : row + 1], [2], torch.tensor([2]))
            assert torch.equal(batch.ids[row], single.ids[0])
            if single.logprob is not None and kinds[row].logprobs:
                assert torch.equal(batch.logprob[row], single.logprob[0])
                count = kinds[row].top_logprobs
                assert torch.equal(batch.top_ids[row, :count], single.top_ids[0, :count])
                assert torch.equal(batch.top_logprobs[row, :count], single.top_logprobs[0, :count])


def test_replay_continues_a_preempted_row_with_identical_draws():
    automaton = Automaton(
        classes=(TokenSet.span(0, 8),), next=((1, 0), (0, 1)), mask=(TokenSet.all(), TokenSet.span(3, 15))
    )
    params = resolve(
        Decoding(rules=(automaton, Static(allowed=TokenSet.of([5]).but(), first=3, last=7))),
        temperature=1.4, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=4, stop_token_ids=[2],
    )  # fmt: skip
    whole = run(params, 10)
    sampler = Sampler(SPEC, 4, CPU)

    sampler.set_row(3, params, seed=5, history=[Token(i) for i in whole[:6]])

    rest = [int(sampler.sample(logits(step), [3], torch.tensor([3])).ids) for step in range(6, 10)]
    assert rest == whole[6:]


def test_forced_tokens_advance_a_row_like_sampled_ones():
    automaton = Automaton(
        classes=(TokenSet.of([7]),), next=((1, 0), (1, 1)), mask=(TokenSet.all(), TokenSet.of([9]))
    )
    params = resolve(Decoding(rules=(automaton,)), temperature=1.0, frequency_penalty=0.3)
    forced, replayed = Sampler(SPEC, 2, CPU), Sampler(SPEC, 2, CPU)
    forced.set_row(0, params, seed=4)
    replayed.set_row(1, params, seed=4, history=[Token(3), Token(7)])

    forced.force(0, [3, 7])

    first = forced.sample(logits(), [0], torch.tensor([0]))
    assert int(first.ids) == 9
    assert torch.equal(first.ids, replayed.sample(logits(), [1], torch.tensor([1])).ids)


def test_every_stop_id_stops_and_ignore_eos_leaves_the_callers_own():
    decoding = Decoding(stop_ids=frozenset({3, 11}))
    sampler = Sampler(SPEC, 4, CPU)
    sampler.set_row(0, resolve(decoding), seed=0)
    sampler.set_row(1, resolve(decoding, stop_token_ids=[6]), seed=0)
    sampler.set_row(2, resolve(decoding, stop_token_ids=[6], ignore_eos=True), seed=0)
    rows = torch.tensor([0, 1, 2])
    stops = {}
    for token in (3, 6, 11, 8):
        table = torch.zeros(3, V)
        table[:, token] = 5.0
        stops[token] = sampler.sample(table, [0, 1, 2], rows).stopped.tolist()

    assert stops == {
        3: [True, True, False], 6: [False, True, True], 11: [True, True, False], 8: [False, False, False],
    }  # fmt: skip


def test_min_tokens_bans_stop_ids_until_it_is_reached():
    table = torch.zeros(1, V)
    table[0, 3], table[0, 8] = 5.0, 4.0

    ids = run(resolve(Decoding(stop_ids=frozenset({3})), min_tokens=2), 4, table=table)

    assert ids == [8, 8, 3, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": True}])
def test_non_finite_logits_fail_their_row_alone(bad, values):
    sampler = Sampler(SPEC, 3, CPU)
    for row in range(3):
        sampler.set_row(row, resolve(**values), seed=row)
    clean = sampler.sample(logits(1, 3), [0, 1, 2], torch.arange(3)).ids
    for row in range(3):
        sampler.set_row(row, resolve(**values), seed=row)
    table = logits(1, 3)
    table[1, 6] = bad

    sampled = sampler.sample(table, [0, 1, 2], torch.arange(3))

    assert sampled.status.tolist() == [RowStatus.OK, RowStatus.NON_FINITE, RowStatus.OK]
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.ids[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert 0 <= int(sampled.ids[1]) < V


def test_a_model_may_mask_part_of_its_own_vocabulary():
    table = logits(2)
    table[0, 8:] = -math.inf

    assert run(resolve(), 1, table=table) == [int(table.argmax())]
    assert max(run(resolve(temperature=3.0), 50, table=table)) < 8


def test_logprobs_are_those_before_temperature_and_after_masks():
    table = logits(4)
    params = resolve(
        Decoding(rules=(Static(allowed=TokenSet.span(0, 3)),)),
        temperature=0.1,
        logprobs=True,
        top_logprobs=20,
    )
    sampler = Sampler(SPEC, 1, CPU)
    sampler.set_row(0, params, seed=0)

    sampled = sampler.sample(table, [0], torch.tensor([0]))

    want = table[0, :3].log_softmax(0)
    assert float(sampled.logprob[0]) == pytest.approx(float(want[int(sampled.ids)]), abs=1e-6)
    host = token_logprobs(
        float(sampled.logprob[0]), sampled.top_ids[0].tolist(), sampled.top_logprobs[0].tolist(), count=20
    )
    assert [i for i, _ in host.top] == want.sort(descending=True).indices.tolist()
    json.dumps([value for _, value in host.top], allow_nan=False)


AUX_SPEC = TokenSpec(
    vocab_size=V,
    hidden_size=3,
    max_positions=64,
    aux=(
        AuxOutput(name="coordinate", token_id=5, cardinality=4),
        AuxOutput(name="size", token_id=6, cardinality=8, width=2),
    ),
)


def test_aux_bins_are_the_largest_of_the_columns_that_the_id_names():
    sampler = Sampler(AUX_SPEC, 4, CPU)
    params = SamplingParams.resolve(Settings(), Decoding(needs_aux=True), AUX_SPEC)
    for row in range(3):
        sampler.set_row(row, params, seed=0)
    sampler.set_row(3, SamplingParams(), seed=0)  # its neighbours' aux outputs are none of its own
    table = torch.zeros(4, V)
    table[[0, 1, 2, 3], [5, 6, 9, 5]] = 1.0
    bins = torch.zeros(4, 3, 8)
    bins[:, 0, 3], bins[:, 0, 7], bins[:, 1, 6], bins[:, 2, 2] = 1.0, 9.0, 1.0, 1.0

    aux = sampler.sample(table, range(4), torch.arange(4), torch.zeros(4, 3), lambda h, ids: bins).aux

    assert aux.tolist() == [[3, 0, 0], [0, 6, 2], [0, 0, 0], [0, 0, 0]]


def test_a_non_finite_bin_fails_its_row():
    sampler = Sampler(AUX_SPEC, 2, CPU)
    params = SamplingParams.resolve(Settings(), Decoding(needs_aux=True), AUX_SPEC)
    sampler.set_row(0, params, seed=0)
    sampler.set_row(1, params, seed=0)
    table = torch.zeros(2, V)
    table[0, 5], table[1, 9] = 1.0, 1.0
    bins = torch.full((2, 3, 8), math.nan)

    status = sampler.sample(table, [0, 1], torch.arange(2), torch.zeros(2, 3), lambda h, ids: bins).status

    assert status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]


def test_the_scratch_row_may_be_named_many_times():
    sampler = Sampler(SPEC, 2, CPU)
    sampler.set_row(0, resolve(temperature=1.0, frequency_penalty=0.5), seed=9)
    alone = Sampler(SPEC, 2, CPU)
    alone.set_row(0, resolve(temperature=1.0, frequency_penalty=0.5), seed=9)
    for step in range(4):
        table = logits(step, 3)
        padded = sampler.sample(table, [0, 2, 2], torch.tensor([0, 2, 2])).ids[0]
        assert padded == alone.sample(table[:1], [0], torch.tensor([0])).ids[0]


def test_a_row_that_is_taken_again_keeps_nothing_of_its_last_sequence():
    rules = (Static(allowed=TokenSet.of([3])), Host(start=lambda: pytest.fail("the lane starts host rules")))
    sampler = Sampler(SPEC, 2, CPU)
    old = resolve(Decoding(rules=rules, stop_ids=frozenset({1})), presence_penalty=2.0, logit_bias={5: 9.0})
    sampler.set_row(0, old, seed=0)
    sampler.set_host_mask(0, TokenSet.of([3]))
    sampler.sample(logits(), [0], torch.tensor([0]))

    sampler.set_row(0, resolve(presence_penalty=1e-9), seed=0)

    assert int(sampler.sample(logits(), [0], torch.tensor([0])).ids) == int(logits().argmax())
    assert sampler.host_rows() == frozenset()


def test_sampling_leaves_the_models_logits_as_they_are():
    table = logits(1)
    before = table.clone()

    run(resolve(temperature=1.0, top_p=0.5, logit_bias={2: 1.0}, repetition_penalty=1.2), 3, table=table)

    assert torch.equal(table, before)


def test_sampling_can_be_captured_whatever_its_rows_need():
    rules = (
        Static(allowed=TokenSet.span(0, 9), first=1), Host(start=lambda: pytest.fail("the lane starts host rules")),
        Automaton(classes=(TokenSet.of([7]),), next=((1, 0), (0, 1)), mask=(TokenSet.all(), TokenSet.span(0, 9))),
        LogitRule(op="prefer_group", params={"group": TokenSet.span(3, 5)}),
    )  # fmt: skip
    params = SamplingParams.resolve(
        Settings(
            temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
            logit_bias={2: 1.0}, min_tokens=2, stop_token_ids=(4,), logprobs=True,
        ),
        Decoding(rules=rules, needs_aux=True),
        AUX_SPEC,
    )  # fmt: skip
    sampler = Sampler(AUX_SPEC, 2, CPU, branch_free=True)
    sampler.set_row(0, params, seed=0)
    sampler.set_row(1, SamplingParams(), seed=0)
    table, rows, h_NC = logits(0, 2), torch.tensor([0, 1]), torch.zeros(2, 3)

    with CaptureGuard():
        sampled = sampler.sample(table, [0, 1], rows, h_NC, lambda h, ids: torch.zeros(2, 3, 8))

    assert sampled.status.tolist() == [RowStatus.OK, RowStatus.OK]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("settings", [Settings(temperature=0.0), Settings(temperature=1.0, top_p=0.9)])
def test_faults_are_the_same_whether_the_host_may_look_or_not(on_host, settings):
    sampler = Sampler(SPEC, 4, CPU, branch_free=not on_host)
    for row in range(4):
        sampler.set_row(row, SamplingParams.resolve(settings, Decoding(), SPEC), seed=row)
    table = logits(0, 4)
    table[0, 3], table[1, 3], table[2] = torch.nan, torch.inf, -torch.inf

    sampled = sampler.sample(table, [0, 1, 2, 3], torch.arange(4))

    assert sampled.status.tolist() == [RowStatus.NON_FINITE] * 3 + [RowStatus.OK]
    fine = sampler.sample(table[3:], [3], torch.tensor([3]))
    assert fine.status.tolist() == [RowStatus.OK], "what steps share was written to"


@pytest.mark.parametrize(
    "settings",
    [
        Settings(temperature=0.2, top_p=0.9),
        Settings(temperature=1.0, top_p=0.5, top_k=7),
        Settings(temperature=0.7, min_p=0.1),
        Settings(temperature=3.0),
    ],
)
def test_draws_are_the_same_whether_the_host_may_look_or_not(settings):
    drawn = []
    for on_host in (True, False):
        sampler = Sampler(SPEC, 8, CPU, branch_free=not on_host)
        for row in range(8):
            own = settings if row % 3 else Settings(temperature=0.0)
            sampler.set_row(row, SamplingParams.resolve(own, Decoding(), SPEC), seed=row)
        steps = [sampler.sample(2 * logits(i, 8), list(range(8)), torch.arange(8)).ids for i in range(40)]
        drawn.append(torch.stack(steps))

    assert torch.equal(*drawn)
