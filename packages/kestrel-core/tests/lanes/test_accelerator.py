"""The lane on an accelerator: pinned copies, events, two steps in flight."""

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.lanes.build import build_token_lane
from kestrel.spi.decoding import Decoding
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import COORD, FakeTokenDriver, ToyHybrid, toy_media
from kestrel.types import Layout, Span

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")


def image(seed, tail):
    item = toy_media("image", seed, 5)
    return Layout(
        tokens=(4, *(0,) * 5, *tail),
        spans=(Span(1, 6, 0),),
        media=(item,),
        bidirectional=((0, 6),),
        marks=(6,),
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pages", [14, 64])
def test_an_accelerator_gives_what_the_oracle_gives(depth, deterministic, pages):
    driver = ToyHybrid(3, cross=True, device=CUDA)
    bench = Bench(driver, depth=depth, deterministic=deterministic, pages=pages, head_start=1, device=CUDA)
    layouts = [image(0, (7, 8)), image(0, (9,)), image(1, (7, 8)), Layout(tokens=tuple(range(4, 20)))]
    layouts.append(Layout(tokens=(4, 9), media=(toy_media("audio", 0, 4, positions=0),)))
    for _ in range(2):
        works = [bench.submit(layout, max_tokens=14) for layout in layouts]
        bench.run()
        for work_id, layout in zip(works, layouts, strict=True):
            assert bench.outcomes[work_id].ids == Expected(driver).ids(layout, 14)


def test_bins_logprobs_and_probes_come_back_from_an_accelerator():
    results = []
    for device in (torch.device("cpu"), CUDA):
        driver = ToyHybrid(7, aux=True, window=None, device=device)
        bench = Bench(driver, depth=2, device=device)
        settings = {"logit_bias": {COORD: 30.0}, "logprobs": True, "top_logprobs": 2}
        results.append(
            bench.generate(
                (4, 5, 6), decoding=Decoding(needs_aux=True), settings=settings, probes=((1, (5, 6)),)
            )
        )
    cpu, cuda = results
    assert cuda.ids == cpu.ids
    assert [token.aux for token in cuda.tokens] == [token.aux for token in cpu.tokens]
    assert cuda.finished.probes[0] == pytest.approx(cpu.finished.probes[0], abs=1e-4)
    for a, b in zip(cpu.tokens, cuda.tokens, strict=True):
        assert b.logprobs.logprob == pytest.approx(a.logprobs.logprob, abs=1e-4)


def test_a_lane_is_built_for_an_accelerator_with_two_steps_in_flight():
    lane = build_token_lane(
        FakeTokenDriver(device=CUDA),
        RuntimeConfig(max_batch_size=4),
        device=CUDA,
        dtype=torch.float16,
        kv_bytes=1 << 22,
        sink=lambda events: None,
    )
    assert lane.config.steps_in_flight == 2
