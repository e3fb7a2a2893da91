"""sample_draw for models on a CPU: rows without a choice cost nothing more, and only what is left gets noise.

numpy's operations on a few numbers cost a fraction of torch's. Ids are those of sample_draw, but for rounding.
Shapes: N rows, V vocabulary, K tokens left to draw from, in all rows together.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.ops.philox import gumbel_of

__all__ = ["draw_on_host"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def draw_on_host(
    logits_NV: Floats, best_N: Floats, greedy_N: Ints, floats_N3: Floats, top_k_N: Ints, counters_N3: Ints
) -> torch.Tensor:
    """Ids [N] as sample_draw gives them, and ``greedy`` where temperature is 0 or the best token alone exceeds top_p.

    ``floats``: temperature, top_p, min_p. ``counters``: seed, output index, choice.
    """
    ids_N = greedy_N.copy()
    temperature_N, top_p_N, min_p_N = floats_N3.T
    with np.errstate(invalid="ignore"):  # rows that are not finite fail by their status
        scaled_NV = logits_NV - best_N[:, None]
        scaled_NV /= np.where(temperature_N == 0, np.float32(1), temperature_N)[:, None]
        mass_N = np.exp(scaled_NV).sum(axis=1)  # in units of the best token's
        (open_M,) = ((temperature_N > 0) & (mass_N * top_p_N >= 1)).nonzero()
        if not len(open_M):
            return torch.from_numpy(ids_N)
        scaled_MV = scaled_NV if len(open_M) == len(ids_N) else scaled_NV[open_M]
        row_K, id_K = _left(scaled_MV, top_k_N[open_M], top_p_N[open_M], min_p_N[open_M])
    seed_K, index_K, choice_K = counters_N3[open_M[row_K]].T
    noise_K = gumbel_of(seed_K, index_K, choice_K, id_K)
    scores_MV = np.full_like(scaled_MV, -np.inf)
    scores_MV[row_K, id_K] = scaled_MV[row_K, id_K] + noise_K
    ids_N[open_M] = scores_MV.argmax(axis=1)
    return torch.from_numpy(ids_N)


def _left(scaled_NV: Floats, top_k_N: Ints, top_p_N: Floats, min_p_N: Floats) -> tuple[Ints, Ints]:
    """Rows [K] and ids [K] of the tokens that top-k, top-p and min-p leave, in order."""
    ranked_NV = np.sort(scaled_NV, axis=1)[:, ::-1]
    mass_NV = np.exp(ranked_NV)
    until_NV = mass_NV.cumsum(axis=1)
    rows_N, most_N = np.arange(len(top_k_N)), np.where(top_k_N == 0, scaled_NV.shape[1], top_k_N)
    bound_N = np.where(top_p_N >= 1, np.inf, top_p_N * until_NV[rows_N, most_N - 1])  # of what top-k leaves
    count_N = np.minimum((until_NV - mass_NV <= bound_N[:, None]).sum(axis=1), most_N)
    kept_NV = scaled_NV >= ranked_NV[rows_N, count_N - 1][:, None]
    if kept_NV.sum() > count_N.sum():  # equal logits at the edge: the lowest ids stay
        rank_NV = np.argsort(np.argsort(-scaled_NV, axis=1, kind="stable"), axis=1)
        kept_NV = rank_NV < count_N[:, None]
    with np.errstate(divide="ignore"):
        kept_NV &= scaled_NV >= np.log(min_p_N)[:, None]
    row_K, id_K = (kept_NV & (scaled_NV > -np.inf)).nonzero()
    return row_K, id_K
