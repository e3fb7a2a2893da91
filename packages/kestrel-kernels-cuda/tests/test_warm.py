"""Warm-up compiles what launches run, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")


@pytest.mark.timeout(300)
def test_after_warm_up_a_launch_compiles_nothing(compiled_apart: Callable[..., list[Any]]) -> None:
    assert compiled_apart(Path(__file__).with_name("ahead.py"))[-1] == {}
