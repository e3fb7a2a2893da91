"""Shared by every test here: tiny checkpoints, the engine over them, and transformers beside it."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the oracle, which tests share
sys.path.insert(0, str(Path(__file__).parents[1]))  # realweights, a tool beside the package


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny tensors are slower on several threads."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny random multilingual checkpoint whose windows last 3 s."""
    from kestrel_speech.whisper.tiny import write_tiny

    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, seed=1)
    return directory


@pytest.fixture(scope="session")
def oracle(tiny_dir):
    """transformers over the same checkpoint."""
    pytest.importorskip("transformers")
    from whisper_oracle import Oracle

    return Oracle(tiny_dir)


@pytest.fixture(scope="session")
def built(tiny_dir):
    """The tiny checkpoint, built the way the engine does, on the CPU."""
    import torch

    from kestrel.config import RuntimeConfig
    from kestrel.loading import SafetensorsReader, load_tokenizer, read_card
    from kestrel.ops import resolve_ops
    from kestrel.spi import BuildContext
    from kestrel_speech import WhisperFamily

    card = read_card("a/model", tiny_dir)
    ctx = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        ops=resolve_ops(),
        weights=SafetensorsReader.of(card),
        tokenizer=lambda: load_tokenizer(card.directory),
        config=RuntimeConfig(model_path=tiny_dir),
    )
    return WhisperFamily().build(card, ctx)


@pytest.fixture
def transcribe(tiny_dir):
    """A function that transcribes samples in a fresh engine: one call's result, or a list for a list of calls."""

    from speech_engine import PLAIN, create

    def run(*calls, at_once=False, directory=tiny_dir, config=None, **options):
        async def main():
            async with await create(directory, **(config or {})) as engine:

                def job(samples, extra):
                    given = {"sample_rate": 16_000, **options, **extra}
                    settings = {**PLAIN, **given.pop("settings", {})}
                    return engine.transcribe(audio=samples, settings=settings, **given)

                jobs = [job(*(call if isinstance(call, tuple) else (call, {}))) for call in calls]
                if at_once:
                    return await asyncio.gather(*jobs)
                return [await job for job in jobs]

        results = asyncio.run(main())
        return results[0] if len(calls) == 1 else results

    return run
