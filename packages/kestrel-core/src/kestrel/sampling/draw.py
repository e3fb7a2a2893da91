"""One token per row from processed logits: temperature, top-k, top-p, min-p, then the Gumbel maximum.

On a CPU, where looking at numbers costs nothing, noise is made only where a choice is left.
Shapes: N rows, V vocabulary, K tokens left to draw from, in all rows together.
"""

from __future__ import annotations

import numpy as np
import torch

from kestrel.sampling.params import Needs
from kestrel.sampling.philox import gumbel_of

__all__ = ["draw_among", "filtered", "undecided"]


def filtered(
    logits_NV: torch.Tensor,
    best_N: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    needs: Needs,
) -> torch.Tensor:
    """Tempered logits [N, V] of the tokens that may be drawn, −inf for the others; ``best`` are the largest logits.

    Filters cut on the tempered distribution: top-k first, then top-p on what is left (a token goes when the mass
    before it exceeds top_p), then min-p. What rows of temperature 0 get is meaningless.
    """
    scaled_NV = _tempered(logits_NV, best_N, temperature_N)
    if needs & Needs.SORT:
        ranked_NV = _descending(logits_NV)
        num_kept_N1 = _num_kept(_tempered(ranked_NV, best_N, temperature_N), top_k_N, top_p_N)
        scaled_NV = scaled_NV.masked_fill(~_first_ranks(logits_NV, ranked_NV, num_kept_N1), -torch.inf)
    if needs & Needs.MIN_P:
        scaled_NV = scaled_NV.masked_fill(scaled_NV < min_p_N.log()[:, None], -torch.inf)
    return scaled_NV


def undecided(
    logits_NV: torch.Tensor, best_N: torch.Tensor, temperature_N: torch.Tensor, top_p_N: torch.Tensor
) -> list[int]:
    """Rows that have to be drawn: neither is their temperature 0 nor does the best token alone exceed top_p.

    Waits for the device.
    """
    mass_N = _tempered(logits_NV, best_N, temperature_N).exp_().sum(dim=1)  # in units of the best token's
    is_open_N = (temperature_N > 0) & (mass_N * top_p_N >= 1)
    return [row for row, is_open in enumerate(is_open_N.tolist()) if is_open]


def draw_among(
    scaled_NV: torch.Tensor, seed_N: torch.Tensor, index_N: torch.Tensor, choice_N: torch.Tensor
) -> torch.Tensor:
    """Ids [N] by the Gumbel maximum over the tokens that ``filtered`` left, with noise for those alone.

    Waits for the device. The noise of a token is what ``Gumbel`` gives it.
    """
    scaled = scaled_NV.numpy()
    row_K, id_K = (scaled > -np.inf).nonzero()
    seed_K, index_K, choice_K = (counter_N.numpy()[row_K] for counter_N in (seed_N, index_N, choice_N))
    noise_K = gumbel_of(seed_K, index_K, choice_K, id_K)
    scores = np.full_like(scaled, -np.inf)
    scores[row_K, id_K] = scaled[row_K, id_K] + noise_K
    return torch.from_numpy(scores.argmax(axis=1))


def _tempered(logits_NV: torch.Tensor, best_N: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
    """Logits over the temperature, relative to the best: a tiny temperature underflows to certainty.

    A row with nothing left has no best (not a number); it fails by its status, whatever is drawn.
    """
    divisor_N = temperature_N.masked_fill(temperature_N == 0, 1.0)
    return (logits_NV - best_N[:, None]) / divisor_N[:, None]


def _num_kept(ranked_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """How many of the ranked tokens top-k and top-p keep, at least one: [N, 1]."""
    rank_V = torch.arange(ranked_NV.shape[1], device=ranked_NV.device)
    in_k_NV = (rank_V < top_k_N[:, None]) | (top_k_N == 0)[:, None]
    mass_NV = ranked_NV.masked_fill(~in_k_NV, -torch.inf).softmax(dim=1)
    before_NV = mass_NV.cumsum(dim=1) - mass_NV
    in_p_NV = (before_NV <= top_p_N[:, None]) | (top_p_N >= 1)[:, None]
    return (in_k_NV & in_p_NV).sum(dim=1, keepdim=True).clamp_(min=1)


def _first_ranks(logits_NV: torch.Tensor, ranked_NV: torch.Tensor, num_kept_N1: torch.Tensor) -> torch.Tensor:
    """The ids [N, V] of the first ``num_kept`` ranks. Equal logits rank by id, so exactly as many stay."""
    least_N1 = ranked_NV.gather(1, num_kept_N1 - 1)
    above_NV, level_NV = logits_NV > least_N1, logits_NV == least_N1
    num_level_N1 = num_kept_N1 - above_NV.sum(dim=1, keepdim=True)
    return above_NV | (level_NV & (level_NV.cumsum(dim=1) <= num_level_N1))


def _descending(logits_NV: torch.Tensor) -> torch.Tensor:
    """Each row's values, largest first."""
    if logits_NV.device.type == "cpu":  # numpy sorts values alone, which takes a third of torch's time
        return torch.from_numpy(np.sort(logits_NV.numpy(), axis=1)).flip(1)
    return logits_NV.sort(dim=1, descending=True).values
