"""Products that read their weights as float16 give what float32 ones give, row by row."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from whisper_oracle import noise

from kestrel.layers import LayerNorm, Linear
from kestrel.ops import resolve_ops
from kestrel_speech.whisper import build
from kestrel_speech.whisper.halves import HalfLinear, halve


def linear(ins, outs, *, epilogue=None, bias=True, exact=True):
    made = Linear(resolve_ops(), ins, outs, epilogue=epilogue, bias=bias)
    generator = torch.Generator().manual_seed(ins)
    for parameter in made.parameters():
        values = torch.randn(parameter.shape, generator=generator) * ins**-0.5
        parameter.copy_(values.half().float() if exact else values)
    return made


@pytest.fixture(autouse=True)
def _has_halves():
    if HalfLinear.of(linear(8, 8)) is None:
        pytest.skip("this torch has no products with float16 weights")


@pytest.mark.parametrize("epilogue", [None, "gelu", "residual"])
@pytest.mark.parametrize(("ins", "outs", "bias"), [(64, 192, True), (37, 22, False), (512, 5, True)])
def test_products_are_those_of_float32_whatever_the_rows(epilogue, ins, outs, bias):
    plain = linear(ins, outs, epilogue=epilogue, bias=bias)
    half = HalfLinear.of(plain)
    x, residual = torch.randn(40, ins), torch.randn(40, outs)
    given = (residual,) if epilogue == "residual" else ()
    together = half(x, *given)
    torch.testing.assert_close(together, plain(x, *given), atol=2e-5, rtol=2e-5)
    assert torch.equal(
        half(x.view(2, 20, ins), *(r.view(2, 20, outs) for r in given)).view(40, outs), together
    )
    for row in range(40):
        alone = half(x[row : row + 1], *(r[row : row + 1] for r in given))
        assert torch.equal(alone, together[row : row + 1])


def test_a_norm_may_be_left_to_the_product():
    half, norm, x = HalfLinear.of(linear(16, 16)), LayerNorm(resolve_ops(), 16), torch.randn(3, 16)
    assert torch.equal(half(norm.defer(x)), half(norm(x)))


def test_inputs_stay_as_they_are():
    half = HalfLinear.of(linear(16, 16, epilogue="residual"))
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    kept = x.clone(), residual.clone()
    half(x, residual)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_the_smallest_float16_numbers_are_kept():
    plain = linear(4, 4, bias=False)
    plain.weight.copy_(torch.tensor([2.0**-24, 1.5 * 2.0**-15, 65504.0, -1.0]).expand(4, 4))
    half = HalfLinear.of(plain)
    assert half is not None
    assert torch.equal(half(torch.eye(4)), plain(torch.eye(4)))


def test_other_numbers_stay_in_float32():
    assert HalfLinear.of(linear(8, 8, exact=False)) is None
    large = linear(8, 8)
    large.weight[0, 0] = 2.0**17
    assert HalfLinear.of(large) is None
    broken = linear(8, 8)
    broken.weight[0, 0] = torch.nan
    assert HalfLinear.of(broken) is None
    assert HalfLinear.of(Linear(resolve_ops(), 8, 8, dtype=torch.bfloat16)) is None


def test_every_layer_that_can_be_is_replaced():
    module = nn.ModuleList([nn.ModuleList([linear(8, 8), linear(8, 8, exact=False)]), linear(8, 16)])
    assert halve(module) == 2
    assert [isinstance(m, HalfLinear) for m in (module[0][0], module[0][1], module[1])] == [True, False, True]


@pytest.fixture(scope="module")
def halves_dir(tiny_dir, tmp_path_factory):
    """The tiny checkpoint, its weights rounded to float16 and stored as float32."""
    directory = tmp_path_factory.mktemp("halves")
    for file in tiny_dir.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    save_file({k: v.half().float() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def test_a_checkpoint_of_float16_numbers_says_the_same(transcribe, halves_dir, monkeypatch):
    counts = []
    monkeypatch.setattr(build, "halve", lambda model: counts.append(halve(model)) or counts[-1])
    clips = [noise(seed, 2.9) for seed in (1, 2)]
    options = {"language": "de", "timestamps": "word", "directory": halves_dir}
    ours = transcribe(*clips, **options)
    monkeypatch.setattr(build, "halve", lambda model: 0)
    plain = transcribe(*clips, **options)
    assert counts == [2 * 4 + 2 * 7 + 1], "all linears of two layers each, and the head"
    for a, b in zip(ours, plain, strict=True):
        assert a.tokens == b.tokens
        assert a.output["avg_logprob"] == pytest.approx(b.output["avg_logprob"], abs=1e-3)


def test_many_files_at_once_give_what_each_gives_alone(transcribe, halves_dir):
    clips = [np.concatenate([noise(seed, 2.0)] * 2) for seed in range(20, 25)]
    together = transcribe(*clips, at_once=True, directory=halves_dir)
    alone = [transcribe(clip, directory=halves_dir) for clip in clips]
    assert [r.output for r in together] == [r.output for r in alone]
