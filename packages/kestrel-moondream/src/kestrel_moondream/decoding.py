"""How Moondream's answers are decoded: suppressed ids, the reasoning automaton, the point and detect loops."""

from __future__ import annotations

from collections.abc import Callable

from kestrel.skills import ReasoningBudget
from kestrel.spi import Acceptor, Automaton, Decoding, Static, TokenSet
from kestrel_moondream.config import TokenizerConfig

__all__ = ["AnswerDecodings"]

BIN_TOKENS = {"point": 2, "detect": 3}  # x, y and, for a box, its size


class AnswerDecodings:
    """Decodings of one loaded model. Their rules are built once, since the sampler keeps a copy of each."""

    def __init__(self, ids: TokenizerConfig) -> None:
        self._ids = ids
        self._stop = frozenset({ids.eos_id})
        self._no_answer_id = Static(allowed=TokenSet.of([ids.answer_id]).but(), first=1)
        self._reasoning = _reasoning_automaton(ids, at_once=False)
        self._no_reasoning = _reasoning_automaton(ids, at_once=True)
        box = [ids.coord_id, ids.coord_id, ids.size_id]
        self._loops = {"point": _loop(box[:2], ids), "detect": _loop(box, ids)}

    def text(self) -> Decoding:
        """An answer or caption: the answer id is suppressed from the second token on."""
        return Decoding(rules=(self._no_answer_id,), stop_ids=self._stop)

    def raw(self) -> Decoding:
        """A raw continuation: nothing is suppressed."""
        return Decoding(stop_ids=self._stop)

    def reasoning(self, max_reasoning_tokens: int | None = None) -> Decoding:
        """Reasoning, the answer opener, then the answer. At most ``max_reasoning_tokens`` ids are reasoning."""
        if max_reasoning_tokens == 0:
            return Decoding(rules=(self._no_reasoning,), stop_ids=self._stop, needs_aux=True)
        acceptors: tuple[Callable[[], Acceptor], ...] = ()
        if max_reasoning_tokens is not None:
            closing = (self._ids.answer_id, *self._ids.answer_opener)
            acceptors = (lambda: ReasoningBudget(max_reasoning_tokens, closing),)
        return Decoding(rules=(self._reasoning,), stop_ids=self._stop, needs_aux=True, acceptors=acceptors)

    def objects(self, skill: str, max_objects: int) -> Decoding:
        """The loop of ``skill`` ("point" or "detect"); it ends with "length" after ``max_objects`` objects."""
        limit = max_objects * BIN_TOKENS[skill]
        return Decoding(rules=(self._loops[skill],), stop_ids=self._stop, needs_aux=True, max_tokens=limit)


def _loop(steps: list[int], ids: TokenizerConfig) -> Automaton:
    """Before an object only its first id and EOS compete; the ids after it are the only choice."""
    eos, others = len(set(steps)), len(set(steps)) + 1
    classes = [TokenSet.of([i]) for i in dict.fromkeys(steps)] + [TokenSet.of([ids.eos_id])]
    next_states = []
    for state in range(len(steps)):
        following = [(state + 1) % len(steps)] * (others + 1)
        following[eos] = 0
        next_states.append(following)
    masks = [TokenSet.of([steps[0], ids.eos_id]), *(TokenSet.of([i]) for i in steps[1:])]
    return Automaton(classes=tuple(classes), next=next_states, mask=masks)


def _reasoning_automaton(ids: TokenizerConfig, *, at_once: bool) -> Automaton:
    """States: first token, reasoning, opener (its only choice is the answer id), first answer token, answer.

    The sampled answer id and the opener together make the doubled id of the plain query template. Suppressions
    start with the second token of each phase, as in the published code. ``at_once`` closes before any reasoning.
    """
    assert ids.answer_opener == (ids.answer_id,), "the automaton has one opener state"
    first, reasoning, opener, first_answer, answer, close = range(6)
    answer_id = TokenSet.of([ids.answer_id])
    return Automaton(
        classes=(answer_id,),
        next=[
            [opener, reasoning],
            [opener, reasoning],
            [first_answer, first_answer],
            [answer, answer],
            [answer, answer],
            [opener, opener],
        ],
        mask=[
            TokenSet.all(),
            TokenSet.of([ids.eos_id, ids.size_id]).but(),
            answer_id,
            TokenSet.all(),
            answer_id.but(),
            answer_id,
        ],
        start=close if at_once else first,
    )
