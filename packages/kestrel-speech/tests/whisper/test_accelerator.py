"""The same transcriptions on an accelerator as on the CPU; run with ``-m gpu``."""

import pytest
import torch
from speech_engine import PLAIN
from whisper_oracle import noise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = {"device": "cuda", "dtype": "float32"}


@pytest.fixture(autouse=True)
def _exact_products():
    """Products in full float32, so that random weights choose the same ids."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("timestamps", ["none", "segment", "word"])
def test_text_and_times_are_those_of_the_cpu(transcribe, timestamps):
    samples = noise(1, 5.5)
    wanted = transcribe(samples, timestamps=timestamps).output
    got = transcribe(samples, timestamps=timestamps, config=CUDA).output
    assert got["text"] == wanted["text"]
    assert got["language"] == wanted["language"]
    for a, b in zip(got["segments"], wanted["segments"], strict=True):
        assert (a["text"], a["start"], a["end"]) == (b["text"], b["start"], b["end"])
        assert [w["word"] for w in a.get("words", ())] == [w["word"] for w in b.get("words", ())]


def test_many_files_at_once_give_what_each_gives_alone(transcribe):
    clips = [noise(seed, 2 + seed / 3) for seed in range(6)]
    together = transcribe(*clips, at_once=True, config=CUDA)
    alone = [transcribe(clip, config=CUDA) for clip in clips]
    assert [r.output["text"] for r in together] == [r.output["text"] for r in alone]


def test_the_ladder_draws_samples(transcribe):
    settings = {**PLAIN, "temperature": 0.8, "best_of": 3, "seed": 4, "max_tokens": 16}
    first, second = (transcribe(noise(2, 2.0), settings=settings, config=CUDA).output for _ in "ab")
    assert first["text"] == second["text"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_transcribes(transcribe, dtype):
    output = transcribe(noise(1, 5.5), timestamps="word", config={"device": "cuda", "dtype": dtype}).output
    assert output["text"]
    assert all(0 <= s["start"] <= s["end"] <= 5.5 for s in output["segments"])
