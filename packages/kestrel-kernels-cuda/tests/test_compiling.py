"""Every kernel in every configuration compiles for the architectures it is meant for, within their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel_kernels_cuda.compiling import SHARED_LIMIT


@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_shared_memory_and_without_spills(
    compiled_apart: Callable[..., list[Any]],
) -> None:
    found = compiled_apart("-m", "kestrel_kernels_cuda.compiling")  # fails when a case does not compile
    assert found
    big = [f for f in found if f["shared"] > SHARED_LIMIT[f["arch"]]]
    assert not big, big
    spilled = [f for f in found if f["stack"] > f["allowed"] or f["local"]]
    assert not spilled, spilled
    faulty = [f for f in found if f["unset"]]
    assert not faulty, faulty
