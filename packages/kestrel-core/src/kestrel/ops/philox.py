"""Counter-based randomness: Philox4x32-10 and Gumbel noise. A draw depends on its key and counter alone.

Shapes: N rows, V vocabulary. 32-bit words live in int64 tensors, since torch's unsigned types lack arithmetic.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Gumbel", "Philox", "gumbel_of"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # table 2 of the paper
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) − 1
_LOW = 0xFFFFFFFF
_ROUNDS = 10


class Philox:
    """The generator. It makes no tensor of Python numbers, so that a captured program may hold it."""

    def __call__(self, counter_4: torch.Tensor, key_2: torch.Tensor) -> torch.Tensor:
        """Four random words per counter and key: int64 [4, ...], values below 2**32. ``key_2`` [2, ...] broadcasts."""
        c0, c1, c2, c3 = counter_4.unbind(0)
        k0, k1 = key_2.unbind(0)
        for _ in range(_ROUNDS):
            # Products wrap modulo 2**64; an arithmetic shift and a mask still give the exact upper word.
            left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
            c0, c1 = ((right >> 32) & _LOW) ^ c1 ^ k0, right & _LOW
            c2, c3 = ((left >> 32) & _LOW) ^ c3 ^ k1, left & _LOW
            k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
        return torch.stack((c0, c1, c2, c3))


class Gumbel:
    """Standard Gumbel noise over a vocabulary, numbered by seed, output index and choice."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._philox = Philox()
        self._blocks = torch.arange((vocab_size + 3) // 4, device=device)

    def __call__(self, seed_N: torch.Tensor, index_N: torch.Tensor, choice_N: torch.Tensor) -> torch.Tensor:
        """Noise [N, V] float32, finite everywhere. key = seed, counter = (index, choice, vocabulary block, 0).

        Token v takes word v % 4 of block v // 4.
        """
        shape = (seed_N.shape[0], self._blocks.shape[0])
        parts = (index_N[:, None], choice_N[:, None], self._blocks, torch.zeros_like(self._blocks))
        counter_4 = torch.stack([part.expand(shape) for part in parts])
        key_2 = torch.stack((seed_N & _LOW, (seed_N >> 32) & _LOW))[..., None]
        words_NV = self._philox(counter_4, key_2).movedim(0, -1).flatten(1)[:, : self._vocab_size]
        return _gumbel(words_NV)


def gumbel_of(
    seed_K: NDArray[np.int64],
    index_K: NDArray[np.int64],
    choice_K: NDArray[np.int64],
    id_K: NDArray[np.int64],
) -> NDArray[np.float32]:
    """The noise [K] that ``Gumbel`` gives to single tokens ``id``, made on the host."""
    block_K = id_K // 4
    counter_4K = np.stack((index_K, choice_K, block_K, np.zeros_like(block_K))).astype(np.uint64)
    words_4K = _philox_on_host(counter_4K, np.stack((seed_K & _LOW, (seed_K >> 32) & _LOW)).astype(np.uint64))
    words_K = words_4K[id_K % 4, np.arange(len(id_K))].astype(np.int64)
    noise_K: NDArray[np.float32] = _gumbel(torch.from_numpy(words_K)).numpy()
    return noise_K


def _philox_on_host(counter_4K: NDArray[np.uint64], key_2K: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``Philox`` in numpy, whose operations on a few numbers cost a fraction of torch's: words [4, K]."""
    multiplier, low, half = np.array(_MULTIPLIERS, np.uint64)[:, None], np.uint64(_LOW), np.uint64(32)
    steps_R2 = np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.array(_WEYL, np.uint64)
    even, odd = counter_4K[0::2], counter_4K[1::2]
    for key in (key_2K + steps_R2[..., None]) & low:
        product = (even * multiplier)[::-1]
        even, odd = (product >> half) ^ odd ^ key, product & low
    return np.stack((even, odd), axis=1).reshape(4, -1)


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers, float32 and finite, of random 32-bit words."""
    # log1p keeps the upper tail exact, where the winners are: the smallest uniform is 2**-33, a noise of 22.9.
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
