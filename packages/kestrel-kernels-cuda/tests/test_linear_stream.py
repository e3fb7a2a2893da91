"""Products of a few rows on sm_90: which are served, and on such a GPU what the kernel computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops.linear import EPILOGUES, linear
from kestrel.ops.random import normal
from kestrel_kernels_cuda.devices import SHARED_LIMIT, Device, as_if
from kestrel_kernels_cuda.linear_config import BLAS, Config, _table, is_gated
from kestrel_kernels_cuda.linear_launch import Operands, config_for, launch

META = torch.device("meta")
PLAIN = Config(kernel="stream", bm=16, bn=64, bk=64, stages=4)
CONFIGS = {
    "plain": PLAIN,
    "tall tiles": replace(PLAIN, bn=128),
    "taller tiles of eight warps": replace(PLAIN, bn=256, warps=8, stages=3),
    "long blocks": replace(PLAIN, bk=128, stages=2),
    "more stages than blocks": replace(PLAIN, stages=9),
    "split unevenly": replace(PLAIN, split=3),
}
N, K = 840, 512

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90"
)


def operands(rows: int, epilogue: str | None, place: torch.device, dtype: torch.dtype) -> Operands:
    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return normal(int(torch.randint(2**31, ())), shape, place, dtype, scale=scale)

    adds = epilogue in ("residual", "accumulate")
    return Operands(
        x=draw(rows, K), weight=draw(N, K, scale=K**-0.5), bias=None if adds else draw(N),
        residual=draw(rows, N) if adds else None, epilogue=epilogue, norm=None,
    )  # fmt: skip


def shape_of(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty((rows, 2560), dtype=dtype, device=META), torch.empty(
        (12352, 2560), dtype=dtype, device=META
    )


def test_what_the_memory_unit_cannot_address_is_torchs() -> None:
    with as_if(Device(90)):
        x, weight = shape_of(16)
        assert config_for(x, weight, None).kernel == "stream"
        apart = torch.empty((16, 2564), dtype=torch.bfloat16, device=META)[:, :2560]
        assert config_for(apart, weight, None) == BLAS


def test_measured_configurations_fit_into_shared_memory_and_divide_the_inputs() -> None:
    for weight, buckets in _table()["90"].items():
        size, _, rest = weight.partition(" ")
        halves = 2 if rest == "gated" else 1
        for rows, fields in buckets.items():
            config = Config(**fields)
            if config.kernel == "stream":
                used = config.stages * (config.bk * 2 * (halves * config.bn + config.bm) + 8)
                assert used <= SHARED_LIMIT[90]
                assert int(size.split("x")[1]) % config.bk == 0
                assert config.split == 1 or halves == 1
                assert config.bm >= int(rows)


def assert_agrees(
    config: Config, rows: int, epilogue: str | None, place: torch.device, dtype: torch.dtype
) -> None:
    """The product is right, and the same bits twice."""
    o = operands(rows, epilogue, place, dtype)
    bias, residual = (None if t is None else t.float() for t in (o.bias, o.residual))
    want = linear(o.x.float(), o.weight.float(), bias, epilogue, residual)
    kept = None if o.residual is None else o.residual.clone()
    outs = []
    for _ in range(2):
        again = replace(o, residual=None if kept is None else kept.clone())
        started, out = launch(config, again, overlaps=True)
        started.run()
        outs.append(out)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(outs[0].float(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(*outs)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_configuration_computes_the_product(place: torch.device, config: Config) -> None:
    for bm, rows in ((8, 3), (16, 16), (32, 17), (64, 61)):
        assert_agrees(replace(config, bm=bm), rows, None, place, torch.bfloat16)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_epilogue_follows(place: torch.device, epilogue: str | None) -> None:
    assert_agrees(PLAIN, 11, epilogue, place, torch.float16)
    if not is_gated(epilogue):
        assert_agrees(replace(PLAIN, split=3), 11, epilogue, place, torch.bfloat16)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 64])
def test_a_captured_chain_gives_the_same_bits_as_separate_kernels(place: torch.device, rows: int) -> None:
    """Each product reads the one before it: any read too early shows."""
    up = normal(1, (4096, 1024), place, torch.bfloat16, scale=0.02)
    down = normal(2, (1024, 4096), place, torch.bfloat16, scale=0.02)
    start = normal(3, (rows, 1024), place, torch.bfloat16)
    config = Config(kernel="stream", bm=16 if rows <= 16 else 64, bn=64, bk=64, stages=4)

    def chain(overlaps: bool) -> torch.Tensor:
        x = start
        for _ in range(24):
            mid = Operands(x=x, weight=up, bias=None, residual=None, epilogue="gelu", norm=None)
            started, h = launch(config, mid, overlaps=overlaps)
            started.run()
            last = Operands(x=h, weight=down, bias=None, residual=x, epilogue="residual", norm=None)
            started, x = launch(replace(config, split=7), last, overlaps=overlaps)
            started.run()
        return x

    want = chain(overlaps=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(overlaps=True)
    for _ in range(20):
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [9, 16])
def test_partial_sums_are_added_up_with_what_follows(place: torch.device, rows: int) -> None:
    o = operands(rows, "residual", place, torch.float32)
    config = replace(PLAIN, split=3)
    (_, last), out = launch(config, o, overlaps=False)[0].parts, torch.empty_like(o.residual)
    partial = torch.randn(3, rows, N, device=place)
    into = (partial, *last.args[1:3], out, *last.args[4:])
    replace(last, args=into).run()
    torch.testing.assert_close(out, partial.sum(0) + o.residual, rtol=1e-5, atol=1e-5)
