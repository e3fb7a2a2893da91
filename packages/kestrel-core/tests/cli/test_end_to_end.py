"""The command line from end to end over a real engine: a tiny random checkpoint, and the embedded model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from kestrel.cli import session

Scene = Callable[[str], Path]


FAMILY = session.load_plugins().families.get("moondream")
EMBEDDED = next((entry for entry in session.load_plugins().catalog() if entry.embedded), None)

pytestmark = pytest.mark.skipif(FAMILY is None, reason="no installed family asks images questions")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint in Hub layout."""
    assert FAMILY is not None
    checkpoint = FAMILY.tiny()
    assert checkpoint is not None
    path = tmp_path_factory.mktemp("tiny")
    checkpoint.write(path, 0)
    return path


def has_weights() -> bool:
    """Whether the embedded model's weights are in this checkout."""
    path = Path("" if EMBEDDED is None else EMBEDDED.source.partition(":")[2])
    return path.is_dir() and any(path.glob("*.safetensors"))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Draws two red circles and a blue square."""

    def scene(name: str) -> Path:
        image = Image.new("RGB", (240, 200), (214, 216, 220))
        draw = ImageDraw.Draw(image)
        draw.ellipse((20, 20, 80, 80), fill=(222, 32, 38))
        draw.ellipse((150, 110, 210, 170), fill=(222, 32, 38))
        draw.rectangle((30, 120, 80, 170), fill=(38, 78, 218))
        image.save(tmp_path / name)
        return tmp_path / name

    return scene


def test_several_files_give_one_strict_object_each(run: Any, tiny: Path, scene: Scene) -> None:
    ran = run(
        "detect",
        scene("a.png"),
        "missing.png",
        scene("b.png"),
        "circle",
        "--max-objects",
        "3",
        "--json",
        "--model-path",
        tiny,
    )
    shown = [json.loads(line) for line in ran.lines]
    assert ran.code == 1
    assert [Path(o["file"]).name for o in shown] == ["a.png", "missing.png", "b.png"]
    assert shown[0]["objects"] == shown[2]["objects"]
    assert shown[1]["error"]["type"] == "InvalidMediaError"


def test_points_are_drawn_into_a_copy(run: Any, tiny: Path, scene: Scene, tmp_path: Path) -> None:
    ran = run(
        "point",
        scene("a.png"),
        "red circle",
        "--max-objects",
        "3",
        "-o",
        tmp_path / "out.png",
        "--model-path",
        tiny,
    )
    assert ran.code == 0
    assert all(0.0 <= float(number) <= 1.0 for line in ran.lines for number in line.split())
    with Image.open(tmp_path / "out.png") as drawn:
        assert drawn.size == (240, 200)


def test_a_file_that_is_no_picture_is_one_line_and_code_2(run: Any, tiny: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not a picture")
    ran = run("caption", bad, "--model-path", tiny)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("error: ")


def test_an_unknown_model_and_an_unknown_setting_are_told_apart(run: Any, tiny: Path, scene: Scene) -> None:
    unknown = run("caption", scene("a.png"), "-m", "acme/nothing", "--offline")
    assert unknown.code == 1
    assert "acme/nothing" in unknown.err
    wrong = run("caption", scene("a.png"), "--set", "temprature=1", "--model-path", tiny)
    assert wrong.code == 2
    assert "temperature" in wrong.err


def test_chat_remembers_the_picture(run: Any, tiny: Path, scene: Scene) -> None:
    ran = run(
        "chat",
        scene("a.png"),
        "--max-tokens",
        "8",
        "--json",
        "--model-path",
        tiny,
        stdin="What color is the square?\nHow many circles are there?\n",
    )
    first, second = (json.loads(line) for line in ran.lines)
    assert ran.code == 0
    assert first["message"]["role"] == "assistant"
    assert second["metrics"]["cached_tokens"] >= 16  # the picture's positions at least


def test_doctor_lists_a_provider_for_each_op_of_the_model(run: Any, tiny: Path) -> None:
    shown = json.loads(run("doctor", "--model-path", tiny, "--device", "cpu", "--json").out)
    assert shown["ops"]
    assert all(row["provider"] for row in shown["ops"])
    assert shown["decode"] == "op by op: programs are captured on CUDA devices, and this is cpu"


def test_bench_measures_both_batch_sizes(run: Any, tiny: Path) -> None:
    shown = json.loads(
        run(
            "bench",
            "--rounds",
            "1",
            "--new-tokens",
            "4",
            "--prompt-tokens",
            "16",
            "--json",
            "--model-path",
            tiny,
        ).out
    )
    assert [speed["batch"] for speed in shown["speeds"]] == [1, 8]
    assert all(speed["decode_tokens_per_s"] > 0 for speed in shown["speeds"])


def test_show_describes_the_checkpoint(run: Any, tiny: Path) -> None:
    shown = json.loads(run("show", "--model-path", tiny, "--json").out)
    assert "query" in shown["skills"]
    assert shown["defaults"]["query"]["temperature"] is not None
    assert shown["num_parameters"] > 0


@pytest.mark.skipif(not has_weights(), reason="the embedded model's weights are not in this checkout")
def test_the_embedded_model_answers_by_default_and_says_so(run: Any, scene: Scene) -> None:
    ran = run("query", scene("a.png"), "How many red circles are there?", "--temperature", "0")
    assert (ran.code, len(ran.lines)) == (0, 1)
    assert EMBEDDED is not None
    assert EMBEDDED.name in ran.err
    assert EMBEDDED.name in run("list").out


def test_json_logs_tell_of_each_request_without_its_text(
    run: Any, tiny: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KESTREL_JSON_LOGS", "1")
    ran = run("query", scene("a.png"), "A secret question?", "--max-tokens", "3", "--model-path", tiny)
    records = [json.loads(line) for line in ran.err.splitlines() if line.startswith("{")]
    [record] = [r for r in records if r["logger"] == "kestrel.request"]
    assert (record["skill"], record["status"], record["output_tokens"]) == ("query", "ok", 3)
    assert "secret" not in ran.err


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_at_the_prompt_of_a_chat_ends_it_at_once(tiny: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kestrel",
        "chat",
        "--json",
        "--max-tokens",
        "3",
        "--model-path",
        str(tiny),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("hello\n")
        chat.stdin.flush()
        assert json.loads(chat.stdout.readline())["message"]["role"] == "assistant"
        chat.send_signal(signal.SIGINT)
        _, err = chat.communicate(timeout=60)
    assert chat.returncode == 130
    assert "Traceback" not in err
