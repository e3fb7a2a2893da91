"""Random inputs of cases: drawn on the CPU, so that a seed means the same numbers on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["normal", "uniform"]


def normal(
    seed: int, shape: Sequence[int], device: torch.device, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Normal numbers of standard deviation ``scale``."""
    drawn = torch.randn(
        tuple(shape), generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32
    )
    return (drawn * scale).to(device=device, dtype=dtype)


def uniform(
    seed: int,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    low: float = 0.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Numbers spread evenly over [``low``, ``high``)."""
    drawn = torch.rand(
        tuple(shape), generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32
    )
    return (drawn * (high - low) + low).to(device=device, dtype=dtype)
