"""Encoder features of media items, shared between the sequences that show the same item."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

__all__ = ["FeaturePool", "Features"]


@dataclass(eq=False, slots=True)
class Features:
    """Rows ``start`` to ``start + rows`` of the pool's tensor, held by ``refs`` sequences."""

    key: Hashable
    start: int
    rows: int
    refs: int = 1


class FeaturePool:
    """One [rows, C] tensor of features by (digest, adapter load); the least recently used leave first."""

    tensor: torch.Tensor

    def __init__(self, rows: int, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def find(self, key: Hashable) -> Features | None:
        """The features of ``key``, held until ``release``; None when they must be encoded."""
        raise NotImplementedError

    def allocate(self, key: Hashable, rows: int) -> Features | None:
        """A place for ``rows`` features of ``key``, held until ``release``; None when what others hold leaves none."""
        raise NotImplementedError

    def write(self, features: Features, x_RC: torch.Tensor) -> None:
        """Store encoded rows at their place."""
        raise NotImplementedError

    def put(self, key: Hashable, x_RC: torch.Tensor) -> Features | None:
        """``allocate`` and ``write``."""
        raise NotImplementedError

    def release(self, features: Features) -> None:
        """Give a hold back. The features stay until their rows are needed."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError unless entries and free ranges tile the tensor."""
        raise NotImplementedError
