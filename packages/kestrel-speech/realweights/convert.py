"""Whisper from CTranslate2's layout to the hub's: the tensors by their published names, and the files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from realweights.ctranslate2 import Variables, read_model

__all__ = ["to_hub_layout"]

Named = Iterator[tuple[str, NDArray[Any]]]

_ENGLISH_ONLY = 51864  # vocabulary size; multilingual models have more
_TIME_STEPS = 1501  # 0.00 s to 30.00 s in steps of 0.02


def to_hub_layout(source: Path, target: Path) -> None:
    """Write ``source`` (model.bin, config.json, tokenizer.json of CTranslate2) into the folder ``target``.

    Tensors keep their type, float16. ValueError when a variable is left over.
    """
    variables = read_model(source / "model.bin", "WhisperSpec")
    tensors = dict(_tensors(variables))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((source / "config.json").read_bytes())
    tokenizer = json.loads((source / "tokenizer.json").read_bytes())
    sizes = _Sizes.of(variables)
    _write(target / "config.json", _config(sizes, said))
    _write(target / "generation_config.json", _generation_config(sizes, said, tokenizer))
    _write(target / "preprocessor_config.json", _preprocessor_config(sizes))
    _write(target / "tokenizer.json", _with_times(tokenizer))


# -- tensors


def _tensors(variables: Variables) -> Named:
    left = {name for name, values in variables.items() if values.ndim}  # scalars are settings
    for name, parts in _sources(variables):
        left.discard(name)
        yield from parts
    left -= {"decoder/projection/weight"}  # tied to the embeddings
    if left:
        raise ValueError(f"variables without a place in the hub's layout: {sorted(left)}")


def _sources(variables: Variables) -> Iterator[tuple[str, list[tuple[str, NDArray[Any]]]]]:
    """Each variable that is used, with the tensors that it becomes."""
    for name in variables:
        for pattern, target in _RENAMED:
            if match := re.fullmatch(pattern, name):
                yield name, [(match.expand(target), np.ascontiguousarray(variables[name]))]
        for pattern, targets in _SPLIT:
            if match := re.fullmatch(pattern, name):
                yield name, list(_split(variables[name], [match.expand(t) for t in targets]))


def _split(values: NDArray[Any], targets: list[str]) -> Named:
    """Equal blocks of rows, one per target; keys have no bias, and theirs must be zero."""
    for name, part in zip(targets, np.split(values, len(targets)), strict=True):
        if name.endswith("k_proj.bias"):
            if part.any():
                raise ValueError(f"{name} is not zero, and Whisper's keys have no bias")
            continue
        yield name, np.ascontiguousarray(part)


_HALF = "(encoder|decoder)"
_LAYER = rf"{_HALF}/layer_(\d+)"
_PARTS = "(weight|bias)"
_NORM_NAMES = {"gamma": "weight", "beta": "bias"}

_RENAMED: list[tuple[str, str]] = [
    (rf"encoder/(conv[12])/{_PARTS}", r"model.encoder.\1.\2"),
    (rf"{_HALF}/position_encodings/encodings", r"model.\1.embed_positions.weight"),
    (r"decoder/embeddings/weight", "model.decoder.embed_tokens.weight"),
    (rf"{_LAYER}/self_attention/linear_1/{_PARTS}", r"model.\1.layers.\2.self_attn.out_proj.\3"),
    (rf"{_LAYER}/attention/linear_0/{_PARTS}", r"model.\1.layers.\2.encoder_attn.q_proj.\3"),
    (rf"{_LAYER}/attention/linear_2/{_PARTS}", r"model.\1.layers.\2.encoder_attn.out_proj.\3"),
    (rf"{_LAYER}/ffn/linear_0/{_PARTS}", r"model.\1.layers.\2.fc1.\3"),
    (rf"{_LAYER}/ffn/linear_1/{_PARTS}", r"model.\1.layers.\2.fc2.\3"),
]
for _theirs, _ours in _NORM_NAMES.items():
    _RENAMED += [
        (rf"{_HALF}/layer_norm/{_theirs}", rf"model.\1.layer_norm.{_ours}"),
        (
            rf"{_LAYER}/self_attention/layer_norm/{_theirs}",
            rf"model.\1.layers.\2.self_attn_layer_norm.{_ours}",
        ),
        (rf"{_LAYER}/attention/layer_norm/{_theirs}", rf"model.\1.layers.\2.encoder_attn_layer_norm.{_ours}"),
        (rf"{_LAYER}/ffn/layer_norm/{_theirs}", rf"model.\1.layers.\2.final_layer_norm.{_ours}"),
    ]
_SPLIT: list[tuple[str, list[str]]] = [
    (
        rf"{_LAYER}/self_attention/linear_0/{_PARTS}",
        [rf"model.\1.layers.\2.self_attn.{name}.\3" for name in ("q_proj", "k_proj", "v_proj")],
    ),
    (
        rf"{_LAYER}/attention/linear_1/{_PARTS}",
        [rf"model.\1.layers.\2.encoder_attn.{name}.\3" for name in ("k_proj", "v_proj")],
    ),
]


# -- the files beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    vocabulary: int
    mels: int
    width: int
    layers: tuple[int, int]  # encoder, decoder
    heads: int
    inner: tuple[int, int]
    positions: tuple[int, int]

    @classmethod
    def of(cls, variables: Variables) -> _Sizes:
        """From the shapes of the variables and the number of heads that they state."""
        halves = ("encoder", "decoder")
        positions = [variables[f"{half}/position_encodings/encodings"].shape for half in halves]
        inner = [variables[f"{half}/layer_0/ffn/linear_0/weight"].shape[0] for half in halves]
        layers = [
            len({found[1] for name in variables if (found := re.match(rf"{half}/layer_(\d+)/", name))})
            for half in halves
        ]
        return cls(
            vocabulary=variables["decoder/embeddings/weight"].shape[0],
            mels=variables["encoder/conv1/weight"].shape[1],
            width=positions[0][1],
            layers=(layers[0], layers[1]),
            heads=int(variables["encoder/num_heads"]),
            inner=(inner[0], inner[1]),
            positions=(positions[0][0], positions[1][0]),
        )

    @property
    def is_multilingual(self) -> bool:
        return self.vocabulary > _ENGLISH_ONLY

    @property
    def end(self) -> int:
        """The id of the end of text; the control ids follow it."""
        return 50257 if self.is_multilingual else 50256


def _config(sizes: _Sizes, said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "scale_embedding": False,
        "torch_dtype": "float16",
        "vocab_size": sizes.vocabulary,
        "num_mel_bins": sizes.mels,
        "d_model": sizes.width,
        "encoder_layers": sizes.layers[0],
        "decoder_layers": sizes.layers[1],
        "encoder_attention_heads": sizes.heads,
        "decoder_attention_heads": sizes.heads,
        "encoder_ffn_dim": sizes.inner[0],
        "decoder_ffn_dim": sizes.inner[1],
        "max_source_positions": sizes.positions[0],
        "max_target_positions": sizes.positions[1],
        **_control_ids(sizes, said),
    }


def _generation_config(
    sizes: _Sizes, said: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = {
        "is_multilingual": sizes.is_multilingual,
        "alignment_heads": said["alignment_heads"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "max_length": sizes.positions[1],
        **_control_ids(sizes, said),
    }
    if sizes.is_multilingual:
        names = {i: name for name, i in ids.items()}
        config["lang_to_id"] = {names[i]: i for i in said["lang_ids"]}
        config["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return config


def _control_ids(sizes: _Sizes, said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": sizes.end,
        "eos_token_id": sizes.end,
        "pad_token_id": sizes.end,
        "decoder_start_token_id": sizes.end + 1,
        "suppress_tokens": said["suppress_ids"],
        "begin_suppress_tokens": said["suppress_ids_begin"],
    }


def _preprocessor_config(sizes: _Sizes) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": sizes.mels,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _with_times(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer`` with the ids of times, which older files of English-only models lack."""
    added = tokenizer["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    if "<|30.00|>" in ids:
        return tokenizer
    first = ids["<|notimestamps|>"] + 1
    times = [
        {
            "id": first + step,
            "content": f"<|{step * 0.02:.2f}|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": True,
            "special": False,
        }
        for step in range(_TIME_STEPS)
    ]
    return {**tokenizer, "added_tokens": [*added, *times]}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
