"""One token per row from processed logits: temperature, top-k, top-p, min-p, then the Gumbel maximum.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch

from kestrel.sampling.params import Needs

__all__ = ["draw"]


def draw(
    logits_NV: torch.Tensor,
    best_N: torch.Tensor,
    noise_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    needs: Needs,
) -> torch.Tensor:
    """Ids [N], drawn with standard Gumbel ``noise``; ``best`` are the largest logits.

    Filters cut on the tempered distribution: top-k first, then top-p on what is left (a token goes when the mass
    before it exceeds top_p), then min-p. What rows of temperature 0 draw is meaningless.
    """
    divisor_N1 = temperature_N.masked_fill(temperature_N == 0, 1.0)[:, None]
    scaled_NV = _tempered(logits_NV, best_N, divisor_N1)
    if needs & Needs.SORT:
        ranked_NV = logits_NV.sort(dim=1, descending=True).values
        num_kept_N1 = _num_kept(_tempered(ranked_NV, best_N, divisor_N1), top_k_N, top_p_N)
        scaled_NV = scaled_NV.masked_fill(~_first_ranks(logits_NV, ranked_NV, num_kept_N1), -torch.inf)
    if needs & Needs.MIN_P:
        scaled_NV = scaled_NV.masked_fill(scaled_NV < min_p_N.log()[:, None], -torch.inf)
    return (scaled_NV + noise_NV).argmax(dim=1)


def _tempered(logits_NV: torch.Tensor, best_N: torch.Tensor, divisor_N1: torch.Tensor) -> torch.Tensor:
    """Logits over the temperature, relative to the best: a tiny temperature underflows to certainty.

    A row with nothing left has no best (not a number); it fails by its status, whatever is drawn.
    """
    return (logits_NV - best_N[:, None]) / divisor_N1


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
