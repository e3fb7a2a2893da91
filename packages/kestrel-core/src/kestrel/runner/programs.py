"""The two programs of a step: F computes hidden states, S chooses tokens. Captured, they are the same calls.

Neither branches on a value that the device computes, and neither waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.ops import OpTable
from kestrel.runner.results import pack
from kestrel.runner.rows import RowTables
from kestrel.sampling import Sampled, Sampler
from kestrel.sampling.params import Needs
from kestrel.spi.backend import OpQuery
from kestrel.spi.batch import Batch
from kestrel.spi.driver import TokenDriver

__all__ = ["Chosen", "Programs"]

Chosen = tuple[Sampled, torch.Tensor]
"""What S gives, and the same in one piece (``results.pack``)."""


class Programs:
    """F and S of one model, over the tables of its rows. ``tracks_life``: steps overlap, so S must tell F who died."""

    def __init__(
        self, driver: TokenDriver, sampler: Sampler, rows: RowTables, ops: OpTable, *, tracks_life: bool
    ) -> None:
        self._driver, self._sampler, self._rows = driver, sampler, rows
        self._tracks_life = tracks_life
        self._row_results = ops.resolve(OpQuery.of("row_results"))
        self._aux_fn = driver.aux_logits if driver.spec.aux_width else None

    def forward(self, batch: Batch) -> torch.Tensor:
        """F: hidden states [T, C] of a launch."""
        driver = self._driver
        return driver.forward(batch, driver.embed(batch))

    def sample(self, h_NC: torch.Tensor, rows_host: Sequence[int], rows_N: torch.Tensor) -> Sampled:
        """S: as ``choose``, for what ``rows_host`` (the same rows) need."""
        return self.choose(h_NC, self._sampler.kind_of(rows_host), rows_N)

    def choose(self, h_NC: torch.Tensor, needs: int, rows_N: torch.Tensor) -> Sampled:
        """A token for each of ``rows_N``, noted as its row's next input; ends clear the row's life.

        ``needs``: what any of the rows needs of sampling, or more.
        """
        sampled, _ = self._chosen(h_NC, needs, rows_N)
        return sampled

    def _chosen(self, h_NC: torch.Tensor, needs: int, rows_N: torch.Tensor) -> Chosen:
        """As ``choose``, and ids, ends and statuses in one piece (``ops.row_results``)."""
        logits_NV = self._driver.logits(h_NC)
        sampled = self._sampler.sample_as(logits_NV, needs, rows_N, h_NC, self._aux_fn)
        tables = self._rows
        if sampled.has_aux:
            tables.last_aux.index_copy_(0, rows_N, sampled.aux)
        live_R = tables.live if self._tracks_life else None
        packed: torch.Tensor = self._row_results(
            sampled.ids, sampled.stopped, sampled.status, rows_N, tables.last_ids, live_R
        )
        return sampled, packed

    def choose_packed(self, h_NC: torch.Tensor, needs: int, rows_N: torch.Tensor) -> Chosen:
        """As ``choose``, and ``results.pack`` of what it gives."""
        sampled, packed = self._chosen(h_NC, needs, rows_N)
        return sampled, pack(sampled) if needs & (Needs.AUX | Needs.LOGPROBS) else packed

    def logprobs(self, h_NC: torch.Tensor, which_K: torch.Tensor, ids_K: torch.Tensor) -> torch.Tensor:
        """Unmasked natural-log probabilities [K] of ``ids_K``, each after the hidden state that ``which_K`` names."""
        return self._driver.logits(h_NC).float().log_softmax(-1)[which_K, ids_K]
