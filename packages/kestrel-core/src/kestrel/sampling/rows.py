"""Every row's settings and rules, as the host writes them and the sampling ops read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.device import Staging
from kestrel.ops.sample_tables import SampleTables
from kestrel.sampling.automata import AutomatonBank
from kestrel.sampling.masks import LogitRules, Masks
from kestrel.sampling.params import Needs, SamplingParams
from kestrel.sampling.penalties import Penalties
from kestrel.sampling.records import Field, Records, bits_of, pairs_of
from kestrel.spi.decoding import TokenSet

__all__ = ["SampleRows"]

# Room for what requests usually bring, so that tensors that captured programs read seldom move.
ROOM = {"states": 4, "automata": 4, "stops": 16, "hosts": 64, "biases": 128, "statics": 128}
PREFER_ROOM = 16  # ranges of a preferred group


class SampleRows:
    """Rows of one model; with ``has_room`` their lists are wide from the start, else they grow as they are needed."""

    def __init__(self, vocab_size: int, rows: int, staging: Staging, *, has_room: bool) -> None:
        off = (vocab_size, vocab_size)
        fills = {
            "index": (0,),  # what the device writes comes first
            "states": (0,),
            "floats": pairs_of((0.0, 0.0, 0.0, 1.0, 0.0, 0.0)),
            "ints": (0, 0, 0, 0),
            "stops": (-1,),
            "automata": (0,),
            "hosts": off,
            "biases": (0, bits_of(0.0), 0, 0),
            "statics": (*off, 0, 0),
        }
        widths = ROOM if has_room else {}
        fields = {name: Field(fill, widths.get(name, 1)) for name, fill in fills.items()}
        self._records = Records(staging, rows, fields)
        self._bank = AutomatonBank(vocab_size, staging.device, has_room=has_room)
        self._masks = Masks(vocab_size, self._records, self._bank)
        places, width = (1, PREFER_ROOM) if has_room else (0, 1)
        self._rules = LogitRules(vocab_size, self._records, places=places, width=width)
        self._penalties = Penalties(vocab_size, rows, staging.device)
        self._tables = self._read()
        self._tables_of = self.generation

    @property
    def generation(self) -> int:
        """Moves when a tensor of ``tables`` was replaced by another."""
        return self._records.generation + self._bank.generation + self._penalties.generation

    @property
    def tables(self) -> SampleTables:
        """What the ops read; stale once ``generation`` moved."""
        self._renew()
        return self._tables

    def prepare(self, needs: Needs) -> None:
        """Make the tensors that exist only once a row needs them, and ``tables`` of all."""
        if needs & Needs.PENALTIES:
            self._penalties.prepare()
        self._renew()

    def set(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        prompt_ids: Sequence[int],
        written: Sequence[int],
    ) -> None:
        """Give a cleared row to a sequence whose output so far is ``written``."""
        put = self._records.put
        floats = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        put(row, "floats", (pairs_of(floats),))
        put(row, "ints", ((params.top_k, seed, choice, int(params.needs_aux)),))
        put(row, "index", ((len(written),),))
        put(row, "stops", [(i,) for i in sorted(params.stop_ids)])
        put(row, "biases", [(i, bits_of(value), first, last) for i, value, first, last in params.biases])
        if params.needs & Needs.PENALTIES:
            self._penalties.set(row, prompt_ids, written)
        self._masks.set(row, params, written)
        self._rules.set(row, params.logit_rules)

    def clear(self, row: int) -> None:
        """``row`` has no settings and no rules."""
        self._records.clear(row)
        self._masks.clear(row)

    def set_host(self, row: int, allowed: TokenSet) -> None:
        """What the host rules of ``row`` allow next."""
        self._masks.set_host(row, allowed)

    def _renew(self) -> None:
        if self._tables_of != self.generation:
            self._tables, self._tables_of = self._read(), self.generation

    def _read(self) -> SampleTables:
        lists = self._records.list
        return SampleTables(
            floats_R6=lists("floats").items_RKD[:, 0].view(torch.float32),
            ints_R4=lists("ints").items_RKD[:, 0],
            index_R=lists("index").items_RKD[:, 0, 0],
            states_RA=lists("states").items_RKD[..., 0],
            stops=lists("stops"),
            biases=lists("biases"),
            statics=lists("statics"),
            hosts=lists("hosts"),
            automata=lists("automata"),
            bank=self._bank.tables,
            prefers=self._rules.lists,
            counts_RV=self._penalties.counts_RV,
        )
