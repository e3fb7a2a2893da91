"""Sorting pairs by expert, and both ways through the experts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops import OPS
from kestrel_kernels_cuda.experts import FEW_PAIRS, grouped_experts
from kestrel_kernels_cuda.experts_sort import sort_launches


@pytest.mark.parametrize(
    ("pairs", "experts", "block"), [(1, 1, 16), (300, 7, 16), (129, 40, 64), (520, 3, 128)]
)
def test_tiles_cover_every_pair_once_under_its_own_expert(
    pairs: int, experts: int, block: int, place: torch.device
) -> None:
    chosen = torch.randint(0, experts, (pairs,)).to(place)
    chosen[chosen == 1] = 0  # an expert that nobody names
    launches, result = sort_launches(chosen, experts, block)
    for launch in launches:
        launch.run()
    order = result.order_P.cpu()
    assert torch.equal(order.long(), chosen.cpu().sort(stable=True).indices)
    seen: list[int] = []
    rows = (result.tile_expert_M, result.tile_row_M, result.tile_end_M)
    for expert, row, end in zip(*(x.tolist() for x in rows), strict=True):
        if expert >= 0:
            mine = order[row : min(row + block, end)]
            assert len(mine)
            assert (chosen.cpu()[mine.long()] == expert).all()
            seen += mine.tolist()
    assert sorted(seen) == list(range(pairs))


@pytest.mark.parametrize("tokens", [FEW_PAIRS // 2, 70])
def test_few_and_many_pairs_agree_with_the_reference(tokens: int, place: torch.device) -> None:
    x, weights = torch.randn(tokens, 40), torch.rand(tokens, 2)
    chosen = torch.rand(tokens, 5).topk(2).indices
    gate_up, down = torch.randn(5, 2 * 24, 40) * 0.2, torch.randn(5, 40, 24) * 0.2
    args = [a.to(place) for a in (x, weights, chosen, gate_up, down)]
    got, want = grouped_experts(*args), OPS["grouped_experts"].reference(*args)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_tokens_may_be_slices_and_a_row_alone_is_close_to_one_among_many(place: torch.device) -> None:
    packed = torch.randn(60, 2, 32).to(place)
    x, chosen = packed[:, 1], torch.randint(0, 4, (60, 2)).to(place)
    weights, gate_up, down = torch.rand(60, 2), torch.randn(4, 16, 32) * 0.2, torch.randn(4, 32, 8) * 0.2
    weights, gate_up, down = (a.to(place) for a in (weights, gate_up, down))
    together = grouped_experts(x, weights, chosen, gate_up, down)
    alone = grouped_experts(x[7:8], weights[7:8], chosen[7:8], gate_up, down)
    torch.testing.assert_close(alone[0], together[7], atol=2e-5, rtol=2e-5)
