"""A small model on an accelerator, its prefill, decode and encoder captured: the answers of launches op by op."""

import asyncio

import numpy as np
import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel_qwen.tiny import TINY_CONFIG, write_tiny

pytestmark = pytest.mark.gpu

SETTINGS = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
WORDS = "what is it, where is it, and why should that be so, if anybody may ask? "


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint with the head dims of published ones, so that every kernel serves it."""
    text = TINY_CONFIG["text_config"] | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": TINY_CONFIG["text_config"]["rope_parameters"]
        | {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    }
    vision = TINY_CONFIG["vision_config"] | {"out_hidden_size": 256}
    path = tmp_path_factory.mktemp("model")
    write_tiny(path, 3, TINY_CONFIG | {"text_config": text, "vision_config": vision})
    return path


async def answers(directory, **config):
    """Tokens of every call, and for how many tokens prefill is captured."""
    sizes = {"kv_cache_bytes": 2**28, "max_batch_size": 8, "max_model_len": 2048, "max_batched_tokens": 512}
    given = RuntimeConfig(model_path=directory, device="cuda", dtype="float32", **sizes, **config)
    pictures = [np.random.default_rng(i).integers(0, 256, (30, 44, 3), dtype=np.uint8) for i in range(3)]
    async with await InferenceEngine.create(given) as engine:
        results = []
        for count in (1, 3, 9):
            calls = [
                engine.query(image=picture, question=WORDS * count, settings=SETTINGS) for picture in pictures
            ]
            calls += [engine.query(question=WORDS * (count + i), settings=SETTINGS) for i in range(3)]
            results += await asyncio.gather(*calls)
        lane = engine.fleet.slot(engine.fleet.default_id).model.lane
        return [result.tokens for result in results], lane.captured_prefills


def test_programs_answer_as_launches_op_by_op_do(directory):
    expected, sizes = asyncio.run(answers(directory, decode_path="native"))
    assert not sizes
    found, sizes = asyncio.run(answers(directory, decode_path="generated"))
    assert sizes == (128, 256, 512)
    assert found == expected


def test_two_runs_of_programs_agree(directory):
    first, _ = asyncio.run(answers(directory))
    second, _ = asyncio.run(answers(directory))
    assert first == second


def test_pages_of_eight_bits_are_captured_and_served_by_kernels(directory):
    given = {"kv_cache_dtype": "fp8_e4m3", "strict_ops": True, "decode_path": "generated"}
    found, sizes = asyncio.run(answers(directory, **given))
    assert sizes == (128, 256, 512)
    whole, _ = asyncio.run(answers(directory))
    firsts = [a[0] == b[0] for a, b in zip(found, whole, strict=True)]
    assert sum(firsts) > 0.8 * len(firsts)  # of what comes from the prefix cache, keys are rounded
