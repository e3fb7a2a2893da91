"""Without a GPU, kernels run under Triton's interpreter, which has to be chosen before a kernel is defined."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def place() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
