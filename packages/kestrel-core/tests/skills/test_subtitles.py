"""Transcripts as files."""

import json

import pytest

from kestrel.errors import InvalidRequestError
from kestrel.skills.subtitles import TRANSCRIPT_FORMATS, format_transcript

WORDS = [
    {"word": " Hello,", "start": 0.5, "end": 0.9},
    {"word": " you", "start": 1.0, "end": 1.25},
    {"word": " <two>.", "start": 1.25, "end": 2.0},
]
OUTPUT = {
    "text": "Hello, you <two>. Ünd\n\n又 Tab\tbed.",
    "language": "en",
    "duration_seconds": 3700.0,
    "segments": [
        {"text": " Hello, you <two>.", "start": 0.5, "end": 2.0, "words": WORDS},
        {"text": " ", "start": 2.0, "end": 2.5},
        {"text": " Ünd\n\n又 Tab\tbed.", "start": 3661.0421, "end": 3699.9996},
    ],
}
SILENCE = {"text": "", "language": None, "duration_seconds": 3.0, "segments": []}


def test_text_has_a_line_per_segment():
    assert format_transcript(OUTPUT, "txt") == "Hello, you <two>.\nÜnd 又 Tab bed.\n"


def test_subrip_numbers_its_cues():
    assert format_transcript(OUTPUT, "srt") == (
        "1\n00:00:00,500 --> 00:00:02,000\nHello, you <two>.\n"
        "\n2\n01:01:01,042 --> 01:01:40,000\nÜnd 又 Tab bed.\n"
    )


def test_webvtt_escapes_markup_and_times_its_words():
    assert format_transcript(OUTPUT, "vtt") == (
        "WEBVTT\n"
        "\n00:00:00.500 --> 00:00:02.000\nHello, <00:00:01.000>you <00:00:01.250>&lt;two&gt;.\n"
        "\n01:01:01.042 --> 01:01:40.000\nÜnd 又 Tab bed.\n"
    )


def test_tsv_has_a_row_per_segment_in_milliseconds():
    assert format_transcript(OUTPUT, "tsv") == (
        "start\tend\ttext\n500\t2000\tHello, you <two>.\n3661042\t3700000\tÜnd 又 Tab bed.\n"
    )


def test_json_is_the_output():
    assert json.loads(format_transcript(OUTPUT, "json")) == OUTPUT


def test_text_without_segments_is_one_cue():
    output = OUTPUT | {"segments": [], "text": "All of it", "duration_seconds": 12.0, "clip_start_seconds": 1.5,
                       "clip_end_seconds": 13.5}  # fmt: skip
    assert format_transcript(output, "txt") == "All of it\n"
    assert format_transcript(output, "srt") == "1\n00:00:01,500 --> 00:00:13,500\nAll of it\n"


def test_silence_is_an_empty_file():
    assert [format_transcript(SILENCE, f) for f in ("txt", "srt", "vtt", "tsv")] == [
        "", "", "WEBVTT\n", "start\tend\ttext\n"
    ]  # fmt: skip


def test_unknown_format_names_the_closest():
    assert TRANSCRIPT_FORMATS == ("txt", "srt", "vtt", "json", "tsv")
    with pytest.raises(InvalidRequestError, match="Did you mean 'srt'"):
        format_transcript(OUTPUT, "srtt")
