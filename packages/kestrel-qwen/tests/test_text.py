"""The decoder against transformers: prefill logits and greedy continuations, for every shape of model."""

import pytest
import torch
from qwen_oracle import SHAPES, greedy, logits

from kestrel.config import Settings
from kestrel.spi import Decoding
from kestrel.testing.bare import BareLoop
from kestrel.types import Tokens

FREE = Settings(temperature=0.0, ignore_eos=True)


def prompt(length, seed=0, low=20):
    return torch.randint(low, 288, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def every_logit(driver, ids, chunk=None):
    """Logits [n, V] of a prompt prefilled in chunks."""
    loop = BareLoop(driver, max_rows=1, max_len=len(ids))
    sequence = loop.open(driver.layout([Tokens(tuple(ids))]))
    hidden = []
    while sequence.computed < len(ids):
        left = len(ids) - sequence.computed
        hidden.append(loop.launch([(sequence, min(chunk or left, left))]))
    return driver.logits(torch.cat(hidden))


def assert_close(got, want, share=1e-4):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= share * (want.max() - want.min())


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_logits_are_those_of_transformers(pair, shape):
    model = pair(shape)
    ids = prompt(150)
    assert_close(every_logit(model.driver, ids), logits(model.hf, ids))


@pytest.mark.parametrize(("shape", "length"), [*((shape, 61) for shape in SHAPES), ("dense", 1)])
def test_greedy_text_is_that_of_transformers(pair, shape, length):
    model = pair(shape)
    ids = prompt(length, seed=length)
    loop = BareLoop(model.driver, max_rows=1, max_len=256)
    (tokens,) = loop.run([model.driver.layout([Tokens(tuple(ids))])], [Decoding()], FREE, max_tokens=64)
    assert [t.id for t in tokens] == greedy(model.hf, ids, 64)


@pytest.mark.parametrize("shape", ["dense", "moe"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_show(pair, shape, chunk):
    driver = pair(shape).driver
    ids = prompt(130)
    assert_close(every_logit(driver, ids, chunk), every_logit(driver, ids))


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_sequences_run_together_are_those_run_alone(pair, shape):
    driver = pair(shape).driver
    layouts = [driver.layout([Tokens(tuple(prompt(n, seed=n)))]) for n in (1, 5, 16, 33, 90)]

    def run(picked):
        loop = BareLoop(driver, max_rows=len(picked), max_len=160)
        return loop.run(picked, [Decoding()] * len(picked), FREE, max_tokens=24)

    assert run(layouts) == [run([layout])[0] for layout in layouts]


def test_bfloat16_stays_near_float32(pair, load):
    """Hidden states pass five layers of 16-bit sums: within 5 % of their size."""
    model = pair("dense")
    half = load(model.directory, dtype=torch.bfloat16).main
    ids = tuple(prompt(20))
    hidden = []
    for driver, dtype in ((model.driver, torch.float32), (half, torch.bfloat16)):
        loop = BareLoop(driver, max_rows=1, max_len=32, dtype=dtype)
        hidden.append(loop.launch([(loop.open(driver.layout([Tokens(ids)])), len(ids))]))
    assert hidden[1].dtype == torch.bfloat16
    assert (hidden[1].float() - hidden[0]).norm() <= 5e-2 * hidden[0].norm()
