"""A tiny model with prefill, decode and sampling as programs, played on the CPU: the answers of launches op by op."""

import asyncio
from functools import partial

import numpy as np
import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine, decode_path, prefill_path
from kestrel.lanes import build
from kestrel.ops import OpTable
from kestrel.plugins import PluginHost
from kestrel.runner import prefill_programs
from kestrel.sampling import Sampler
from kestrel.skills import builtin_skills
from kestrel.testing.graphs import ReplayGraphs
from kestrel_qwen import QwenFamily, plugin

SETTINGS = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def launched(monkeypatch):
    """What captured prefills brought, (tokens, chunks, checkpoints) each, once programs are captured here."""
    graphs, seen = ReplayGraphs(), []
    for module in (decode_path, prefill_path):
        monkeypatch.setattr(module, "graphs_for", lambda device: graphs)
    monkeypatch.setattr(OpTable, "eager_in", lambda table, program: [])
    monkeypatch.setattr(build, "Sampler", partial(Sampler, branch_free=True))
    monkeypatch.setattr(prefill_programs, "SIZES", (16, 128))
    launch = prefill_programs.PrefillPrograms.launch

    def spy(programs, arrays):
        seen.append((sum(arrays.lengths), len(arrays.lengths), len(arrays.stores)))
        return launch(programs, arrays)

    monkeypatch.setattr(prefill_programs.PrefillPrograms, "launch", spy)
    return seen


async def answers(directory, **config):
    host = PluginHost.from_modules({"qwen": plugin}, skills=builtin_skills())
    sizes = {"kv_cache_bytes": 2**24, "max_batch_size": 3, "max_model_len": 256, "max_batched_tokens": 128}
    given = RuntimeConfig(model_path=directory, device="cpu", **sizes, **config)
    pictures = [np.random.default_rng(i).integers(0, 256, (30, 44, 3), dtype=np.uint8) for i in range(2)]
    async with await InferenceEngine.create(given, plugins=host) as engine:
        calls = [
            engine.query(image=picture, question=question, settings=SETTINGS)
            for picture in pictures
            for question in ("what is it?", "where is it, and why?")
        ]
        results = await asyncio.gather(*calls, engine.query(question="and now?", settings=SETTINGS))
        return [result.tokens for result in results]


def test_programs_answer_as_launches_op_by_op_do(launched, tmp_path):
    QwenFamily().tiny().write(tmp_path, 1)
    expected = asyncio.run(answers(tmp_path, decode_path="native"))
    assert not launched
    assert asyncio.run(answers(tmp_path)) == expected
    assert any(chunks > 1 and stores > 1 for _, chunks, stores in launched)
    assert any(tokens not in prefill_programs.SIZES for tokens, _, _ in launched)
