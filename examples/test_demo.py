"""The demonstration runs from start to end, without a terminal and without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from kestrel.plugins import PluginHost

DEMO = Path(__file__).with_name("demo.py")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny random checkpoint; its answers are noise, and it can do everything that the demonstration asks."""
    checkpoint = PluginHost.load().families["moondream"].tiny()
    assert checkpoint is not None
    path = tmp_path / "tiny"
    path.mkdir()
    checkpoint.write(path, 0)
    return path


def test_the_demo_answers_draws_and_shows_what_was_cached(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--model", str(tiny), "--output", str(tmp_path / "drawn")]
    ran = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=110
    )
    assert ran.returncode == 0, ran.stderr
    for part in ("How many", "caption:", "point at", "detect", "How fast", "tokens/s", "tokens were cached"):
        assert part in ran.stdout
    assert "(0 ms" not in ran.stdout
    drawn = sorted((tmp_path / "drawn").glob("*.annotated.png"))
    assert drawn
    assert all(str(path) in ran.stdout for path in drawn)
    with Image.open(drawn[0]) as picture:
        assert picture.width > 100
