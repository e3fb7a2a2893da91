"""Norms of rows that are slices of something, without weights, and of the widest."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops import OPS
from kestrel_kernels_cuda.norms import WIDEST, add_norm, layer_norm, rms_norm


def drawn(place: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(place)


def test_rows_may_be_slices_of_a_projection(place: torch.device) -> None:
    packed, weight = drawn(place, 5, 3, 48), drawn(place, 48)
    for x in (packed[:, 1], packed[:, :2], packed.transpose(0, 1), packed[:, 1, ::2]):
        w = weight[: x.shape[-1]]
        torch.testing.assert_close(rms_norm(x, w), OPS["rms_norm"].reference(x, w))
        torch.testing.assert_close(layer_norm(x, w), OPS["layer_norm"].reference(x, w))


def test_a_norm_may_have_no_weight(place: torch.device) -> None:
    x = drawn(place, 3, 40)
    torch.testing.assert_close(rms_norm(x, None), OPS["rms_norm"].reference(x, None))
    for kind in ("rms", "layer"):
        got, want = add_norm(x, x, None, kind=kind), OPS["add_norm"].reference(x, x, None, kind=kind)
        torch.testing.assert_close(got, want)


def test_the_widest_row_is_normed_and_its_inputs_stay(place: torch.device) -> None:
    x, delta, weight, bias = (
        drawn(place, *shape) for shape in ((2, WIDEST), (2, WIDEST), (WIDEST,), (WIDEST,))
    )
    before = x.clone(), delta.clone()
    got = add_norm(x, delta, weight, bias, kind="layer")
    torch.testing.assert_close(got, OPS["add_norm"].reference(x, delta, weight, bias, kind="layer"))
    assert torch.equal(x, before[0])
    assert torch.equal(delta, before[1])


def test_a_row_is_the_same_bits_among_others_as_alone(place: torch.device) -> None:
    x, weight = drawn(place, 37, 96), drawn(place, 96)
    together = rms_norm(x, weight)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight)[0], together[i]) for i in (0, 11, 36))
