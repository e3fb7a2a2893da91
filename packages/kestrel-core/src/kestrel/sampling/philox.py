"""Counter-based randomness: Philox4x32-10 and Gumbel noise. A draw depends on its key and counter alone.

Shapes: N rows, V vocabulary. 32-bit words live in int64 tensors, since torch's unsigned types lack arithmetic.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel", "philox4x32"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # table 2 of the paper
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) − 1
_LOW = 0xFFFFFFFF
_ROUNDS = 10

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Four random words per counter and key, each an int64 tensor of values below 2**32; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap modulo 2**64; an arithmetic shift and a mask still give the exact upper word.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW
        c2, c3 = ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(
    seed_N: torch.Tensor, index_N: torch.Tensor, choice_N: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Standard Gumbel noise [N, V] float32: key = seed, counter = (output index, choice, vocabulary block, 0).

    Token v takes word v % 4 of block v // 4. Finite everywhere.
    """
    device = seed_N.device
    blocks = torch.arange((vocab_size + 3) // 4, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counter = (index_N[:, None], choice_N[:, None], blocks[None, :], zero)
    key = (seed_N[:, None] & _LOW, (seed_N[:, None] >> 32) & _LOW)
    words = torch.stack(philox4x32(counter, key), dim=-1).flatten(1)[:, :vocab_size]
    # log1p keeps the upper tail exact, where the winners are: the smallest uniform is 2**-33, a noise of 22.9.
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
