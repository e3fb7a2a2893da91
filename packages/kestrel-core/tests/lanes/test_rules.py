"""The host's say: forced tokens, ends, grammars."""

import pytest

from kestrel.errors import ModelFaultError, ModelOutputError, PluginError
from kestrel.spi.decoding import (
    Acceptor,
    Automaton,
    Continue,
    Decoding,
    Finish,
    Force,
    Host,
    HostMask,
    TokenSet,
)
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import FakeTokenDriver, ToyHybrid
from kestrel.types import Layout


def counting():
    return FakeTokenDriver(follows=lambda i: (i + 1) % 256)


class Script(Acceptor):
    """Answers a token id with what the script says."""

    def __init__(self, script, may_force=True):
        self.script, self.may_force, self.seen = script, may_force, []

    def accept(self, token):
        self.seen.append(token.id)
        answer = self.script.get(token.id, Continue())
        if isinstance(answer, Exception):
            raise answer
        return answer


def scripted(script, **more):
    acceptor = Script(script, more.pop("may_force", True))
    return Decoding(acceptors=(lambda: acceptor,), **more), acceptor


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_ids_replace_the_sample_and_are_seen_in_order(depth):
    decoding, acceptor = scripted({12: Force((100, 101))})
    outcome = Bench(counting(), depth=depth).generate([10], max_tokens=6, decoding=decoding)
    assert outcome.ids == [11, 12, 100, 101, 102, 103]
    assert acceptor.seen == outcome.ids


@pytest.mark.parametrize("depth", [1, 2])
def test_what_follows_forced_ids_is_what_the_model_says_after_them(depth):
    driver = ToyHybrid(3)
    prompt = (4, 5, 6, 7)
    first = Expected(driver).ids(Layout(tokens=prompt), 1)
    decoding, _ = scripted({first[0]: Force((20, 21, 22))})
    bench = Bench(driver, depth=depth)
    other = bench.submit([9, 9], max_tokens=9)
    work_id = bench.submit(prompt, max_tokens=5, decoding=decoding)
    bench.run()
    forced = (*prompt, first[0], 20, 21, 22)
    assert bench.outcomes[work_id].ids == [
        *first,
        20,
        21,
        22,
        *Expected(driver).ids(Layout(tokens=forced), 1),
    ]
    assert bench.outcomes[other].ids == Expected(driver).ids(Layout(tokens=(9, 9)), 9)


def test_a_forced_stop_id_ends_the_row():
    decoding, _ = scripted({12: Force((50, 60, 70))}, stop_ids=frozenset({60}))
    outcome = Bench(counting()).generate([10], max_tokens=9, decoding=decoding)
    assert outcome.ids == [11, 12, 50, 60]
    assert outcome.finished.finish_reason == "stop"


def test_forced_ids_count_against_max_tokens():
    decoding, _ = scripted({12: Force((50, 60, 70))})
    outcome = Bench(counting()).generate([10], max_tokens=4, decoding=decoding)
    assert outcome.ids == [11, 12, 50, 60]
    assert outcome.finished.finish_reason == "length"


def test_a_force_while_forcing_replaces_what_was_left():
    decoding, _ = scripted({12: Force((50, 60, 70)), 50: Force((90,))})
    outcome = Bench(counting()).generate([10], max_tokens=6, decoding=decoding)
    assert outcome.ids == [11, 12, 50, 90, 91, 92]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_acceptor_ends_its_row_with_its_reason(depth):
    decoding, _ = scripted({13: Finish("length")}, may_force=False)
    bench = Bench(counting(), depth=depth)
    outcome = bench.generate([10], max_tokens=50, decoding=decoding)
    assert outcome.ids == [11, 12, 13]
    assert outcome.finished.finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_that_the_host_ended_is_continued_rightly(depth):
    driver = ToyHybrid(3)
    prompt = (4, 5, 6, 7)
    ids = Expected(driver).ids(Layout(tokens=prompt), 6)
    decoding, _ = scripted({ids[-1]: Finish()}, may_force=False)
    bench = Bench(driver, depth=depth)
    first = bench.generate(prompt, max_tokens=20, decoding=decoding)
    again = (*prompt, *first.ids, 9)
    assert bench.generate(again).ids == Expected(driver).ids(Layout(tokens=again), 8)


def test_a_row_that_may_be_forced_never_has_two_steps_in_flight():
    decoding, _ = scripted({})
    bench = Bench(counting(), depth=2)
    gated = bench.submit([10], max_tokens=12, decoding=decoding)
    free = bench.submit([100], max_tokens=30)
    while not bench.outcomes[gated].ended:
        bench.tick()
        assert len(bench.lane.in_flight) <= 1
        assert bench.outcomes[gated].ended or not any(
            step.decode and any(seq.id == gated for seq in step.decode.members)
            for step in bench.lane.in_flight
        )
    bench.run()
    assert len(bench.outcomes[free].ids) == 30


@pytest.mark.parametrize(
    ("error", "seen"),
    [(ZeroDivisionError("oops"), ModelFaultError), (ModelOutputError("bad"), ModelOutputError)],
)
def test_a_failing_acceptor_fails_its_own_work(error, seen):
    decoding, _ = scripted({12: error})
    bench = Bench(counting())
    bad = bench.submit([10], decoding=decoding)
    good = bench.submit([100])
    bench.run()
    assert isinstance(bench.outcomes[bad].error, seen)
    assert bench.outcomes[bad].ids == [11, 12]
    assert len(bench.outcomes[good].ids) == 8


class EvenUntil(HostMask):
    """Even ids only; nothing at all after ``last``."""

    def __init__(self, last=None):
        self.last, self.ended, self.accepted = last, False, []

    def allowed(self):
        return TokenSet.of(() if self.ended else range(0, 256, 2))

    def accept(self, token_id):
        self.accepted.append(token_id)
        self.ended = token_id == self.last


@pytest.mark.parametrize("depth", [1, 2])
def test_a_host_rule_masks_by_the_true_history(depth):
    mask = EvenUntil()
    decoding = Decoding(rules=(Host(start=lambda: mask),))
    bench = Bench(counting(), depth=depth)
    free = bench.submit([30], max_tokens=5)
    work_id = bench.submit([10], max_tokens=5, decoding=decoding)
    bench.run()
    outcome = bench.outcomes[work_id]
    assert len(outcome.ids) == 5
    assert all(i % 2 == 0 for i in outcome.ids)
    assert mask.accepted == outcome.ids
    assert bench.outcomes[free].ids == [31, 32, 33, 34, 35]


def test_a_grammar_that_allows_nothing_fails_closed():
    bench = Bench(counting())
    decoding = Decoding(rules=(Host(start=lambda: EvenUntil(last=0)),))
    outcome = bench.generate([10], max_tokens=5, decoding=decoding)
    assert isinstance(outcome.error, ModelFaultError)
    assert "rules" in str(outcome.error)


def test_a_grammar_that_cannot_start_fails_its_own_work():
    class Broken(EvenUntil):
        def allowed(self):
            raise ValueError("no grammar")

    bench = Bench(counting())
    bad = bench.submit([10], decoding=Decoding(rules=(Host(start=Broken),)))
    good = bench.submit([20])
    bench.run()
    assert isinstance(bench.outcomes[bad].error, ModelFaultError)
    assert len(bench.outcomes[good].ids) == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_rules_survive_preemption(depth):
    low, high = TokenSet.span(4, 18), TokenSet.span(18, 32)
    rule = Automaton(classes=(low, high), next=((1, 1, 1), (2, 2, 2), (0, 0, 0)), mask=(low, high, low))
    driver = ToyHybrid(3, window=None)
    alone = Bench(driver, depth=depth).generate([4, 5], max_tokens=24, decoding=Decoding(rules=(rule,)))
    bench = Bench(driver, depth=depth, pages=13, head_start=1)
    works = []
    for _ in range(3):
        mask = EvenUntil()
        works.append((bench.submit([4, 5], max_tokens=24, decoding=Decoding(rules=(rule,))), mask))
        hosted = Decoding(rules=(rule, Host(start=lambda mask=mask: mask)))
        works.append((bench.submit([4, 5], max_tokens=24, decoding=hosted), mask))
    bench.run()
    assert bench.lane.stats()["preemptions"] > 0
    plain = [bench.outcomes[i].ids for i, mask in works if not mask.accepted or i % 2]
    assert plain == [alone.ids] * 3
    ruled = [bench.outcomes[i].ids for i, _ in works if i % 2 == 0]
    assert ruled[0] == ruled[1] == ruled[2]
    assert all(i % 2 == 0 for i in ruled[0])


def test_a_forced_id_outside_the_vocabulary_fails_its_own_work():
    decoding, _ = scripted({12: Force((13, 256))})
    bench = Bench(counting())
    bad, good = bench.submit([10], decoding=decoding), bench.submit([20], max_tokens=4)
    bench.run()
    assert isinstance(bench.outcomes[bad].error, PluginError)
    assert "token 256" in str(bench.outcomes[bad].error)
    assert bench.outcomes[good].ids == [21, 22, 23, 24]


@pytest.mark.parametrize("change", [{"next": [[2]]}, {"next": [[-1]]}, {"start": 1}, {"next": [[0, 0]]}])
def test_an_automaton_that_leads_nowhere_is_refused_when_it_is_made(change):
    whole = {"classes": (), "next": [[0]], "mask": [TokenSet.all()]}
    Automaton(**whole)
    with pytest.raises(ValueError, match="state"):
        Automaton(**{**whole, **change})
