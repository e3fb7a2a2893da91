"""The demonstration of speech runs from start to end over a tiny model, without a terminal and without a network."""

from __future__ import annotations

import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from kestrel.plugins import PluginHost

DEMO = Path(__file__).with_name("demo_speech.py")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny random checkpoint; what it hears is noise."""
    checkpoint = PluginHost.load().families["whisper"].tiny()
    assert checkpoint is not None
    path = tmp_path / "tiny"
    path.mkdir()
    checkpoint.write(path, 0)
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Seven seconds of noise that swells."""
    time = np.arange(7 * 16000) / 16000
    values = np.random.default_rng(0).standard_normal(len(time)) * (1 + np.sin(8 * time)) * 3000
    path = tmp_path / "noise.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(values.clip(-32767, 32767).astype("<i2").tobytes())
    return path


def test_the_demo_of_speech_writes_subtitles(tiny: Path, recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("av")
    output = tmp_path / "out"
    command = [
        sys.executable, str(DEMO), "--model", str(tiny), "--audio", str(recording), "--output", str(output)
    ]  # fmt: skip
    ran = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=110
    )
    assert ran.returncode == 0, ran.stderr
    assert "noise.wav" in ran.stdout
    assert "times as fast as it was spoken" in ran.stdout
    assert sorted(path.name for path in output.iterdir()) == ["noise.srt", "noise.vtt"]
    assert (output / "noise.vtt").read_text(encoding="utf-8").startswith("WEBVTT")


def test_the_demo_of_speech_refuses_what_is_no_model(tmp_path: Path, recording: Path) -> None:
    command = [sys.executable, str(DEMO), "--model", str(tmp_path), "--audio", str(recording)]
    ran = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=110
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("error:")
