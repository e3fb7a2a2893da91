"""The pass behind word times: one run of the decoder over a finished text, looking at where it listens.

Letters: T tokens, H heads of alignment, J encoder positions, S of a whole window, C width, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.spi import Batch, CrossView, Limits, PagedView, RowExtent, SinglePassDriver
from kestrel_speech.whisper.config import GenerationConfig, WhisperConfig
from kestrel_speech.whisper.decoder import AUDIO_STATE, TEXT_STATE
from kestrel_speech.whisper.model import WhisperModel
from kestrel_speech.whisper.tokens import SpecialIds

__all__ = ["AlignPass", "Alignment", "attention_matrix", "median_filter"]

FILTER_WIDTH = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """``matrix_TJ`` float32: how much each token of the text, and the end, listens to each 0.02 s. ``probabilities``:
    of each token of the text, among ids of text."""

    matrix_TJ: NDArray[np.float32]
    probabilities: NDArray[np.float32]


class AlignPass(SinglePassDriver):
    """Inputs: ``opening`` (ids from the start of the transcript to the task), ``text`` (ids), ``num_frames`` (mel
    frames of the window that hold sound). Output: ``Alignment``."""

    def __init__(
        self,
        config: WhisperConfig,
        generation: GenerationConfig,
        special: SpecialIds,
        model: WhisperModel,
        device: torch.device,
        page_size: int,
    ) -> None:
        self._config, self._special, self._model = config, special, model
        self._heads = generation.alignment_heads
        self._device, self._page_size = device, page_size

    def infer(self, inputs: Sequence[Mapping[str, Any]], encoded: Sequence[Any]) -> list[Any]:
        return [
            self._align(window[AUDIO_STATE], **given) for given, window in zip(inputs, encoded, strict=True)
        ]

    def _align(
        self, window: CrossView, *, opening: tuple[int, ...], text: tuple[int, ...], num_frames: int
    ) -> Alignment:
        special, decoder = self._special, self._model.decoder
        ids = (*opening, special.no_timestamps, *text, special.eot)
        batch = self._batch(ids, window)
        h_TC, queries = decoder(decoder.embed(batch.ids_T, batch.positions_PT[0]), batch)
        rows = slice(len(opening), len(ids) - 1)  # they predict the text and the end
        matrix_TJ = attention_matrix(self._scores(queries, window, max(1, num_frames // 2)))[rows]
        text_logits = self._model.logits(h_TC[rows][: len(text)])[:, : special.eot].float()
        wanted = torch.tensor(text, dtype=torch.int64, device=self._device)
        chosen = text_logits.softmax(-1).gather(1, wanted[:, None]).squeeze(1)
        return Alignment(matrix_TJ=matrix_TJ.cpu().numpy(), probabilities=chosen.cpu().numpy())

    def _scores(self, queries: Sequence[torch.Tensor], window: CrossView, columns: int) -> torch.Tensor:
        """q·k / √D, [H, T, J], of the heads of alignment."""
        scores = []
        for layer, head in self._heads:
            q_TD = queries[layer][:, head].float()
            k_1SD = window.k_LEKSD[layer, :, head].index_select(0, window.entries_B)
            scores.append(q_TD @ k_1SD[0, :columns].float().T * q_TD.shape[1] ** -0.5)
        return torch.stack(scores)

    def _batch(self, ids: Sequence[int], window: CrossView) -> Batch:
        """All of ``ids`` as one prefill over pages of its own."""
        count, size, device = len(ids), self._page_size, self._device
        pages = -(-count // size)
        decoder = self._model.decoder
        table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)
        at = torch.arange(count, dtype=torch.int64, device=device)
        limits = Limits(max_rows=1, max_tokens=count, max_query_len=count, max_context_len=count)
        extents = (RowExtent(count, 0),)
        cu = torch.tensor([0, count], dtype=torch.int32, device=device)
        heads = self._config.decoder_heads
        shape = (len(decoder.layers), pages + 1, heads, size, self._config.dim // heads)
        k, v = (torch.zeros(shape, dtype=window.k_LEKSD.dtype, device=device) for _ in "kv")
        text = PagedView(
            k_LPKSD=k,
            v_LPKSD=v,
            page_table_BN=table[None],
            slots_T=at + size,
            computed_B=torch.zeros(1, dtype=torch.int32, device=device),
            cu_seqlens=cu,
            limits=limits,
            page_size=size,
            extents=extents,
        )
        audio = CrossView(
            k_LEKSD=window.k_LEKSD,
            v_LEKSD=window.v_LEKSD,
            entries_B=window.entries_B,
            lens_B=window.lens_B,
            cu_seqlens=cu,
            limits=limits,
            extents=extents,
        )
        return Batch(
            ids_T=torch.tensor(ids, dtype=torch.int64, device=device),
            aux_TW=torch.zeros(count, 0, dtype=torch.int64, device=device),
            media_rows_T=torch.full((count,), -1, dtype=torch.int64, device=device),
            positions_PT=at[None],
            cu_seqlens=cu,
            states={TEXT_STATE: text, AUDIO_STATE: audio},
            adapter_slots_B=torch.zeros(1, dtype=torch.int64, device=device),
            limits=limits,
            extents=extents,
        )


def attention_matrix(scores_HTJ: torch.Tensor) -> torch.Tensor:
    """[T, J]: softmax over the audio, columns against their mean over the tokens, smoothed in time, heads averaged."""
    weights = scores_HTJ.softmax(-1)
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    return median_filter((weights - mean) / deviation.clamp(min=1e-12)).mean(0)


def median_filter(x: torch.Tensor) -> torch.Tensor:
    """The median of 7 neighbours along the last axis, its edges reflected; an axis that is too short stays as it is."""
    reach = FILTER_WIDTH // 2
    if x.shape[-1] <= reach:
        return x
    padded = torch.nn.functional.pad(x, (reach, reach), mode="reflect")
    return _median7([padded[..., i : i + x.shape[-1]] for i in range(FILTER_WIDTH)])


def _median7(values: list[torch.Tensor]) -> torch.Tensor:
    """Element-wise median by a network of comparisons: ten times faster on a CPU than sorting 7 neighbours apiece."""
    v = list(values)
    for low, high in _NETWORK:
        v[low], v[high] = torch.minimum(v[low], v[high]), torch.maximum(v[low], v[high])
    return v[3]


# Exchanges that leave the median of seven values in the middle.
_NETWORK = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)  # fmt: skip
