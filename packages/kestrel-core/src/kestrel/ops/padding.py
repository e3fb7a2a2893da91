"""Ragged tokens as a padded batch and back, from device tensors alone, as a captured program needs.

Letters: B sequences, T tokens, Q tokens of a padded sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel.ops.pages import AnyView, once_per_launch

__all__ = ["Padding", "padding_of", "padding_once"]


@dataclass(frozen=True, slots=True)
class Padding:
    """``source_BQ``: the token at each padded place (any token where there is none). ``back_T``: the padded place of
    each token, flat. ``lens_B``: int64 [B]. ``real_BQ``: bool, whether the place holds a token."""

    source_BQ: torch.Tensor
    back_T: torch.Tensor
    lens_B: torch.Tensor
    real_BQ: torch.Tensor

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, ...] as [B, Q, ...], zero where there is no token."""
        real = self.real_BQ.view(*self.real_BQ.shape, *(1,) * (x.dim() - 1))
        return x[self.source_BQ].masked_fill(~real, 0)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, Q, ...] as [T, ...]. Rows of tokens behind the last sequence are undefined."""
        return x.flatten(0, 1).index_select(0, self.back_T)


def padding_of(cu_seqlens: torch.Tensor, num_tokens: int, width: int) -> Padding:
    """The padding of sequences ``cu_seqlens`` [B + 1], each at most ``width`` tokens long."""
    cu, device = cu_seqlens.to(torch.int64), cu_seqlens.device
    starts, lens = cu[:-1], cu[1:] - cu[:-1]
    token = torch.arange(num_tokens, device=device)
    row_T = torch.searchsorted(cu[1:], token, right=True).clamp_(max=cu.shape[0] - 2)
    back_T = row_T * width + (token - cu[row_T]).clamp_(0, width - 1)
    place = torch.arange(width, device=device)
    source_BQ = (starts.unsqueeze(1) + place).clamp_(max=num_tokens - 1)
    return Padding(source_BQ, back_T, lens, place < lens.unsqueeze(1))


def padding_once(view: AnyView, layer: int, num_tokens: int) -> Padding:
    """The padding of ``view``'s sequences among ``num_tokens`` tokens, computed once per launch."""

    def build(view: AnyView) -> Padding:
        return padding_of(view.cu_seqlens, num_tokens, view.limits.max_query_len)

    return once_per_launch(view, layer, "padding", build)
