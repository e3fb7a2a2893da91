"""Transcriptions by captured programs, with a stand-in that replays on the CPU: what they are op by op."""

import asyncio
from functools import partial

import pytest
from speech_engine import PLAIN, create
from whisper_oracle import noise

from kestrel.engine import decode_path
from kestrel.lanes import build
from kestrel.sampling import Sampler
from kestrel.testing.graphs import ReplayGraphs


@pytest.fixture
def graphs(monkeypatch):
    """What captures on the CPU, and sampling that looks at no value, as on a device that captures."""
    graphs = ReplayGraphs()
    monkeypatch.setattr(build, "Sampler", partial(Sampler, branch_free=True))
    monkeypatch.setattr(decode_path, "graphs_for", lambda device: graphs)
    return graphs


def heard(directory, clips, **config):
    """The texts of ``clips``, one after the other, and how many encoder programs there are then."""

    async def main():
        async with await create(directory, max_batch_size=2, **config) as engine:
            results = [
                await engine.transcribe(audio=clip, sample_rate=16_000, settings=PLAIN) for clip in clips
            ]
            lane = engine.fleet.slot(engine.models[0]).model.lane
            return [r.output["text"] for r in results], lane._board.runner._encoders.num_captured

    return asyncio.run(main())


def test_texts_and_cross_entries_come_out_of_programs_as_they_do_op_by_op(tiny_dir, graphs, caplog):
    clips = [noise(seed, 2.0 + seed / 4) for seed in range(4)]
    texts, captured = heard(tiny_dir, clips)
    assert captured
    assert "could not be captured" not in caplog.text
    assert heard(tiny_dir, clips, enable_cuda_graphs=False) == (texts, 0)
