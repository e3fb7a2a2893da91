"""Products in 8 bits: close to the ones that they stand for, and scales that nothing exceeds."""

import math

import pytest
import torch

from kestrel.layers import E4M3Cast, E4M3Linear, E4M3Norm, LayerNorm, Linear
from kestrel.ops import resolve_ops
from kestrel.ops.e4m3 import LARGEST, e4m3_norm

OPS = resolve_ops(prefill_dtype="float8_e4m3fn")
C, N = 64, 48


@pytest.fixture
def layers():
    torch.manual_seed(0)
    norm, linear = LayerNorm(OPS, C), Linear(OPS, C, N)
    for parameter in (norm.weight, norm.bias, linear.weight, linear.bias):
        parameter.normal_()
    return norm, linear


def test_a_product_of_a_norm_is_close_to_the_one_in_full(layers):
    norm, linear = layers
    eight, product = E4M3Norm(OPS, norm), E4M3Linear(OPS, linear, adds_bias=True)
    product.of_norm(eight)
    x, delta = torch.randn(200, C), torch.randn(200, C)
    total, values = eight(x, delta)
    assert torch.equal(total, x + delta)
    want, got = linear(norm(x + delta)), product(values)
    assert float((got - want).norm() / want.norm()) < 0.05


def test_no_output_exceeds_its_bound_even_for_the_input_that_is_made_to(layers):
    norm, linear = layers
    eight, product = E4M3Norm(OPS, norm), E4M3Linear(OPS, linear, adds_bias=True)
    bounds = product.of_norm(eight)
    worst = linear.weight * norm.weight  # along each row of the weight: what Cauchy and Schwarz allow
    outputs = linear(norm(torch.cat([worst, -worst, torch.randn(50, C)])))
    assert bool((outputs.abs() <= bounds * 1.0001).all())
    assert float((outputs.abs() / bounds).max()) > 0.8


def test_what_is_cast_keeps_its_precision_far_below_the_bound(layers):
    _, linear = layers
    cast, product = E4M3Cast(OPS, C, "gelu_tanh"), E4M3Linear(OPS, linear, adds_bias=False)
    x = torch.randn(100, C)
    errors = []
    for bound in (5.0, 500.0):
        cast.bound = bound
        product.of_cast(cast)
        want = torch.nn.functional.gelu(x, approximate="tanh") @ linear.weight.T
        errors.append(float((product(cast(x)) - want).norm() / want.norm()))
    assert max(errors) < 0.05


def test_a_row_of_one_spike_is_the_largest_that_a_norm_gives():
    spike = torch.zeros(1, C)
    spike[0, 3] = 1e4
    _, values = e4m3_norm(spike)
    assert float(values.float().max()) == pytest.approx(LARGEST * math.sqrt((C - 1) / C), rel=0.07)
