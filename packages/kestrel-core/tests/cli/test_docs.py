"""docs/cli.md: every command on the page runs as written, over a fake engine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel.cli.app import COMMANDS

PAGE = next(
    (p / "docs" / "cli.md" for p in Path(__file__).resolve().parents if (p / "docs" / "cli.md").is_file()),
    None,
)
TEXT = PAGE.read_text(encoding="utf-8") if PAGE else ""
LINES = re.findall(r"^\$ (kestrel .+)$", TEXT, flags=re.MULTILINE)
NEEDS_A_MODEL = (
    "list",
    "show",
    "pull",
    "doctor",
)  # they look at models themselves; tested with one elsewhere

pytestmark = pytest.mark.skipif(PAGE is None, reason="docs/cli.md is not part of this distribution")


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[1] not in NEEDS_A_MODEL])
def test_a_command_of_the_page_runs(
    line: str, run: Any, engine: Any, picture: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("photo.jpg", "second.jpg", "third.jpg", "talk.mp3.png", "film.mp4.png"):
        path = picture(name)
        path.rename(path.with_name(name.removesuffix(".png")))
    monkeypatch.chdir(path.parent)
    ran = run(*shlex.split(line)[1:], stdin="hello\n")
    is_silent = "plugins" in line or ("transcribe" in line and "--output" in line)
    assert (ran.code, bool(ran.out)) == (0, not is_silent)


def test_the_page_shows_every_command() -> None:
    assert {line.split()[1] for line in LINES} == set(COMMANDS)


def test_every_option_named_on_the_page_exists(run: Any) -> None:
    helps = " ".join(run(name, "--help").out for name in COMMANDS)
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)):
        assert option in helps, option
