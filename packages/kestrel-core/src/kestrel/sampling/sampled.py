"""What one step's sampling returns, on the device, and how the host reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from kestrel.ops.sample_commit import EMPTY_MASK, NON_FINITE, OK
from kestrel.types import TokenLogprobs

__all__ = ["RowStatus", "Sampled", "token_logprobs"]


class RowStatus(IntEnum):
    """How a row's sampling went; anything but OK fails that request alone."""

    OK = OK
    NON_FINITE = NON_FINITE
    EMPTY_MASK = EMPTY_MASK

    @property
    def problem(self) -> str:
        """What went wrong and what to do, for the request's ModelFaultError."""
        return _PROBLEMS[self]


_PROBLEMS = {
    RowStatus.OK: "",
    RowStatus.NON_FINITE: "the model's logits are not finite; check the weights and the dtype (float16 may overflow)",
    RowStatus.EMPTY_MASK: "the rules of this request leave no token to sample; relax them, min_tokens or logit_bias",
}


@dataclass(slots=True, kw_only=True)  # not frozen: one is made per step, in a third of the time
class Sampled:
    """Device tensors of N rows. What failed rows hold (``status`` not OK) is meaningless but in range.

    ``ids`` int64 [N]; ``aux`` int64 [N, W], 0 in columns that the id does not name, and everywhere unless ``has_aux``
    (a row asked for bins); ``stopped`` bool [N]: a stop id; ``status`` uint8 [N] of RowStatus. Read them only: what
    no row needed is shared between steps. ``logprob`` float32 [N] and the most likely ``top_ids`` and ``top_logprobs``
    [N, up to 20] are None when no row asked, and [N, 0] when none asked for the likeliest; cut them to each row's own
    ``top_logprobs``.
    """

    ids: torch.Tensor
    aux: torch.Tensor
    stopped: torch.Tensor
    status: torch.Tensor
    has_aux: bool = False
    logprob: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    @property
    def finite(self) -> torch.Tensor:
        """Rows that sampled properly, bool [N]."""
        return self.status == RowStatus.OK


def token_logprobs(
    logprob: float, top_ids: Sequence[int] = (), top_logprobs: Sequence[float] = (), *, count: int = 0
) -> TokenLogprobs:
    """Host values of one token as users see them: ``count`` likeliest, masked ones left out (valid strict JSON)."""
    if not count:  # nearly always, for every row of a step
        return TokenLogprobs(logprob=logprob)
    pairs = zip(top_ids[:count], top_logprobs[:count], strict=True)
    return TokenLogprobs(logprob=logprob, top=tuple((i, value) for i, value in pairs if math.isfinite(value)))
