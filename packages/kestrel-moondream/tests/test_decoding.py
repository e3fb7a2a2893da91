import pytest

from kestrel.spi import Automaton, Continue, Force, Static
from kestrel.types import Token
from kestrel_moondream.config import TokenizerConfig
from kestrel_moondream.decoding import AnswerDecodings

EOS, ANSWER, COORD, SIZE = 0, 3, 5, 6


@pytest.fixture(scope="module")
def decodings():
    return AnswerDecodings(TokenizerConfig())


def allowed(automaton: Automaton, history, vocabulary=range(20)):
    """The ids of ``vocabulary`` that may follow ``history``."""
    state = automaton.start
    for token_id in history:
        assert token_id in automaton.mask[state], f"{token_id} was not allowed"
        classes = [k for k, ids in enumerate(automaton.classes) if token_id in ids]
        state = automaton.next[state][classes[0] if classes else len(automaton.classes)]
    return {i for i in vocabulary if i in automaton.mask[state]}


def test_answers_suppress_the_answer_id_from_the_second_token_on(decodings):
    decoding = decodings.text()
    (rule,) = decoding.rules
    assert isinstance(rule, Static)
    assert (rule.first, rule.last) == (1, None)
    assert ANSWER not in rule.allowed
    assert EOS in rule.allowed
    assert decoding.stop_ids == {EOS}
    assert not decoding.needs_aux


def test_pointing_compares_the_coordinate_with_the_end_only_before_a_point(decodings):
    (loop,) = decodings.objects("point", 7).rules
    assert allowed(loop, []) == {EOS, COORD}
    assert allowed(loop, [COORD]) == {COORD}
    assert allowed(loop, [COORD, COORD]) == {EOS, COORD}


def test_detecting_forces_x_y_and_size(decodings):
    (loop,) = decodings.objects("detect", 7).rules
    assert allowed(loop, []) == {EOS, COORD}
    assert allowed(loop, [COORD]) == {COORD}
    assert allowed(loop, [COORD, COORD]) == {SIZE}
    assert allowed(loop, [COORD, COORD, SIZE]) == {EOS, COORD}


@pytest.mark.parametrize(("skill", "tokens"), [("point", 14), ("detect", 21)])
def test_objects_end_after_the_last_whole_one(decodings, skill, tokens):
    decoding = decodings.objects(skill, 7)
    assert decoding.max_tokens == tokens
    assert decoding.needs_aux


def test_rules_are_shared_between_requests(decodings):
    assert decodings.objects("point", 3).rules[0] is decodings.objects("point", 9).rules[0]
    assert decodings.text().rules[0] is decodings.text().rules[0]
    assert decodings.reasoning().rules[0] is decodings.reasoning(5).rules[0]


def test_reasoning_suppresses_the_end_and_sizes_from_its_second_token_on(decodings):
    (rule,) = decodings.reasoning().rules
    everything = set(range(20))
    assert allowed(rule, []) == everything
    assert allowed(rule, [10]) == everything - {EOS, SIZE}
    assert allowed(rule, [10, COORD, COORD]) == everything - {EOS, SIZE}


def test_the_answer_id_after_reasoning_is_doubled_and_then_suppressed(decodings):
    (rule,) = decodings.reasoning().rules
    everything = set(range(20))
    for thought in ([], [10], [10, 7, COORD, COORD, 9]):
        assert allowed(rule, [*thought, ANSWER]) == {ANSWER}
        assert allowed(rule, [*thought, ANSWER, ANSWER]) == everything
        assert allowed(rule, [*thought, ANSWER, ANSWER, 12]) == everything - {ANSWER}
        assert allowed(rule, [*thought, ANSWER, ANSWER, 12, 13]) == everything - {ANSWER}


def test_a_reasoning_budget_closes_the_reasoning_and_still_answers(decodings):
    decoding = decodings.reasoning(3)
    (make,) = decoding.acceptors
    acceptor = make()
    assert acceptor.may_force
    assert [acceptor.accept(Token(i)) for i in (10, 11)] == [Continue(), Continue()]
    assert acceptor.accept(Token(12)) == Force((ANSWER, ANSWER))
    assert [acceptor.accept(Token(i)) for i in (ANSWER, ANSWER, 13, 14, 15, 16)] == [Continue()] * 6
    assert allowed(decoding.rules[0], [10, 11, 12, ANSWER, ANSWER]) == set(range(20))


def test_a_reasoning_budget_leaves_a_model_that_closed_alone(decodings):
    (make,) = decodings.reasoning(3).acceptors
    acceptor = make()
    assert [acceptor.accept(Token(i)) for i in (10, ANSWER, ANSWER, 11, 12, 13)] == [Continue()] * 6


def test_a_reasoning_budget_of_zero_answers_at_once(decodings):
    decoding = decodings.reasoning(0)
    (rule,) = decoding.rules
    assert not decoding.acceptors
    assert allowed(rule, []) == {ANSWER}
    assert allowed(rule, [ANSWER]) == {ANSWER}
    assert allowed(rule, [ANSWER, ANSWER]) == set(range(20))
