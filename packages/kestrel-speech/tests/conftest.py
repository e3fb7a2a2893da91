"""Shared by every test here: tiny checkpoints, the engine over them, and signals that stand for speech."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the oracles, which tests share


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny tensors are slower on several threads."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny random multilingual checkpoint."""
    from kestrel_speech.whisper.tiny import write_tiny

    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, seed=0)
    return directory
