"""Products in every way the kernels can be configured, and the choice among the ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops.linear import ROW_BUCKETS, linear
from kestrel.ops.norm_linear import norm_linear
from kestrel.spi import No, OpQuery, Yes
from kestrel_kernels_cuda.linear import IMPLS, supports_norm
from kestrel_kernels_cuda.linear_blas import product
from kestrel_kernels_cuda.linear_config import Config, Product, _table, choose, default
from kestrel_kernels_cuda.linear_launch import Norm, Operands, arch_of, launch
from kestrel_kernels_cuda.linear_pair import IMPLS as PAIRS
from kestrel_kernels_cuda.linear_scratch import counters

GEMM = Config(kernel="gemm", bm=16, bn=16, bk=32, stages=2)
CONFIGS = {
    "gemv": Config(kernel="gemv", bn=4, bk=64),
    "gemv whose last tile is partly empty": Config(kernel="gemv", bn=8, bk=128),
    "gemm": GEMM,
    "gemm with the weight on the left": replace(GEMM, swap=True, bn=32),
    "gemm of two bands": replace(GEMM, bm=8),
    "split": replace(GEMM, split=3),
    "tiles by the tensor memory unit": replace(GEMM, tma=True, split=2, bn=32, swap=True),
    "split unevenly": replace(GEMM, split=2, swap=True, bk=64),
}
K, N = 224, 44


def _operands(place: torch.device, rows: int, epilogue: str | None, norm: str | None) -> Operands:
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(int(torch.seed() % 2**31))

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(place, dtype)

    wide = draw(rows, K + 16)  # rows that do not lie side by side
    return Operands(
        x=wide[:, :K],
        weight=draw(N, K, scale=K**-0.5),
        bias=draw(N) if epilogue not in ("residual", "accumulate") else None,
        residual=draw(rows, N) if epilogue in ("residual", "accumulate") else None,
        epilogue=epilogue,
        norm=Norm(kind=norm, gain=draw(K), shift=draw(K) if norm == "layer" else None, eps=1e-5)
        if norm
        else None,
    )


def _reference(o: Operands) -> torch.Tensor:
    if o.norm is None:
        return linear(o.x, o.weight, o.bias, o.epilogue, o.residual)
    norm = {"kind": o.norm.kind, "gain": o.norm.gain, "shift": o.norm.shift, "eps": o.norm.eps}
    return norm_linear(o.x, o.weight, o.bias, o.epilogue, o.residual, **norm)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("epilogue", [None, "gelu", "silu_mul", "gelu_tanh_mul", "residual"])
def test_every_configuration_computes_the_product(
    place: torch.device, config: Config, epilogue: str | None
) -> None:
    operands = _operands(place, 1 if config.kernel == "gemv" else 13, epilogue, None)
    started, out = launch(config, operands, overlaps=False)
    started.run()
    tolerance = 1e-4 if place.type == "cpu" else 5e-2
    torch.testing.assert_close(out, _reference(operands), rtol=tolerance, atol=tolerance)
    again, repeated = launch(config, operands, overlaps=False)
    again.run()
    assert torch.equal(out, repeated)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.kernel == "gemv"])
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer"])
def test_products_of_one_row_take_the_norm_before_them(place: torch.device, name: str, kind: str) -> None:
    operands = _operands(place, 1, "silu_mul", kind)
    started, out = launch(CONFIGS[name], operands, overlaps=False)
    started.run()
    tolerance = 1e-4 if place.type == "cpu" else 8e-2
    torch.testing.assert_close(out, _reference(operands), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("epilogue", [None, "gelu_tanh", "gelu", "silu_mul", "gelu_tanh_mul", "residual"])
def test_products_of_many_rows_are_torchs_with_the_epilogue_after(
    place: torch.device, epilogue: str | None
) -> None:
    o = _operands(place, 300, epilogue, None)
    kept = None if o.residual is None else o.residual.clone()
    tolerance = 1e-4 if place.type == "cpu" else 5e-2
    got = product(o.x, o.weight, o.bias, epilogue, o.residual)
    torch.testing.assert_close(got, _reference(o), rtol=tolerance, atol=tolerance)
    assert kept is None or torch.equal(kept, o.residual)


@pytest.mark.parametrize("rows", [2, 300])
def test_outputs_whose_rows_are_not_aligned_are_torchs_as_well(place: torch.device, rows: int) -> None:
    o = _operands(place, rows, None, None)
    weight = o.weight.repeat(100, 1)[:4301]
    got = product(o.x, weight, None, None, None)
    assert got.shape == (rows, 4301)
    tolerance = 1e-4 if place.type == "cpu" else 5e-2
    torch.testing.assert_close(got, linear(o.x, weight), rtol=tolerance, atol=tolerance)


def test_inputs_in_odd_numbers_are_padded_for_many_rows(place: torch.device) -> None:
    o = _operands(place, 2, None, None)
    x, weight = o.x[:1, :22].expand(4100, 22), o.weight[:, :22]
    tolerance = 1e-4 if place.type == "cpu" else 5e-2
    got = product(x, weight, o.bias, None, None)
    torch.testing.assert_close(got, linear(x, weight, o.bias), rtol=tolerance, atol=tolerance)


def test_leading_axes_are_kept(place: torch.device) -> None:
    o = _operands(place, 6, "silu_mul", None)
    x = o.x.contiguous().view(2, 3, K)
    assert IMPLS["linear"].fn(x, o.weight, o.bias, "silu_mul", None).shape == (2, 3, N // 2)


def test_counters_are_back_at_zero_after_a_split_product(place: torch.device) -> None:
    started, _ = launch(CONFIGS["split"], _operands(place, 13, None, None), overlaps=False)
    counted = started.args[9]
    started.run()
    assert not counted.any()
    assert not counters(place, 4).any()


def test_the_choice_depends_on_nothing_of_the_rows_but_their_bucket() -> None:
    """Launches padded to a fixed number of rows, as deterministic ones are, always run the same kernel."""
    for bucket in ROW_BUCKETS:
        smallest = max((b for b in ROW_BUCKETS if b < bucket), default=0) + 1
        chosen = {choose(Product.of(12352, 2560, rows, None), 90) for rows in (smallest, bucket)}
        assert len(chosen) == 1


@pytest.mark.parametrize("n", [1, 32, 1024, 2560, 12352, 248320])
@pytest.mark.parametrize("k", [256, 2560, 9216])
@pytest.mark.parametrize("rows", [*ROW_BUCKETS, 0])
def test_rules_of_thumb_give_tiles_that_kernels_take(n: int, k: int, rows: int) -> None:
    for gated, wide in ((False, False), (True, False), (False, True)):
        config = default(Product(n=2 * n if gated else n, k=k, rows=rows, gated=gated, wide=wide))
        if config.kernel == "blas":
            continue
        _check(config)
        assert config.kernel == ("gemv" if rows == 1 else "gemm")


def test_measured_configurations_are_ones_that_kernels_take() -> None:
    for weights in _table().values():
        for buckets in weights.values():
            for rows, fields in buckets.items():
                assert int(rows) in (*ROW_BUCKETS, 0)
                config = Config(**fields)
                if config.kernel != "blas":
                    _check(config)


def _check(config: Config) -> None:
    for size in (config.bm, config.bn, config.bk, config.warps):
        assert size & (size - 1) == 0


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        ({"rows": 1, "dtype": "bfloat16"}, Yes),
        ({"rows": 16, "dtype": "bfloat16"}, No),
        ({"rows": 0, "dtype": "bfloat16"}, No),
        ({"rows": 1, "dtype": "float64"}, No),
    ],
)
def test_norm_and_product_are_one_for_one_row(facts: dict[str, object], answer: type) -> None:
    query = OpQuery.of("norm_linear", n=12352, k=2560, kind="rms", epilogue=None, **facts)
    assert isinstance(supports_norm(query), answer)


def test_a_warm_up_compiles_what_launches_will_run_and_no_more() -> None:
    facts = {"n": 2560, "k": 9216, "epilogue": "residual", "dtype": "bfloat16"}
    jobs = {
        rows: list(IMPLS["linear"].warm(OpQuery.of("linear", rows=rows, **facts), [1, 7, 300]))
        for rows in (1, 8, 16, 0)
    }
    assert [bool(jobs[rows]) for rows in (1, 8, 16, 0)] == [True, True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_overlapping_kernels_give_what_separate_ones_give(place: torch.device, rows: int) -> None:
    """A chain in which each product reads the one before it, captured and replayed: any read too early shows."""
    if arch_of(place) < 90:
        pytest.skip("kernels overlap on sm_90 and newer")
    up, down = (
        torch.randn(size, device=place, dtype=torch.bfloat16) / 64 for size in ((8192, 2048), (2048, 8192))
    )
    start = torch.randn(rows, 2048, device=place, dtype=torch.bfloat16)
    gain = torch.ones(2048, device=place, dtype=torch.bfloat16)

    def chain(overlaps: bool) -> torch.Tensor:
        x = start
        for _ in range(24):
            norm = Norm(kind="rms", gain=gain, shift=None, eps=1e-6) if rows == 1 else None
            config = default(Product.of(8192, 2048, rows, None))
            mid = Operands(x=x, weight=up, bias=None, residual=None, epilogue="gelu", norm=norm)
            started, h = launch(config, mid, overlaps=overlaps)
            started.run()
            last = Operands(x=h, weight=down, bias=None, residual=x, epilogue="residual", norm=None)
            started, x = launch(default(Product.of(2048, 8192, rows, "residual")), last, overlaps=overlaps)
            started.run()
        return x

    want = chain(overlaps=False)
    assert torch.equal(chain(overlaps=True), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(overlaps=True)
    for _ in range(20):
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize("dense", [True, False])
def test_accumulating_products_write_over_their_residual(place: torch.device, rows: int, dense: bool) -> None:
    o = _operands(place, rows, "accumulate", None)
    wide = torch.randn(rows, N + 4, device=place).to(o.x.dtype)
    into = o.residual if dense else wide[:, :N]
    assert into is not None
    want = linear(o.x, o.weight, None, "residual", into)
    got = IMPLS["linear"].fn(o.x, o.weight, None, "accumulate", into)
    assert got is into
    tolerance = 1e-4 if place.type == "cpu" else 5e-2
    torch.testing.assert_close(into, want, rtol=tolerance, atol=tolerance)


def test_two_products_of_no_rows_are_empty(place: torch.device) -> None:
    x, weight, bias = (torch.zeros(size, device=place) for size in ((0, 8), (6, 8), 6))
    pair = PAIRS["linear_pair"].fn(x, weight, bias, weight, bias, "gelu_tanh", bias, bias, 1e-5)
    assert [y.shape for y in pair] == [(0, 6), (0, 6)]
    assert PAIRS["linear_sum"].fn(x, weight, bias, x, weight, bias, x.new_zeros(0, 6)).shape == (0, 6)
