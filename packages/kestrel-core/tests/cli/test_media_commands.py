"""query, caption, point, detect and segment over a fake engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import InvalidMediaError, InvalidRequestError, ModelFaultError

Picture = Callable[..., Path]


def test_query_prints_the_answer_alone_on_stdout(run: Any, engine: Any, picture: Picture) -> None:
    ran = run("query", picture(), "How many?")
    assert (ran.code, ran.out) == (0, "two red circles\n")
    [(skill, inputs, settings)] = engine.calls
    assert (skill, inputs["question"], settings) == ("query", "How many?", {})
    assert isinstance(inputs["image"], Path)
    assert engine.was_stopped


def test_query_without_a_file_asks_a_plain_question(run: Any, engine: Any) -> None:
    assert run("query", "How many?").out == "two red circles\n"
    assert "image" not in engine.calls[0][1]


def test_several_files_are_answered_in_their_order_and_prefixed(
    run: Any, engine: Any, picture: Picture
) -> None:
    first, second = picture("a.png"), picture("b.png")
    engine.delay_s = lambda inputs: 0.05 if inputs["image"] == first else 0.0
    engine.answers = lambda skill, inputs: {"caption": inputs["image"].stem}
    assert run("caption", first, second).lines == [f"{first}: a", f"{second}: b"]
    assert engine.most_running == 2


def test_concurrency_bounds_the_files_asked_at_once(run: Any, engine: Any, picture: Picture) -> None:
    engine.delay_s = lambda inputs: 0.001
    run("caption", *(picture(f"{n}.png") for n in range(6)), "-j", "2")
    assert engine.most_running == 2


def test_json_is_one_strict_object_per_file(run: Any, engine: Any, picture: Picture) -> None:
    ran = run("query", picture("a.png"), picture("b.png"), "How many?", "--json")
    objects = [json.loads(line) for line in ran.lines]
    assert [Path(o["file"]).name for o in objects] == ["a.png", "b.png"]
    assert objects[0]["answer"] == "two red circles"
    assert objects[0]["metrics"]["cached_tokens"] == 729
    assert (objects[0]["finish_reason"], objects[0]["seed"], objects[0]["model"]) == ("stop", 7, "fake/model")


def test_a_bad_file_is_reported_and_the_others_are_answered(run: Any, engine: Any, picture: Picture) -> None:
    bad, good = picture("bad.png"), picture("good.png")

    def answers(skill: str, inputs: Mapping[str, Any]) -> None:
        if inputs["image"] == bad:
            raise InvalidMediaError("the image is truncated")

    engine.answers = answers
    ran = run("caption", bad, good, bad.with_name("missing.png"))
    assert ran.code == 1
    assert ran.lines == [f"{good}: A red circle on grey."]
    assert f"error: {bad}: the image is truncated" in ran.err
    assert "missing.png" in ran.err


def test_json_says_which_file_failed_and_how(run: Any, engine: Any, picture: Picture) -> None:
    ran = run("caption", picture("a.png"), "missing.png", "--json")
    good, failed = (json.loads(line) for line in ran.lines)
    assert ran.code == 1
    assert good["caption"]
    assert failed["file"] == "missing.png"
    assert failed["error"]["type"] == "InvalidMediaError"


def test_when_no_file_can_be_read_no_model_is_loaded(run: Any, engine: Any) -> None:
    ran = run("caption", "missing.png")
    assert ran.code == 2
    assert ran.err == "error: cannot read 'missing.png': there is no such file\n"
    assert not engine.was_stopped


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_no_file_and_not_waited_for(run: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is no file; pipe it into '-'" in run("caption", tmp_path / "pipe").err


@pytest.mark.parametrize(("error", "code"), [(InvalidRequestError("no"), 2), (ModelFaultError("no"), 1)])
def test_exit_code_tells_bad_requests_from_other_failures(
    error: Exception, code: int, run: Any, engine: Any, picture: Picture
) -> None:
    def answers(skill: str, inputs: Mapping[str, Any]) -> None:
        raise error

    engine.answers = answers
    ran = run("caption", picture())
    assert (ran.code, ran.out) == (code, "")
    assert "error:" in ran.err
    assert "Traceback" not in ran.err


def test_an_unexpected_failure_is_one_line_unless_debugging(run: Any, engine: Any, picture: Picture) -> None:
    def answers(skill: str, inputs: Mapping[str, Any]) -> None:
        raise TypeError("two\nlines")

    engine.answers = answers
    plain = run("caption", picture())
    assert plain.code == 1
    assert plain.err.splitlines()[-1].endswith(
        "unexpected TypeError: two lines (--debug shows the traceback)"
    )
    assert "Traceback" not in plain.err
    assert "Traceback" in run("caption", picture(), "--debug").err


def test_stdin_is_read_as_a_picture(run: Any, engine: Any, picture: Picture) -> None:
    pixels = picture().read_bytes()
    assert run("query", "-", "How many?", stdin=pixels).code == 0
    assert engine.calls[0][1]["image"] == pixels


def test_stdin_named_twice_is_refused(run: Any, engine: Any) -> None:
    assert run("caption", "-", "-", stdin=b"").code == 2


def test_settings_flags_reach_the_engine_and_only_those_given(
    run: Any, engine: Any, picture: Picture
) -> None:
    flags = "--temperature 0 --top-p 0.5 --top-k 3 --max-tokens 9 --seed 1 --stop a --stop b --timeout 2"
    run("query", picture(), "Why?", *flags.split(), "--set", "min_p=0.1", "--set", 'logit_bias={"3": -1}')
    assert engine.calls[0][2] == {
        "temperature": 0.0, "top_p": 0.5, "top_k": 3, "max_tokens": 9, "seed": 1, "stop": ["a", "b"],
        "timeout_s": 2.0, "min_p": 0.1, "logit_bias": {"3": -1},
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", "-1"],
        ["--max-tokens", "0"],
        ["--set", "novalue"],
        ["--set", "seed=1", "--seed", "2"],
    ],
)
def test_a_bad_setting_is_refused_before_a_model_is_loaded(
    flags: list[str], run: Any, engine: Any, picture: Picture
) -> None:
    ran = run("caption", picture(), *flags)
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert not engine.was_stopped


def test_reasoning_is_the_models_default_unless_asked(run: Any, engine: Any, picture: Picture) -> None:
    run("query", picture(), "Why?")
    run("query", picture(), "Why?", "--reasoning")
    run("query", picture(), "Why?", "--no-reasoning")
    assert [inputs.get("reasoning") for _, inputs, _ in engine.calls] == [None, True, False]


def test_caption_passes_its_length(run: Any, engine: Any, picture: Picture) -> None:
    run("caption", picture(), "--length", "short")
    assert engine.calls[0][1]["length"] == "short"


def test_point_and_detect_print_numbers_one_object_a_line(run: Any, engine: Any, picture: Picture) -> None:
    assert run("point", picture(), "circle").lines == ["0.2500 0.5000", "0.7500 0.1250"]
    assert run("detect", picture(), "circle").lines == ["0.2500 0.2500 0.5000 0.7500"]
    assert run("segment", picture(), "circle").lines == ["0.0000 0.0000 0.5000 1.0000 M 0 0 L 1 1 Z"]


def test_finding_nothing_is_said_on_stderr(run: Any, engine: Any, picture: Picture) -> None:
    engine.answers = lambda skill, inputs: {"points": []}
    ran = run("point", picture(), "unicorn")
    assert (ran.code, ran.out) == (0, "")
    assert "nothing found" in ran.err


def test_spatial_references_are_numbers(run: Any, engine: Any, picture: Picture) -> None:
    run("point", picture(), "circle", "--ref", "0.1,0.2", "--ref", "0,0,1,0.5", "--max-objects", "3")
    assert engine.calls[0][1]["spatial_refs"] == [[0.1, 0.2], [0.0, 0.0, 1.0, 0.5]]
    assert engine.calls[0][2] == {"max_objects": 3}
    assert run("point", picture(), "circle", "--ref", "0.1").code == 2


def test_a_question_before_its_file_is_explained(run: Any, engine: Any, picture: Picture) -> None:
    ran = run("query", "How many?", picture())
    assert ran.code == 2
    assert "text comes last" in ran.err


def test_a_file_without_its_question_is_not_taken_for_one(run: Any, engine: Any, picture: Picture) -> None:
    ran = run("query", picture())
    assert (ran.code, ran.out) == (2, "")
    assert "grey.png' is a file, and the question is missing: kestrel query " in ran.err
    assert not engine.calls


def test_a_question_may_be_longer_than_any_file_name(run: Any, engine: Any, picture: Picture) -> None:
    question = "Why? " * 100
    assert run("query", picture(), question).code == 0
    assert engine.calls[0][1]["question"] == question


def test_stats_are_one_line_on_stderr(run: Any, engine: Any, picture: Picture) -> None:
    ran = run("caption", picture(), "--stats")
    assert ran.out == "A red circle on grey.\n"
    assert "730 tokens in (729 cached), 11 out" in ran.err
    assert "100 tokens/s" in ran.err


def test_warnings_and_the_length_limit_are_said_on_stderr(run: Any, engine: Any, picture: Picture) -> None:
    engine.warnings, engine.finish_reason = ("only the first frame is used",), "length"
    ran = run("caption", picture())
    assert "warning: " in ran.err
    assert "first frame" in ran.err
    assert "--max-tokens" in ran.err


def test_text_is_streamed_to_a_terminal_and_printed_whole_elsewhere(
    run: Any, engine: Any, picture: Picture, terminal: None
) -> None:
    assert run("query", picture(), "How many?").out == "two red circles\n"
    assert engine.streamed == 1
    run("query", picture(), "How many?", "--json")
    run("caption", picture("a.png"), picture("b.png"))
    assert engine.streamed == 1


def test_streamed_reasoning_is_a_line_of_its_own(
    run: Any, engine: Any, picture: Picture, terminal: None
) -> None:
    assert run("query", picture(), "How many?", "--reasoning").lines == ["hmm", "two red circles"]


def test_control_characters_of_an_answer_do_not_reach_a_terminal(
    run: Any, engine: Any, picture: Picture, terminal: None
) -> None:
    engine.answers = lambda skill, inputs: {"answer": "a\x1b]0;title\x07b"}
    assert "\x1b" not in run("query", picture(), "How many?").out


def test_without_plugins_the_model_options_reach_the_engine(run: Any, engine: Any, picture: Picture) -> None:
    ran = run(
        "caption", picture(), "-m", "a/b", "--revision", "main", "--device", "cpu", "--dtype", "float32",
        "--offline", "--engine", "max_model_len=128",
    )  # fmt: skip
    assert ran.code == 0
    config = engine.config
    assert (config.model, config.revision, config.device, config.dtype) == ("a/b", "main", "cpu", "float32")
    assert (config.offline, config.max_model_len) == (True, 128)


def test_an_unknown_engine_setting_names_the_closest(run: Any, engine: Any, picture: Picture) -> None:
    ran = run("caption", picture(), "--engine", "max_modellen=3")
    assert ran.code == 2
    assert "max_model_len" in ran.err


def test_ctrl_c_exits_with_130(run: Any, engine: Any, picture: Picture) -> None:
    def answers(skill: str, inputs: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    engine.answers = answers
    assert run("caption", picture()).code == 130


def test_several_objects_come_with_labels(run: Any, engine: Any, picture: Picture) -> None:
    engine.answers = lambda skill, inputs: {"points": [{"x": 0.5, "y": 0.5, "label": "blue square"}]}
    assert run("point", picture(), "circle", "--also", "blue square").lines == ["0.5000 0.5000 blue square"]
    assert engine.calls[0][1]["object"] == ["circle", "blue square"]
