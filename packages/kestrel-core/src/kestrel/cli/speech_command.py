"""transcribe: recordings in, text, subtitles or JSON out."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.options import ModelOptions, OutputOptions, SettingOptions
from kestrel.errors import closest

if TYPE_CHECKING:
    from kestrel.cli.inputs import Picture

__all__ = ["transcribe"]


class Format(str, Enum):
    """What a transcript is written as."""

    txt = "txt"
    srt = "srt"
    vtt = "vtt"
    json = "json"
    tsv = "tsv"


class Task(Enum):
    """What is written down."""

    transcribe = "transcribe"
    translate = "translate"


def _format(text: str) -> Format:
    """The format called ``text``."""
    choices = [each.value for each in Format]
    if text not in choices:
        raise typer.BadParameter(f"{text!r} is no format of transcripts. {closest(text, choices)}")
    return Format(text)


def transcribe(
    *,
    files: Annotated[
        list[str], typer.Argument(metavar="FILES", help="Recordings or films; - reads one from stdin.")
    ],
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            "-f",
            parser=_format,
            metavar="[txt|srt|vtt|json|tsv]",
            help="How the transcript is written.",
        ),
    ] = Format.txt,
    target: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Write there: a file, a directory, or a pattern with {stem} or {index}.",
        ),
    ] = None,
    language: Annotated[
        str | None, typer.Option("--language", "-l", help='Code of the language ("en"). Default: detected.')
    ] = None,
    task: Annotated[Task, typer.Option(help="Write it down, or translate it to English.")] = Task.transcribe,
    word_timestamps: Annotated[bool, typer.Option("--word-timestamps", help="Times of every word.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Text that gives context: names, spelling.")] = None,
    vad: Annotated[bool, typer.Option("--vad", help="Listen where there is speech only.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Any other option of transcribe; repeatable."),
    ] = None,
    model: ModelOptions,
    settings: SettingOptions,
    shown: OutputOptions,
) -> Coroutine[Any, Any, None]:
    """Write down what is said in each recording.

    kestrel transcribe talk.mp3 --model openai/whisper-large-v3-turbo --format srt --output talk.srt
    """
    from kestrel.cli.answers import Ask, answer
    from kestrel.cli.inputs import pictures, settings_given

    _check_model(model)
    inputs = _inputs(language, task, word_timestamps or None, prompt, vad or None, option)
    given = settings_given(settings)
    recordings = pictures(files, "recording")
    if target is None and len(recordings) > 1 and format is not Format.txt and not shown.json:
        _refuse(f"several transcripts as {format.value} need files of their own; give --output DIRECTORY")
    ask = Ask(
        skill="transcribe",
        inputs=inputs,
        settings=given,
        pictures=recordings,
        role="audio",
        file=None if target is None else _Transcripts.plan(target, recordings, format.value),
        reports=True,
        prints=target is None,
        lines=lambda output: _text(output, format.value).splitlines(),
    )
    return answer(ask, model, shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transcripts:
    """Files that transcripts are written to, by the recording's name."""

    paths: Mapping[str, Path]
    format: str
    verb: str = "written to"

    @classmethod
    def plan(cls, target: str, recordings: list[Picture], format: str) -> _Transcripts:
        from kestrel.cli.targets import plan_paths

        return cls(paths=plan_paths(target, recordings, f".{format}", "recording"), format=format)

    def write(self, recording: Picture, output: Mapping[str, Any], /) -> str:
        """The path of the recording's transcript; missing folders are made."""
        path = self.paths[recording.name]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_text(output, self.format), encoding="utf-8", newline="\n")
        except OSError as error:
            _refuse(f"cannot write {str(path)!r}: {error.strerror}. Choose another --output")
        return str(path)


def _text(output: Mapping[str, Any], format: str) -> str:
    from kestrel.skills.subtitles import format_transcript

    return format_transcript(output, format)


def _inputs(
    language: str | None, task: Task, words: bool | None, prompt: str | None, vad: bool | None,
    option: list[str] | None,
) -> dict[str, Any]:  # fmt: skip
    from kestrel.cli.inputs import key_values

    named: dict[str, Any] = {
        "language": language,
        "task": None if task is Task.transcribe else task.value,
        "word_timestamps": words,
        "initial_prompt": prompt,
        "vad_filter": vad,
    }
    inputs = {name: value for name, value in named.items() if value is not None}
    others = key_values(option or (), "--option")
    if twice := sorted(inputs.keys() & others.keys()):
        _refuse(f"--option gives {twice[0]!r}, which its own option gives too; give it once")
    return inputs | others


def _check_model(model: ModelOptions) -> None:
    if model.model is None and model.model_path is None:
        _refuse("no --model given, and the embedded model does not listen. Try --model openai/whisper-base")


def _refuse(message: str) -> None:
    from kestrel.errors import InvalidRequestError

    raise InvalidRequestError(message)
