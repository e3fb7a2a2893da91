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


@pytest.mark.parametrize(
    ("missing", "words"),
    [("triton", "install triton>=3.6"), ("cuda", "built for ROCm"), ("capability", "the kernels need 8.0")],
)
def test_the_backend_steps_aside_where_triton_or_a_new_enough_nvidia_gpu_is_missing(
    missing: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if missing == "triton" else object()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(torch.version, "hip", "6.4" if missing == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")
    answer = CudaBackend().probe(torch.device("cuda"))
    assert isinstance(answer, Unavailable)
    assert words in answer.reason


UNIMPORTABLE = """
import sys; sys.modules["triton"] = None
from kestrel.ops import resolve_ops
from kestrel.spi import Available, OpQuery
from kestrel_kernels_cuda.backend import CudaBackend
CudaBackend.probe = lambda self, device: Available()
(row,) = resolve_ops([OpQuery.of("rope", dtype="float32")], backends=[CudaBackend()]).rows()
print(row.provider, row.rejected["cuda"], sep=": ")
"""


def test_the_reference_runs_where_the_kernels_cannot_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", UNIMPORTABLE], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("reference: failed (ModuleNotFoundError: ")
    assert "triton" in done.stdout


def test_the_plugin_imports_neither_torch_nor_triton() -> None:
    code = "import sys, kestrel_kernels_cuda.plugin; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_op_provided_is_one_that_core_defines() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    assert not set(CudaBackend().impls()) - set(OPS)
