"""One token per row from processed logits: temperature, top-k, top-p, min-p, then the Gumbel maximum.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch

from kestrel.sampling.params import Needs
from kestrel.sampling.philox import gumbel

__all__ = ["draw"]


def draw(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    counter_N3: torch.Tensor,
    needs: Needs,
) -> torch.Tensor:
    """Ids [N]. Rows of temperature 0 take the largest logit, lowest id on ties.

    ``counter``: seed, output index and choice of each row. Filters cut on the tempered distribution: top-k first,
    then top-p on what is left (a token goes when the mass before it exceeds top_p), then min-p.
    """
    best_N, greedy_N = logits_NV.max(dim=1)
    is_greedy_N = temperature_N == 0
    divisor_N = torch.where(is_greedy_N, torch.ones_like(temperature_N), temperature_N)
    # Relative to the best, a tiny temperature underflows to certainty instead of overflowing. A row with nothing
    # left has no best: it fails by its status, whatever is drawn here.
    scaled_NV = (logits_NV - best_N[:, None]) / divisor_N[:, None]
    if needs & Needs.SORT:
        scaled_NV = scaled_NV.masked_fill(~_kept(logits_NV, scaled_NV, top_k_N, top_p_N), -torch.inf)
    if needs & Needs.MIN_P:
        scaled_NV = scaled_NV.masked_fill(scaled_NV < min_p_N.log()[:, None], -torch.inf)
    seed_N, index_N, choice_N = counter_N3.unbind(1)
    drawn_N = (scaled_NV + gumbel(seed_N, index_N, choice_N, logits_NV.shape[1])).argmax(dim=1)
    return torch.where(is_greedy_N, greedy_N, drawn_N)


def _kept(
    logits_NV: torch.Tensor, scaled_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor
) -> torch.Tensor:
    """Which ids [N, V] top-k and top-p keep. Equal logits rank by id, so exactly k stay."""
    order_NV = logits_NV.sort(dim=1, descending=True, stable=True).indices
    ranked_NV = scaled_NV.gather(1, order_NV)
    rank_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    in_k_NV = (rank_V < top_k_N[:, None]) | (top_k_N == 0)[:, None]
    mass_NV = ranked_NV.masked_fill(~in_k_NV, -torch.inf).softmax(dim=1)
    before_NV = mass_NV.cumsum(dim=1) - mass_NV
    in_p_NV = (before_NV <= top_p_N[:, None]) | (top_p_N >= 1)[:, None]
    return torch.zeros_like(in_k_NV).scatter_(1, order_NV, in_k_NV & in_p_NV)
