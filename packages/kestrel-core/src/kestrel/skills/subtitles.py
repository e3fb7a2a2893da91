"""A transcript as a file: plain text, SubRip, WebVTT, JSON or tab-separated values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kestrel.errors import InvalidRequestError, closest, shown

__all__ = ["TRANSCRIPT_FORMATS", "format_transcript"]

Output = Mapping[str, Any]


def format_transcript(output: Output, format: str) -> str:
    """The output of ``transcribe`` as a file's content, ending with a line break; "" for a text without words.

    ``format``: "txt" (a line per segment), "srt", "vtt" (words carry their times where they are known), "json" or
    "tsv" (start and end in milliseconds, text). InvalidRequestError for another one.
    """
    if format not in _WRITERS:
        raise InvalidRequestError(f"unknown transcript format {shown(format)}. {closest(format, _WRITERS)}")
    return _WRITERS[format](output)


def _txt(output: Output) -> str:
    lines = [_line(cue["text"]) for cue in output["segments"]] or [_line(output["text"])]
    return "".join(f"{line}\n" for line in lines if line)


def _srt(output: Output) -> str:
    cues = [
        f"{number}\n{_clock(cue['start'], ',')} --> {_clock(cue['end'], ',')}\n{_line(cue['text'])}\n"
        for number, cue in enumerate(_cues(output), start=1)
    ]
    return "\n".join(cues)


def _vtt(output: Output) -> str:
    cues = [
        f"\n{_clock(cue['start'], '.')} --> {_clock(cue['end'], '.')}\n{_marked(cue)}\n"
        for cue in _cues(output)
    ]
    return "WEBVTT\n" + "".join(cues)


def _tsv(output: Output) -> str:
    rows = [f"{_ms(cue['start'])}\t{_ms(cue['end'])}\t{_line(cue['text'])}\n" for cue in _cues(output)]
    return "start\tend\ttext\n" + "".join(rows)


def _json(output: Output) -> str:
    return json.dumps(output, ensure_ascii=False, allow_nan=False, indent=2) + "\n"


_WRITERS: dict[str, Callable[[Output], str]] = {
    "txt": _txt,
    "srt": _srt,
    "vtt": _vtt,
    "json": _json,
    "tsv": _tsv,
}
TRANSCRIPT_FORMATS = tuple(_WRITERS)


def _cues(output: Output) -> list[Mapping[str, Any]]:
    """Segments that show something; without any, the whole text as one."""
    cues = [cue for cue in output["segments"] if _line(cue["text"])]
    if not cues and _line(output["text"]):
        start, end = output.get("clip_start_seconds") or 0.0, output.get("clip_end_seconds")
        cues = [
            {
                "text": output["text"],
                "start": start,
                "end": output["duration_seconds"] if end is None else end,
            }
        ]
    return cues


def _line(text: str) -> str:
    """``text`` on one line: a blank line, or a tab, would end it early."""
    return " ".join(text.split())


def _marked(cue: Mapping[str, Any]) -> str:
    """WebVTT text; a word that begins later than its cue carries the time at which it does."""
    shown, last = "", _ms(cue["start"])
    for word in cue.get("words") or ():
        start = _ms(word["start"])
        text = word["word"]
        if last < start < _ms(cue["end"]):
            gap = text[: len(text) - len(text.lstrip())]
            shown += f"{gap}<{_clock(word['start'], '.')}>{_escaped(text[len(gap) :])}"
            last = start
        else:
            shown += _escaped(text)
    return _line(shown) or _escaped(_line(cue["text"]))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _clock(seconds: float, point: str) -> str:
    minutes, ms = divmod(_ms(seconds), 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{ms // 1000:02d}{point}{ms % 1000:03d}"
