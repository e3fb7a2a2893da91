"""Angles of far positions."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel_kernels_cuda.angles import rope_angles


def test_cosines_of_the_furthest_positions_are_exact_to_float32(place: torch.device) -> None:
    positions = torch.tensor([[0, 1, 262_143, 1_048_575, 16_777_215]])
    freq = torch.tensor([1.0, -1.0, 0.7, 1e-3, 3.1e-7, -0.33])
    angle = (positions[0].unsqueeze(1) * freq).double()
    cos, sin = rope_angles(positions.to(place), freq.to(place))
    torch.testing.assert_close(cos.cpu().double(), angle.cos(), atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(sin.cpu().double(), angle.sin(), atol=1e-7, rtol=1e-7)
