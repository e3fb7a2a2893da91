"""Where the backend runs and what it says elsewhere; that each module holds what the backend reads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kestrel.ops import OPS
from kestrel.spi import Unavailable
from kestrel_kernels_cuda.backend import CudaBackend


def test_the_backend_steps_aside_on_a_cpu() -> None:
    answer = CudaBackend().probe(torch.device("cpu"))
    assert isinstance(answer, Unavailable)
    assert "cpu" in answer.reason


def test_the_plugin_imports_neither_torch_nor_triton() -> None:
    code = "import sys, kestrel_kernels_cuda.plugin; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_op_provided_is_one_that_core_defines() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    assert not set(CudaBackend().impls()) - set(OPS)
