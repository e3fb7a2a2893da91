"""How one sequence is sampled: its settings and its family's ``Decoding``, resolved and checked against the model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag, auto
from typing import TypeVar

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError
from kestrel.sampling.ranges import banned_ranges
from kestrel.spi.decoding import Automaton, Decoding, Host, LogitRule, Static
from kestrel.spi.driver import TokenSpec

__all__ = ["ALWAYS", "Bias", "Needs", "SamplingParams"]

Num = TypeVar("Num", int, float)

Bias = tuple[int, float, int, int]

ALWAYS = 2**62  # an output index that no sequence reaches
FEW = 64  # ids that are cheaper to ban one by one than by a mask over the vocabulary
GREEDY_BELOW = 1e-6  # float32 cannot divide logits by less without overflow
PENALTY_BOUNDS = (0.01, 100.0)  # outside, a penalised logit may leave float32


class Needs(IntFlag):
    """The stages that a row takes part in; a step runs those that any of its rows needs."""

    NONE = 0
    PENALTIES = auto()
    BIAS = auto()
    STATIC = auto()
    AUTOMATA = auto()
    HOST = auto()
    LOGIT_RULES = auto()
    LOGPROBS = auto()
    DRAW = auto()
    SORT = auto()
    MIN_P = auto()
    AUX = auto()
    STOP = auto()
    TOP_LOGPROBS = auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingParams:
    """One row's parameters. ``top_k`` 0 and ``top_p`` 1 are off; ``temperature`` 0 is greedy, lowest id on ties.

    ``biases`` are added to logits: (id, value, first output index, last, excluded). They hold the caller's own, and
    as −inf the bans of Static rules that leave out a few ids, stop ids before ``min_tokens`` among them. ``statics``
    are the other Static rules. ``max_tokens`` None means to the end of the context.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    biases: tuple[Bias, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    statics: tuple[Static, ...] = ()
    automata: tuple[Automaton, ...] = ()
    logit_rules: tuple[LogitRule, ...] = ()
    hosts: tuple[Host, ...] = ()
    needs_aux: bool = False

    @classmethod
    def resolve(cls, settings: Settings, decoding: Decoding, spec: TokenSpec) -> SamplingParams:
        """Parameters of a request; InvalidRequestError for ids outside the vocabulary and for extreme penalties."""
        _check_ids("stop_token_ids", settings.stop_token_ids, spec.vocab_size)
        _check_ids("logit_bias", settings.logit_bias, spec.vocab_size)
        _check_ids("the skill's stop ids", decoding.stop_ids, spec.vocab_size)
        _check_penalty(settings.repetition_penalty)
        for rule in decoding.rules:
            if isinstance(rule, LogitRule) and rule.op != "prefer_group":
                raise InvalidRequestError(f"unknown logit rule {rule.op!r}. Choices: prefer_group")
        stop_ids = frozenset(settings.stop_token_ids) | (
            frozenset() if settings.ignore_eos else decoding.stop_ids
        )
        statics, bans = _split([r for r in decoding.rules if isinstance(r, Static)], spec.vocab_size)
        early = (
            [(i, -math.inf, 0, settings.min_tokens) for i in sorted(stop_ids)] if settings.min_tokens else []
        )
        own = [(i, value, 0, ALWAYS) for i, value in sorted(settings.logit_bias.items())]
        temperature, top_k = _or(settings.temperature, 0.0), _or(settings.top_k, 0)
        return cls(
            temperature=0.0 if decoding.greedy or temperature < GREEDY_BELOW else temperature,
            top_k=top_k if top_k < spec.vocab_size else 0,
            top_p=_or(settings.top_p, 1.0),
            min_p=_or(settings.min_p, 0.0),
            repetition_penalty=_or(settings.repetition_penalty, 1.0),
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            biases=(*own, *bans, *early),
            stop_ids=stop_ids,
            min_tokens=settings.min_tokens,
            max_tokens=_least(settings.max_tokens, decoding.max_tokens),
            logprobs=settings.logprobs,
            top_logprobs=min(settings.top_logprobs, spec.vocab_size),
            statics=tuple(statics),
            automata=tuple(rule for rule in decoding.rules if isinstance(rule, Automaton)),
            logit_rules=tuple(rule for rule in decoding.rules if isinstance(rule, LogitRule)),
            hosts=tuple(rule for rule in decoding.rules if isinstance(rule, Host)),
            needs_aux=decoding.needs_aux,
        )

    @property
    def needs(self) -> Needs:
        """The stages that this row takes part in."""
        draws = self.temperature > 0
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        facts = {
            Needs.PENALTIES: penalised,
            Needs.BIAS: bool(self.biases),
            Needs.STATIC: bool(self.statics),
            Needs.AUTOMATA: bool(self.automata),
            Needs.HOST: bool(self.hosts),
            Needs.LOGIT_RULES: bool(self.logit_rules),
            Needs.LOGPROBS: self.logprobs,
            Needs.DRAW: draws,
            Needs.SORT: draws and (self.top_k > 0 or self.top_p < 1),
            Needs.MIN_P: draws and self.min_p > 0,
            Needs.AUX: self.needs_aux,
            Needs.STOP: bool(self.stop_ids),
            Needs.TOP_LOGPROBS: self.logprobs and self.top_logprobs > 0,
        }
        needs = Needs.NONE
        for stage, wanted in facts.items():
            if wanted:
                needs |= stage
        return needs


def _split(rules: Iterable[Static], vocab_size: int) -> tuple[list[Static], list[Bias]]:
    """Rules that need a mask over the vocabulary, and the bans of the others as biases."""
    wide, bans = [], []
    for rule in rules:
        ranges = banned_ranges(rule.allowed, vocab_size)
        if sum(end - start for start, end in ranges) > FEW:
            wide.append(rule)
            continue
        last = ALWAYS if rule.last is None else rule.last
        bans += [(i, -math.inf, rule.first, last) for start, end in ranges for i in range(start, end)]
    return wide, bans


def _or(value: Num | None, default: Num) -> Num:
    return default if value is None else value


def _least(a: int | None, b: int | None) -> int | None:
    given = [value for value in (a, b) if value is not None]
    return min(given) if given else None


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise InvalidRequestError(
            f"{name} names token {outside[0]}, outside this model's vocabulary; use ids from 0 to {vocab_size - 1}"
        )


def _check_penalty(value: float | None) -> None:
    low, high = PENALTY_BOUNDS
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(
            f"repetition_penalty is {value}; it must be from {low:g} to {high:g} (1 is off)"
        )
