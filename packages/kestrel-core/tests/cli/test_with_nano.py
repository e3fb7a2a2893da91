"""The command line from end to end, with the embedded model when it is installed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from kestrel.cli import session

Scene = Callable[[str], Path]


def missing() -> str:
    """Why these tests cannot run; empty when they can."""
    try:
        importlib.import_module("kestrel.engine").SyncEngine  # noqa: B018
    except (ImportError, AttributeError) as error:
        return f"the engine is not there: {error}"
    embedded = [entry for entry in session.load_plugins().catalog() if entry.embedded]
    if not embedded:
        return "no installed family has an embedded model"
    path = Path(embedded[0].source.partition(":")[2])
    return (
        ""
        if list(path.glob("*.safetensors")) or path.is_file()
        else f"{embedded[0].name} has no weights here"
    )


REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


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


def test_a_question_is_answered_by_the_embedded_model(run: Any, scene: Scene) -> None:
    ran = run("query", scene("a.png"), "How many red circles are there?", "--temperature", "0")
    assert ran.code == 0
    assert len(ran.lines) == 1
    assert "no --model given" in ran.err


def test_several_files_give_one_strict_object_each(run: Any, scene: Scene) -> None:
    ran = run("detect", scene("a.png"), "missing.png", scene("b.png"), "circle", "--json")
    shown = [json.loads(line) for line in ran.lines]
    assert ran.code == 1
    assert [Path(o["file"]).name for o in shown] == ["a.png", "missing.png", "b.png"]
    assert shown[0]["objects"] == shown[2]["objects"]
    assert shown[1]["error"]["type"] == "InvalidMediaError"


def test_points_are_drawn_into_a_copy(run: Any, scene: Scene, tmp_path: Path) -> None:
    ran = run("point", scene("a.png"), "red circle", "-o", tmp_path / "out.png")
    assert ran.code == 0
    assert all(0.0 <= float(number) <= 1.0 for line in ran.lines for number in line.split())
    assert Image.open(tmp_path / "out.png").size == (240, 200)


def test_a_file_that_is_no_picture_is_one_line_and_code_2(run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not a picture")
    ran = run("caption", bad)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("error: ")


def test_an_unknown_model_and_an_unknown_setting_are_told_apart(run: Any, scene: Scene) -> None:
    unknown = run("caption", scene("a.png"), "-m", "acme/nothing", "--offline")
    assert unknown.code == 1
    assert "acme/nothing" in unknown.err
    wrong = run("caption", scene("a.png"), "--set", "temprature=1")
    assert wrong.code == 2
    assert "temperature" in wrong.err


def test_chat_remembers_the_picture(run: Any, scene: Scene) -> None:
    ran = run(
        "chat", scene("a.png"), "--json", stdin="What color is the square?\nHow many circles are there?\n"
    )
    first, second = (json.loads(line) for line in ran.lines)
    assert ran.code == 0
    assert first["message"]["role"] == "assistant"
    assert second["metrics"]["cached_tokens"] > 100  # the picture's positions at least


def test_doctor_lists_a_provider_for_each_op_of_the_model(run: Any) -> None:
    shown = json.loads(run("doctor", "kestrel/nano", "--device", "cpu", "--json").out)
    assert shown["ops"]
    assert all(row["provider"] for row in shown["ops"])


def test_bench_measures_both_batch_sizes(run: Any) -> None:
    shown = json.loads(
        run("bench", "--rounds", "1", "--new-tokens", "4", "--prompt-tokens", "16", "--json").out
    )
    assert [speed["batch"] for speed in shown["speeds"]] == [1, 8]
    assert all(speed["decode_tokens_per_s"] > 0 for speed in shown["speeds"])


def test_show_and_list_know_the_embedded_model(run: Any) -> None:
    shown = json.loads(run("show", "kestrel/nano", "--json").out)
    assert "query" in shown["skills"]
    assert shown["defaults"]["query"]["temperature"] is not None
    assert "kestrel/nano" in run("list").out
