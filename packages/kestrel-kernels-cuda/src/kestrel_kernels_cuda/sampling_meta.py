"""Sampling tables without memory, for launches that are compiled and never run."""

from __future__ import annotations

import torch

from kestrel.ops.sample_tables import AutomatonTables, RowList, SampleTables

__all__ = ["meta_tables"]


def meta_tables(vocab: int) -> SampleTables:
    """Tables of two rows on the meta device; lists and scalars lie in one record per row, as the sampler keeps them."""
    record_RW = torch.empty((2, 1250), dtype=torch.int64, device="meta")

    def row_list(start: int, width: int, size: int) -> RowList:
        words = record_RW[:, start + 1 : start + 1 + width * size]
        return RowList(items_RKD=words.view(2, width, size), length_R=record_RW[:, start])

    def table(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ranges = row_list(100, 64, 2)
    return SampleTables(
        floats_R6=record_RW[:, 9:12].view(torch.float32),
        ints_R4=record_RW[:, 17:21],
        index_R=record_RW[:, 1],
        states_RA=record_RW[:, 3:7],
        stops=row_list(22, 16, 1),
        biases=row_list(200, 128, 4),
        statics=row_list(720, 128, 4),
        hosts=ranges,
        automata=row_list(40, 4, 1),
        bank=AutomatonTables(
            base_A=table(4),
            offset_S=table(256),
            next=table(1024, dtype=torch.int32),
            classes_AV=table(4, vocab, dtype=torch.int32),
            bounds_SK2=table(256, 8, 2),
            num_bounds_S=table(256),
        ),
        prefers=((ranges, ranges),),
        counts_RV=table(2, vocab, dtype=torch.int32),
    )
