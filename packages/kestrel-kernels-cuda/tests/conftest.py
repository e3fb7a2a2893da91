"""Without a GPU, kernels run under Triton's interpreter, which has to be chosen before a kernel is defined."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _read_loop_bounds() -> None:
    """Let interpreted loops have bounds that are known at run time.

    Triton 3.6 makes an index of an array of one element by ``int``, which NumPy 2.4 refuses.
    """
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    with contextlib.suppress(ImportError):  # without Triton, the tests of kernels are skipped
        _read_loop_bounds()


@pytest.fixture(scope="session")
def place() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
