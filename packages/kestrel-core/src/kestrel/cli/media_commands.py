"""Commands that ask about pictures: query, caption, point, detect, segment. Files first, the question last."""

from __future__ import annotations

import os.path
from collections.abc import Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.options import ModelOptions, OutputOptions, SettingOptions

if TYPE_CHECKING:
    from kestrel.cli.inputs import Picture

__all__ = ["caption", "detect", "point", "query", "segment"]


class Length(str, Enum):
    """How long a caption is."""

    short = "short"
    normal = "normal"
    long = "long"


Files = Annotated[list[str], typer.Argument(metavar="FILES", help="Pictures; - reads one from stdin.")]
Object = Annotated[str, typer.Argument(metavar="OBJECT", help='What to look for: "red circle".')]
Reasoning = Annotated[
    bool | None, typer.Option("--reasoning/--no-reasoning", help="Think first. Default: the model's.")
]
Refs = Annotated[
    list[str] | None,
    typer.Option("--ref", metavar="X,Y[,X,Y]", help="A point or box to refer to, 0 to 1; repeatable."),
]
Also = Annotated[
    list[str] | None, typer.Option(metavar="OBJECT", help="Another object; results get labels. Repeatable.")
]
MaxObjects = Annotated[int | None, typer.Option(help="Stop after this many.")]
Target = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="Draw what was found: a file, a directory, or a pattern with {stem} or {index}.",
    ),
]


def query(
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILES", help="Pictures; - reads one from stdin; none for a plain question."),
    ] = None,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask about each picture.")],
    reasoning: Reasoning = None,
    ref: Refs = None,
    model: ModelOptions,
    settings: SettingOptions,
    shown: OutputOptions,
) -> Coroutine[Any, Any, None]:
    """Answer a question about each picture.

    kestrel query photo.jpg "How many dogs are there?"
    """
    from kestrel.cli.answers import Ask, answer
    from kestrel.cli.inputs import settings_given, spatial_refs

    inputs = _given(question=question, reasoning=reasoning, spatial_refs=spatial_refs(ref))
    given = settings_given(settings)
    pictures = _pictures(files or [], question)
    ask = Ask(skill="query", inputs=inputs, settings=given, pictures=pictures, streams=True)
    return answer(ask, model, shown)


def caption(
    *,
    files: Files,
    length: Annotated[Length, typer.Option(help="How much to say.")] = Length.normal,
    model: ModelOptions,
    settings: SettingOptions,
    shown: OutputOptions,
) -> Coroutine[Any, Any, None]:
    """Describe each picture."""
    from kestrel.cli.answers import Ask, answer
    from kestrel.cli.inputs import settings_given

    given = settings_given(settings)
    pictures = _pictures(files)
    ask = Ask(
        skill="caption", inputs={"length": length.value}, settings=given, pictures=pictures, streams=True
    )
    return answer(ask, model, shown)


def point(
    *,
    files: Files,
    object: Object,
    also: Also = None,
    ref: Refs = None,
    max_objects: MaxObjects = None,
    target: Target = None,
    model: ModelOptions,
    settings: SettingOptions,
    shown: OutputOptions,
) -> Coroutine[Any, Any, None]:
    """Point at an object in each picture.

    Prints one line "x y" per point: 0 to 1, from the upper left.
    """
    return _find("point", files, [object, *(also or ())], ref, max_objects, target, model, settings, shown)


def detect(
    *,
    files: Files,
    object: Object,
    also: Also = None,
    max_objects: MaxObjects = None,
    target: Target = None,
    model: ModelOptions,
    settings: SettingOptions,
    shown: OutputOptions,
) -> Coroutine[Any, Any, None]:
    """Find the boxes around an object in each picture.

    Prints one line "x_min y_min x_max y_max" per box: 0 to 1, from the upper left.
    """
    return _find("detect", files, [object, *(also or ())], None, max_objects, target, model, settings, shown)


def segment(
    *,
    files: Files,
    object: Object,
    also: Also = None,
    ref: Refs = None,
    target: Target = None,
    model: ModelOptions,
    settings: SettingOptions,
    shown: OutputOptions,
) -> Coroutine[Any, Any, None]:
    """Outline an object in each picture.

    Prints one line "x_min y_min x_max y_max path" per outline: its box, and an SVG path, 0 to 1 of the box.
    """
    return _find("segment", files, [object, *(also or ())], ref, None, target, model, settings, shown)


def _find(
    skill: str,
    files: list[str],
    objects: list[str],
    ref: list[str] | None,
    max_objects: int | None,
    target: str | None,
    model: ModelOptions,
    settings: SettingOptions,
    shown: OutputOptions,
) -> Coroutine[Any, Any, None]:
    from kestrel.cli.answers import Ask, answer
    from kestrel.cli.drawing import Drawing
    from kestrel.cli.inputs import runtime_config, settings_given, spatial_refs

    inputs = _given(object=objects if len(objects) > 1 else objects[0], spatial_refs=spatial_refs(ref))
    given = settings_given(settings, max_objects=max_objects)
    pictures = _pictures(files, objects[0])
    drawing = Drawing.plan(target, pictures, runtime_config(model))
    return answer(
        Ask(skill=skill, inputs=inputs, settings=given, pictures=pictures, file=drawing), model, shown
    )


def _given(**inputs: Any) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if value is not None}


def _pictures(files: list[str], last: str | None = None) -> list[Picture]:
    """The pictures; a helpful refusal when the text that ends the line is a file: alone, or behind what is none."""
    from kestrel.cli.inputs import pictures
    from kestrel.errors import InvalidRequestError

    found = pictures(files)
    if last is not None and os.path.isfile(last):  # Path.is_file raises for a question of 300 characters
        if not found:
            raise InvalidRequestError(
                f'{last!r} is a file, and the question is missing: kestrel query {last} "What is this?"'
            )
        if any(picture.error for picture in found):
            raise InvalidRequestError(f"the text comes last, behind the files, but {last!r} is a file")
    return found
