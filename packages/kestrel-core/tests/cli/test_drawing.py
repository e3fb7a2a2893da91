"""Where ``--output`` puts annotated pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kestrel.cli.drawing import Drawing
from kestrel.cli.inputs import pictures
from kestrel.config import RuntimeConfig
from kestrel.errors import InvalidRequestError

Picture = Callable[..., Path]


def places(target: str, *names: Path) -> list[Path]:
    drawing = Drawing.plan(target, pictures([str(name) for name in names]), RuntimeConfig())
    assert drawing is not None
    return list(drawing.paths.values())


def test_one_picture_takes_the_path_as_it_is(picture: Picture, tmp_path: Path) -> None:
    assert places(f"{tmp_path}/out.png", picture("a.png")) == [tmp_path / "out.png"]


def test_a_directory_gets_a_file_per_picture(picture: Picture, tmp_path: Path) -> None:
    for target in (f"{tmp_path}", f"{tmp_path}/"):
        found = places(target, picture("a.png"), picture("b.jpg"))
        assert found == [tmp_path / "a.annotated.png", tmp_path / "b.annotated.png"]


def test_a_pattern_names_each_picture(picture: Picture, tmp_path: Path) -> None:
    found = places(f"{tmp_path}/{{index}}-{{stem}}.png", picture("a.png"), picture("b.jpg"))
    assert found == [tmp_path / "1-a.png", tmp_path / "2-b.png"]


def test_two_pictures_never_share_a_path(picture: Picture, tmp_path: Path) -> None:
    for target in (f"{tmp_path}/out.png", f"{tmp_path}/x/"):
        with pytest.raises(InvalidRequestError, match="more than one picture"):
            places(target, picture("a.png"), picture("a.jpg"))


def test_an_input_is_never_overwritten(picture: Picture) -> None:
    path = picture("a.png")
    with pytest.raises(InvalidRequestError, match="overwrite"):
        places(str(path), path)


def test_detect_draws_the_boxes_and_says_where(
    run: Any, engine: Any, picture: Picture, tmp_path: Path
) -> None:
    ran = run("detect", picture(), "circle", "-o", tmp_path / "new" / "out.png")
    assert ran.code == 0
    assert "out.png" in ran.err
    with Image.open(tmp_path / "new" / "out.png") as drawn:
        assert drawn.size == (40, 20)
        assert len(drawn.getcolors() or []) > 1


def test_points_of_several_pictures_are_drawn_into_a_directory(
    run: Any, engine: Any, picture: Picture, tmp_path: Path
) -> None:
    assert run("point", picture("a.png"), picture("b.png"), "circle", "-o", f"{tmp_path}/out/").code == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.annotated.png", "b.annotated.png"]


def test_an_unknown_suffix_is_refused_after_the_answer_is_shown(
    run: Any, engine: Any, picture: Picture, tmp_path: Path
) -> None:
    ran = run("detect", picture(), "circle", "-o", tmp_path / "out.xyz")
    assert ran.out == "0.2500 0.2500 0.5000 0.7500\n"
    assert ran.code == 2
    assert ".png" in ran.err
