"""The sampling ops of one model, resolved by the dtype of its logits and called by what a step needs."""

from __future__ import annotations

import torch

from kestrel.config import MAX_TOP_LOGPROBS
from kestrel.ops import OpTable, dtype_name, resolve_ops
from kestrel.ops.sample_commit import sample_commit
from kestrel.ops.sample_tables import SampleTables
from kestrel.sampling.params import Needs
from kestrel.spi.backend import OpCall, OpQuery

__all__ = ["SampleOps", "resolve_sampling"]


def resolve_sampling(table: OpTable, vocab_size: int, logits_dtype: torch.dtype) -> None:
    """Resolve in ``table`` what sampling logits of that dtype will call, so that it can be compiled ahead."""
    SampleOps(table, vocab_size=vocab_size, top_count=min(MAX_TOP_LOGPROBS, vocab_size)).resolve(logits_dtype)


class SampleOps:
    """Calls of the sampling ops; without a table they are the references."""

    def __init__(self, table: OpTable | None, *, vocab_size: int, top_count: int) -> None:
        self._table = resolve_ops() if table is None else table
        self._vocab_size, self._top_count = vocab_size, top_count
        self._known: dict[tuple[str, torch.dtype], OpCall] = {}

    def resolve(self, logits_dtype: torch.dtype) -> None:
        """Resolve what logits of that dtype will call; once processed they are float32, then drawn from and shown."""
        for op in ("argmax", "process", "draw", "commit", "logprobs"):
            self._call(op, logits_dtype)
        for op in ("draw", "logprobs"):
            self._call(op, torch.float32)

    def _call(self, op: str, dtype: torch.dtype) -> OpCall:
        call = self._known.get((op, dtype))
        if call is None:
            facts = {"vocab": self._vocab_size, "dtype": dtype_name(dtype)}
            if op == "logprobs":
                facts["count"] = self._top_count
            call = self._known[op, dtype] = self._table.resolve(OpQuery.of(f"sample_{op}", **facts))
        return call

    def argmax(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and values of the largest logits."""
        ids_N, best_N = self._call("argmax", logits_NV.dtype)(logits_NV)
        return ids_N, best_N

    def process(
        self, logits_NV: torch.Tensor, rows: torch.Tensor, tables: SampleTables, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As sample_process."""
        processed_NV, ids_N, best_N, first_N = self._call("process", logits_NV.dtype)(
            logits_NV,
            rows,
            tables,
            penalties=bool(needs & Needs.PENALTIES),
            biases=bool(needs & Needs.BIAS),
            statics=bool(needs & Needs.STATIC),
            automata=bool(needs & Needs.AUTOMATA),
            hosts=bool(needs & Needs.HOST),
            prefers=bool(needs & Needs.LOGIT_RULES),
        )
        return processed_NV, ids_N, best_N, first_N

    def draw(
        self,
        logits_NV: torch.Tensor,
        best_N: torch.Tensor,
        greedy_N: torch.Tensor,
        rows: torch.Tensor,
        tables: SampleTables,
        needs: Needs,
    ) -> torch.Tensor:
        """As sample_draw."""
        ids_N: torch.Tensor = self._call("draw", logits_NV.dtype)(
            logits_NV,
            best_N,
            greedy_N,
            rows,
            tables,
            ranks=bool(needs & Needs.SORT),
            min_p=bool(needs & Needs.MIN_P),
        )
        return ids_N

    def logprobs(
        self, logits_NV: torch.Tensor, ids_N: torch.Tensor, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As sample_logprobs."""
        count = self._top_count if needs & Needs.TOP_LOGPROBS else 0
        logprob_N, top_ids_NK, top_NK = self._call("logprobs", logits_NV.dtype)(logits_NV, ids_N, count)
        return logprob_N, top_ids_NK, top_NK

    def advance(self, id_1: torch.Tensor, row_1: torch.Tensor, tables: SampleTables, needs: Needs) -> None:
        """One row takes a token that nobody sampled."""
        best_1 = torch.zeros_like(id_1, dtype=torch.float32)
        is_counted, is_ruled = bool(needs & Needs.PENALTIES), bool(needs & Needs.AUTOMATA)
        sample_commit(
            id_1, best_1, best_1, row_1, tables, advances=True, penalties=is_counted, automata=is_ruled
        )

    def commit(
        self,
        ids_N: torch.Tensor,
        first_N: torch.Tensor,
        best_N: torch.Tensor,
        rows: torch.Tensor,
        tables: SampleTables,
        needs: Needs,
        *,
        advances: bool,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As sample_commit, in a model whose logits have ``dtype``."""
        stopped_N, status_N = self._call("commit", dtype)(
            ids_N,
            first_N,
            best_N,
            rows,
            tables,
            advances=advances,
            penalties=advances and bool(needs & Needs.PENALTIES),
            automata=advances and bool(needs & Needs.AUTOMATA),
            stops=bool(needs & Needs.STOP),
        )
        return stopped_N, status_N
