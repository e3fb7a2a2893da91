"""sample_logprobs: log-probabilities of the chosen token and of the likeliest ones.

Shapes: N rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["SAMPLE_LOGPROBS", "sample_logprobs"]


def sample_logprobs(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural log-probability [N] of ``ids``; ids [N, K] int64 and log-probabilities of the K = ``count`` likeliest.

    ``count`` is the query's or 0. float32 whatever the logits are. Likeliest first. Which of several equal logits is
    named at the end of the list, and in which order, is the provider's, the same each time; what a row without a finite
    logit gets is undefined.
    """
    logprob_NV = logits_NV.float().log_softmax(1)
    top = logprob_NV.topk(count, dim=1)
    return logprob_NV.gather(1, ids_N[:, None]).squeeze(1), top.indices, top.values


def _make(shape: tuple[int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    num_rows, vocab, count = shape
    ranks = [_shuffled(seed + n, vocab) for n in range(num_rows)] or [torch.empty(0, vocab)]
    # the first 80 ranks are distinct in any dtype, so that the order of the likeliest is defined
    logits = (
        (-0.25 * torch.stack(ranks).view(num_rows, vocab)).clamp_(min=-20.0).to(device=device, dtype=dtype)
    )
    ids = normal(seed, (num_rows,), device, torch.float32).mul(1000).long().remainder(vocab)
    return Inputs(args=(logits, ids, count))


def _shuffled(seed: int, vocab: int) -> torch.Tensor:
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(seed), device="cpu")


_SHAPES = {  # rows, vocabulary, count
    "smallest": (1, 1, 1),
    "odd": (3, 2051, 20),
    "empty": (0, 50, 20),
    "few": (4, 7, 7),
    "the chosen one alone": (3, 2500, 0),
    "largest": (2, 51_866, 20),
}


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="sample_logprobs",
            name=name,
            make=partial(_make, shape),
            facts={"vocab": shape[1], "count": shape[2]},
        )
        for name, shape in _SHAPES.items()
    ]


SAMPLE_LOGPROBS = Op(
    name="sample_logprobs",
    reference=sample_logprobs,
    cases=_cases,
    tolerances=dict.fromkeys(
        ("float32", "bfloat16", "float16"), Tolerance(1e-5, 1e-5)
    ),  # sums in another order
    facts={"vocab": "V", "count": "K", "dtype": "of the logits"},
)
