"""Other implementations of Whisper over the same weights, and how texts are compared. Test-only dependencies."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realweights.models import ctranslate2, whisper

__all__ = ["FasterWhisper", "Heard", "HeardWord", "OpenAIWhisper", "error_rate", "normalise", "word_errors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardWord:
    """A word and its times in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What an implementation understood. ``segments``: (start, end) in seconds."""

    text: str
    words: tuple[HeardWord, ...] = ()
    segments: tuple[tuple[float, float], ...] = ()
    language: str = ""


class FasterWhisper:
    """faster-whisper (CTranslate2). ImportError when it is not installed."""

    def __init__(self, name: str, *, compute_type: str = "float32", threads: int = 0) -> None:
        from faster_whisper import WhisperModel

        folder = str(ctranslate2(name))
        self._model = WhisperModel(folder, device="cpu", compute_type=compute_type, cpu_threads=threads)

    def transcribe(self, audio: Any, **options: Any) -> Heard:
        """``audio``: a path, or samples at 16 kHz. Greedy unless ``options`` say otherwise."""
        given = {"beam_size": 1, "temperature": 0.0, **options}
        return self._heard(self._model.transcribe(str(audio) if isinstance(audio, Path) else audio, **given))

    def batched(self, audio: Any, **options: Any) -> Heard:
        """The batched pipeline: speech segments side by side."""
        from faster_whisper import BatchedInferencePipeline

        pipeline = BatchedInferencePipeline(model=self._model)
        return self._heard(pipeline.transcribe(audio, **{"beam_size": 1, "temperature": 0.0, **options}))

    @staticmethod
    def _heard(found: tuple[Any, Any]) -> Heard:
        segments = list(found[0])
        return Heard(
            text="".join(segment.text for segment in segments).strip(),
            words=tuple(
                HeardWord(word=word.word, start=float(word.start), end=float(word.end))
                for segment in segments
                for word in segment.words or ()
            ),
            segments=tuple((segment.start, segment.end) for segment in segments),
            language=found[1].language,
        )


class OpenAIWhisper:
    """openai-whisper over the converted weights, float32. ImportError when it is not installed."""

    def __init__(self, name: str) -> None:
        self._model = _openai_model(whisper(name))

    def transcribe(self, audio: Any, **options: Any) -> Heard:
        """``audio``: samples at 16 kHz. Greedy unless ``options`` say otherwise."""
        given = {"temperature": 0.0, "fp16": False, "verbose": None, **options}
        found = self._model.transcribe(audio, **given)
        return Heard(
            text=found["text"].strip(),
            words=tuple(
                HeardWord(word=word["word"], start=float(word["start"]), end=float(word["end"]))
                for segment in found["segments"]
                for word in segment.get("words", ())
            ),
            segments=tuple((segment["start"], segment["end"]) for segment in found["segments"]),
            language=found["language"],
        )


_OPENAI_NAMES = {
    ".layers.": ".blocks.",
    ".self_attn.": ".attn.",
    ".encoder_attn.": ".cross_attn.",
    ".self_attn_layer_norm.": ".attn_ln.",
    ".encoder_attn_layer_norm.": ".cross_attn_ln.",
    ".final_layer_norm.": ".mlp_ln.",
    ".q_proj.": ".query.",
    ".k_proj.": ".key.",
    ".v_proj.": ".value.",
    ".out_proj.": ".out.",
    ".fc1.": ".mlp.0.",
    ".fc2.": ".mlp.2.",
    ".embed_positions.weight": ".positional_embedding",
    ".embed_tokens.": ".token_embedding.",
    "encoder.layer_norm.": "encoder.ln_post.",
    "decoder.layer_norm.": "decoder.ln.",
}


def _openai_model(folder: Path) -> Any:
    import json

    import torch
    from safetensors.torch import load_file
    from whisper.model import ModelDimensions, Whisper

    config = json.loads((folder / "config.json").read_bytes())
    model = Whisper(
        ModelDimensions(
            n_mels=config["num_mel_bins"],
            n_audio_ctx=config["max_source_positions"],
            n_audio_state=config["d_model"],
            n_audio_head=config["encoder_attention_heads"],
            n_audio_layer=config["encoder_layers"],
            n_vocab=config["vocab_size"],
            n_text_ctx=config["max_target_positions"],
            n_text_state=config["d_model"],
            n_text_head=config["decoder_attention_heads"],
            n_text_layer=config["decoder_layers"],
        )
    )
    tensors = {_openai_name(k): v.float() for k, v in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(tensors)
    heads = torch.zeros(config["decoder_layers"], config["decoder_attention_heads"], dtype=torch.bool)
    for layer, head in json.loads((folder / "generation_config.json").read_bytes())["alignment_heads"]:
        heads[layer, head] = True
    model.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return model.eval()


def _openai_name(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in _OPENAI_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def normalise(text: str) -> str:
    """``text`` in lower case without brackets, punctuation and symbols, as Whisper's basic normaliser compares it."""
    kept, depth = [], 0
    for character in unicodedata.normalize("NFKC", text.lower()):
        depth += (character in "[(<") - (character in "])>" and depth > 0)
        is_word = unicodedata.category(character)[0] not in "MSP"
        kept.append(character if is_word and not depth else " ")
    return " ".join("".join(kept).split())


def word_errors(expected: str, found: str) -> tuple[int, int]:
    """Word errors (substitutions, deletions, insertions) of normalised texts, and how many words were expected."""
    wanted, got = normalise(expected).split(), normalise(found).split()
    costs = list(range(len(got) + 1))
    for row, word in enumerate(wanted, start=1):
        diagonal, costs[0] = costs[0], row
        for column, other in enumerate(got, start=1):
            best = min(diagonal + (word != other), costs[column] + 1, costs[column - 1] + 1)
            diagonal, costs[column] = costs[column], best
    return costs[-1], len(wanted)


def error_rate(pairs: Sequence[tuple[str, str]]) -> float:
    """The word error rate over (expected, found) pairs."""
    counted = [word_errors(expected, found) for expected, found in pairs]
    return sum(errors for errors, _ in counted) / sum(words for _, words in counted)
