"""Shared by every test here: random models beside what Kestrel makes of their checkpoints."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # the oracle, which tests share


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny tensors are slower on several threads."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def load():
    """A function that builds a checkpoint directory the way the engine does, on the CPU."""
    import torch

    from kestrel.config import RuntimeConfig
    from kestrel.loading import SafetensorsReader, load_tokenizer, read_card
    from kestrel.ops import resolve_ops
    from kestrel.spi import BuildContext
    from kestrel_qwen import QwenFamily

    def build(path, dtype=torch.float32, **config):
        card = read_card("a/model", path)
        given = RuntimeConfig(model_path=path, **config)
        ctx = BuildContext(
            device=torch.device("cpu"),
            dtype=dtype,
            ops=resolve_ops(),
            weights=SafetensorsReader.of(card),
            tokenizer=lambda: load_tokenizer(given.tokenizer_path or card.directory),
            config=given,
        )
        return QwenFamily().build(card, ctx)

    return build


@pytest.fixture(scope="session")
def pair(load, tmp_path_factory):
    """A function from the name of a shape to ``hf``, ``driver``, ``prompt`` and ``directory`` of one random model."""
    from qwen_oracle import hf_model, write

    made = {}

    def of(shape):
        if shape not in made:
            hf = hf_model(shape)
            directory = write(hf, tmp_path_factory.mktemp("qwen"))
            built = load(directory)
            made[shape] = SimpleNamespace(hf=hf, driver=built.main, prompt=built.prompt, directory=directory)
        return made[shape]

    return of


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """The family's own tiny checkpoint, in the released layout."""
    from kestrel_qwen.tiny import write_tiny

    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, seed=0)
    return directory
