"""Moondream with products in 8 bits: the encoder and prefill take them, decode steps do not, answers stay."""

import asyncio

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.layers import pack_weights
from kestrel.ops import resolve_ops
from kestrel.testing.bare import BareLoop
from kestrel.types import Layout, Token
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.driver import MoondreamDriver
from kestrel_moondream.eight_bits import EightBits
from kestrel_moondream.model import MoondreamModel
from kestrel_moondream.tiny import TINY_CONFIG, random_weights

CONFIG = MoondreamConfig.from_mapping(TINY_CONFIG)


def tiny(prefill_dtype) -> MoondreamModel:
    model = MoondreamModel(CONFIG, resolve_ops(prefill_dtype=prefill_dtype), torch.float32, 16)
    model.load_state_dict(random_weights(CONFIG, 5))
    pack_weights(model)
    return model


def test_an_encoder_stays_close():
    whole, eight = tiny("auto").vision, tiny("float8_e4m3fn").vision
    crops = torch.randint(0, 256, (4, 28, 28, 3), dtype=torch.uint8)
    want, got = whole.encode(crops), eight.encode(crops)
    error = float((got - want).norm() / want.norm())
    assert 0 < error < 0.1


def test_prompts_are_multiplied_in_8_bits_and_decode_steps_are_not(spelled, monkeypatch):
    layers = []
    mlp = EightBits.mlp
    monkeypatch.setattr(EightBits, "mlp", lambda *given: (layers.append(1), mlp(*given))[1])
    driver = MoondreamDriver(CONFIG, tiny("float8_e4m3fn"), spelled, torch.device("cpu"))
    loop = BareLoop(driver)
    sequences = [loop.open(Layout(tokens=(5 + i, 6, 7))) for i in range(3)]
    loop.prefill(sequences)
    assert len(layers) == CONFIG.text.n_layers
    for sequence in sequences:
        sequence.output.append(Token(id=8))
    loop.launch([(sequence, 1) for sequence in sequences])
    assert len(layers) == CONFIG.text.n_layers


@pytest.mark.timeout(120)
def test_nano_answers_the_same_in_8_bits() -> None:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (196, 196), "white")
    ImageDraw.Draw(picture).ellipse((40, 40, 150, 150), fill="red")

    async def answers(**config):
        settings = RuntimeConfig(model="kestrel/nano", device="cpu", dtype="float32", **config)
        async with await InferenceEngine.create(settings) as engine:
            asked = ("What shape is there?", "What color is the circle?")
            return [
                (await engine.query(picture, text, settings={"temperature": 0.0})).tokens for text in asked
            ]

    assert asyncio.run(answers()) == asyncio.run(answers(prefill_dtype="fp8_e4m3"))
