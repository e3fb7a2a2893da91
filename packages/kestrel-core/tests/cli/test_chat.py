"""``kestrel chat`` over a fake engine: turns from stdin, answers on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kestrel.errors import ModelFaultError

Picture = Callable[..., Path]


def test_each_line_of_stdin_is_a_turn(run: Any, engine: Any) -> None:
    ran = run("chat", stdin="hello\n\nand now?\n")
    assert (ran.code, ran.lines) == (0, ["answer 1", "answer 2"])
    assert [m["content"] for m in engine.calls[1][1]["messages"]] == ["hello", "answer 1", "and now?"]
    assert engine.was_stopped


def test_pictures_and_system_belong_to_the_first_turn(run: Any, engine: Any, picture: Picture) -> None:
    path = picture()
    run("chat", path, "--system", "Be brief.", stdin="what is it?\nand its colour?\n")
    system, user = engine.calls[0][1]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"] == [{"type": "image", "image": path}, {"type": "text", "text": "what is it?"}]
    assert engine.calls[1][1]["messages"][-1]["content"] == "and its colour?"


def test_json_is_one_object_per_turn(run: Any, engine: Any) -> None:
    lines = run("chat", "--json", stdin="a\nb\n").lines
    assert [json.loads(line)["message"]["content"] for line in lines] == ["answer 1", "answer 2"]


def test_a_failed_turn_is_reported_and_left_out_of_the_conversation(run: Any, engine: Any) -> None:
    def answers(skill: str, inputs: Mapping[str, Any]) -> None:
        if inputs["messages"][-1]["content"] == "bad":
            raise ModelFaultError("non-finite logits")

    engine.answers = answers
    ran = run("chat", stdin="bad\ngood\n")
    assert (ran.code, ran.lines) == (1, ["answer 1"])
    assert "error: non-finite logits" in ran.err
    assert [m["content"] for m in engine.calls[1][1]["messages"]] == ["good"]


def test_answers_are_streamed_to_a_terminal(run: Any, engine: Any, terminal: None) -> None:
    assert run("chat", stdin="a\nb\n").lines == ["answer 1", "answer 2"]
    assert engine.streamed == 2


def test_a_missing_picture_ends_the_command_before_a_model_is_loaded(run: Any, engine: Any) -> None:
    ran = run("chat", "missing.png", stdin="a\n")
    assert ran.code == 2
    assert not engine.was_stopped


def test_stdin_cannot_be_turns_and_a_picture_at_once(run: Any, engine: Any) -> None:
    assert run("chat", "-", stdin="a\n").code == 2
