"""What the device keeps for sampling, by row: settings, rules, and how far each row is. The sampling ops read it.

Shapes: R rows, K entries of a list, A automata of a row or of all, S states of all automata, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["COUNT", "SEEN", "AutomatonTables", "RowList", "SampleTables"]

SEEN = 1 << 30  # bit of a count: the token is part of the prompt
COUNT = SEEN - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowList:
    """A list of D-tuples per row: int64 ``items_RKD``, of which the first ``length_R`` count.

    The rest is padding that changes nothing, so whoever takes all K need not look at the length.
    """

    items_RKD: torch.Tensor
    length_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomatonTables:
    """Automata side by side. State s of automaton a is state ``base_A[a] + s`` of all.

    ``next`` [...] int32: entry ``offset_S[state] + class`` is the following state, counted within the automaton.
    ``classes_AV`` int32: the class of each id. ``bounds_SK2`` int64: starts and ends of what may not follow, the first
    ``num_bounds_S`` of K; padding starts and ends at V.
    """

    base_A: torch.Tensor
    offset_S: torch.Tensor
    next: torch.Tensor
    classes_AV: torch.Tensor
    bounds_SK2: torch.Tensor
    num_bounds_S: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTables:
    """Every row's part in sampling.

    ``floats_R6`` float32: temperature (0: greedy), top_p (1: off), min_p (0: off), repetition, presence and frequency
    penalty. ``ints_R4`` int64: top_k (0: off), seed, choice, whether aux outputs are wanted. ``index_R`` int64: tokens
    so far, written by sampling; so are ``states_RA`` (of ``automata``, lists of numbers) and ``counts_RV`` int32, how
    often a token was written (``COUNT``) and whether the prompt holds it (``SEEN``).

    Lists: ``stops`` (id); ``biases`` (id, bits of a float32, first output index, last, excluded); ``statics`` (start
    and end of banned ids, first output index, last); ``hosts`` (start, end); ``prefers``: for each place of a
    "prefer_group" rule the ranges (start, end) of its group and of the ids that it leaves alone.
    """

    floats_R6: torch.Tensor
    ints_R4: torch.Tensor
    index_R: torch.Tensor
    states_RA: torch.Tensor
    stops: RowList
    biases: RowList
    statics: RowList
    hosts: RowList
    automata: RowList
    bank: AutomatonTables
    prefers: tuple[tuple[RowList, RowList], ...] = ()
    counts_RV: torch.Tensor | None = None
