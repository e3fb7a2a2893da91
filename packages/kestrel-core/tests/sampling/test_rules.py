"""Rules as the sampler applies them: windows, automata, host masks, preferred groups, and nothing left to sample."""

from __future__ import annotations

import pytest
import torch

from kestrel.config import Settings
from kestrel.sampling import RowStatus, Sampler, SamplingParams, intersect
from kestrel.spi import Automaton, Decoding, Host, LogitRule, Static, TokenSet, TokenSpec

V = 17
SPEC = TokenSpec(vocab_size=V, hidden_size=3, max_positions=64)
CPU = torch.device("cpu")


def ruled(*rules, **values: object) -> SamplingParams:
    return SamplingParams.resolve(Settings.from_mapping(values), Decoding(rules=rules), SPEC)


def run(params: SamplingParams, steps: int, table: torch.Tensor) -> list[int]:
    """Greedy ids of one sequence alone over the same logits."""
    sampler = Sampler(SPEC, 1, CPU)
    sampler.set_row(0, params, seed=5)
    return [int(sampler.sample(table, [0], torch.tensor([0])).ids) for _ in range(steps)]


def test_static_windows_open_and_close_by_output_index():
    rules = (
        Static(allowed=TokenSet.of([6]), first=1, last=3),
        Static(allowed=TokenSet.of([4]).but(), first=2),
    )
    table = torch.zeros(1, V)
    table[0, 4] = 5.0

    assert run(ruled(*rules), 5, table) == [4, 6, 6, 0, 0]


def test_a_preferred_group_masks_what_is_outside_it():
    group, unless = TokenSet.span(10, 14), TokenSet.of([0])
    rule = LogitRule(op="prefer_group", params={"group": group, "unless": unless})
    table = torch.full((1, V), -5.0)
    table[0, 10:14], table[0, 5] = 1.0, 2.0  # log-sum-exp of the group 2.39

    assert run(ruled(rule), 1, table) == [10]
    table[0, 5] = 2.5
    assert run(ruled(rule), 1, table) == [5]
    table[0, 5], table[0, 0] = 2.0, 9.0
    assert run(ruled(rule), 1, table) == [0]


def test_more_automata_than_are_kept_come_and_go_while_one_row_stays():
    counts_up = Automaton(
        classes=(), next=((1,), (2,), (0,)), mask=tuple(TokenSet.of([i]) for i in (4, 5, 6))
    )
    sampler = Sampler(SPEC, 2, CPU)
    sampler.set_row(0, ruled(counts_up), seed=0)
    seen = []
    for i in range(90):
        passing = Automaton(classes=(), next=((0,),), mask=(TokenSet.of([i % V]),))
        sampler.set_row(1, ruled(passing), seed=0)
        ids = sampler.sample(torch.zeros(2, V), [0, 1], torch.tensor([0, 1])).ids.tolist()
        assert ids[1] == i % V
        seen.append(ids[0])
        sampler.clear_row(1)

    assert seen == [4, 5, 6] * 30


def test_host_rows_take_the_mask_they_are_given():
    rule = Host(start=lambda: pytest.fail("the lane starts host rules"))
    sampler = Sampler(SPEC, 2, CPU)
    sampler.set_row(0, ruled(rule), seed=0)
    sampler.set_row(1, ruled(), seed=0)
    table = torch.zeros(2, V)
    assert sampler.host_rows() == {0}

    sampler.set_host_mask(0, TokenSet.of([7, 8]))
    first = sampler.sample(table, [0, 1], torch.tensor([0, 1])).ids.tolist()
    sampler.set_host_mask(0, TokenSet.span(0, 12).but())
    second = sampler.sample(table, [0, 1], torch.tensor([0, 1])).ids.tolist()

    assert (first, second) == ([7, 0], [12, 0])
    sampler.clear_row(0)
    assert sampler.host_rows() == frozenset()


def test_masks_without_a_common_id_have_a_status_of_their_own():
    rules = (Static(allowed=TokenSet.of([3])), Static(allowed=TokenSet.of([4])))
    sampler = Sampler(SPEC, 2, CPU)
    sampler.set_row(0, ruled(*rules, temperature=1.0), seed=0)
    sampler.set_row(1, ruled(), seed=0)

    sampled = sampler.sample(torch.zeros(2, V), [0, 1], torch.tensor([0, 1]))

    assert sampled.status.tolist() == [RowStatus.EMPTY_MASK, RowStatus.OK]
    assert "leave no token" in RowStatus.EMPTY_MASK.problem


def test_intersect_keeps_what_every_set_holds():
    sets = [TokenSet.span(2, 9), TokenSet.of([4, 5, 11]).but(), TokenSet.span(3, 30)]

    assert intersect(sets, V) == TokenSet(((3, 4), (6, 9)))
    assert intersect([], V) == TokenSet(((0, V),))
