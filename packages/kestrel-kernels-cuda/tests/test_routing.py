"""Routing of rows whose logits are no ordinary numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops import OPS
from kestrel_kernels_cuda.routing import moe_route


def test_equal_and_infinite_logits_go_as_the_reference_says(place: torch.device) -> None:
    logits = torch.randint(-2, 3, (40, 19)).float()
    logits[:, 3] = float("-inf")
    logits[5, 7:] = float("-inf")
    logits[6] = -0.0
    logits[6, 9] = 0.0
    logits = logits.to(place)
    (weights, experts), (want, chosen) = moe_route(logits, 9), OPS["moe_route"].reference(logits, 9)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's NumPy, of the NaN
def test_a_faulty_row_names_real_experts_and_spoils_only_its_own_weights(place: torch.device) -> None:
    logits = torch.randn(4, 12).to(place)
    clean = moe_route(logits, 3)
    logits[2] = float("nan")
    weights, experts = moe_route(logits, 3)
    assert ((experts >= 0) & (experts < 12)).all()
    assert weights[2].isnan().all()
    for row in (0, 1, 3):
        assert torch.equal(weights[row], clean[0][row])
