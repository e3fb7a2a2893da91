"""Without a GPU, kernels run under Triton's interpreter, which has to be chosen before a kernel is defined."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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


def _multiply_bfloat16() -> None:
    """Let interpreted ``tl.dot`` take bfloat16, which Triton 3.6 keeps as bit patterns and multiplies as integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply: Any = interpreter.InterpreterBuilder.create_dot

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        wide = interpreter._convert_float(operand.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, widen(a), widen(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _round_to_e4m3() -> None:
    """Let interpreted kernels round float32 to e4m3 floats as devices do: Triton 3.6 loses carries, and rounds those
    below 2^-6 down."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float

    def rounded(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(numbers, source, target, mode)
        wide = torch.from_numpy(numbers.copy()).view(torch.float32).clamp(-448.0, 448.0)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded


if not torch.cuda.is_available():
    with contextlib.suppress(ImportError):  # without Triton, the tests of kernels are skipped
        _read_loop_bounds()
        _multiply_bfloat16()
        _round_to_e4m3()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Fresh random numbers in each run; pytest shows the seed of a test that fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    random.seed(seed)
    torch.manual_seed(seed)
    print(f"seed {seed}")


@pytest.fixture(scope="session")
def place() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def compiled_apart(tmp_path: Path) -> Callable[..., list[Any]]:
    """``compiled_apart(*words)``: what ``python *words`` prints, a JSON value per line, without the interpreter and
    with a cache of kernels that is empty. It must succeed."""

    def run(*words: str | Path) -> list[Any]:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
