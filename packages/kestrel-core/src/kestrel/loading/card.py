"""A checkpoint's card: config, files and tensor headers, from a directory in Hub layout or one safetensors file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kestrel.errors import LoadError
from kestrel.hub import inside
from kestrel.loading.headers import read_header
from kestrel.spi import ModelCard, TensorInfo

__all__ = ["read_card"]

INDEX_SUFFIX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SHARD = re.compile(r"(?P<stem>.+)-(?P<at>\d+)-of-(?P<count>\d+)\.safetensors")


def read_card(model_id: str, path: str | Path, *, revision: str | None = None) -> ModelCard:
    """What is known of the checkpoint at ``path`` before any tensor is read.

    A lone safetensors file takes the config.json beside it, if there is one. Raises LoadError for what is absent or
    damaged: config.json, an index, a shard (all missing ones are listed), a header; and for pickle-only checkpoints.
    """
    path = Path(path)
    if not path.exists():
        raise LoadError(f"{path} does not exist. Give a directory in Hub layout or a safetensors file")
    directory = path if path.is_dir() else path.parent
    files = {entry.name: entry.stat().st_size for entry in sorted(directory.iterdir()) if entry.is_file()}
    if not path.is_dir():
        files = {name: size for name, size in files.items() if name == path.name or name.endswith(".json")}
    weights = _weight_files(directory, files) if path.is_dir() else [_single(path)]
    tensors = _tensors(directory, weights)
    _check_index(directory, files, tensors)
    return ModelCard(
        model_id=model_id,
        path=path,
        config=_read_json(directory / "config.json") if "config.json" in files else {},
        files=files,
        tensors=tensors,
        revision=revision,
    )


def _single(path: Path) -> str:
    if path.suffix != ".safetensors":
        raise LoadError(f"{path} is not a safetensors file; Kestrel reads no other kind. Convert it first")
    return path.name


def _weight_files(directory: Path, files: Mapping[str, int]) -> list[str]:
    if index := _index_of(files):
        shards = sorted(set(_weight_map(directory / index).values()))
        _refuse_missing(directory, [name for name in shards if not inside(directory, name).is_file()], index)
        return shards
    found = [name for name in files if name.endswith(".safetensors")]
    if not found:
        raise LoadError(_nothing(directory, files))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    shards = sorted({name for shard in found for name in _siblings(shard)})
    _refuse_missing(directory, [name for name in shards if name not in files], "their own names")
    return shards


def _index_of(files: Mapping[str, int]) -> str | None:
    found = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if "model" + INDEX_SUFFIX in found:
        return "model" + INDEX_SUFFIX
    if len(found) > 1:
        raise LoadError(f"the checkpoint has several indexes: {', '.join(found)}. Keep the one to load")
    return found[0] if found else None


def _siblings(name: str) -> list[str]:
    shard = SHARD.fullmatch(name)
    if shard is None:
        return [name]
    stem, width, count = shard["stem"], len(shard["at"]), shard["count"]
    return [f"{stem}-{at:0{width}}-of-{count}.safetensors" for at in range(1, int(count) + 1)]


def _weight_map(index: Path) -> dict[str, str]:
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise LoadError(f"{index} has no weight_map of tensor names to files. Download it again")
    return found


def _tensors(directory: Path, weights: Iterable[str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in weights:
        header = read_header(inside(directory, file))
        if twice := sorted(tensors.keys() & header.keys()):
            other = tensors[twice[0]].file
            raise LoadError(
                f"tensor {twice[0]!r} is in {other} and in {file} of {directory}. Keep one of them"
            )
        tensors |= {name: TensorInfo(info.shape, info.dtype, file) for name, info in header.items()}
    return tensors


def _check_index(directory: Path, files: Mapping[str, int], tensors: Mapping[str, TensorInfo]) -> None:
    used = {info.file for info in tensors.values()}
    if not (index := _index_of(files)):
        return
    listed = {name: file for name, file in _weight_map(directory / index).items() if file in used}
    absent = [name for name, file in listed.items() if name not in tensors or tensors[name].file != file]
    if absent:
        raise LoadError(
            f"{directory / index} names {len(absent)} tensors that its files do not hold, {absent[0]!r} among them. "
            "Download the checkpoint again",
            missing=absent,
        )


def _refuse_missing(directory: Path, missing: list[str], said_by: str) -> None:
    if missing:
        raise LoadError(
            f"{directory} lacks {len(missing)} of the shards that {said_by} name: {', '.join(missing)}. "
            "Download them, or the whole checkpoint again",
            missing=missing,
        )


def _nothing(directory: Path, files: Mapping[str, int]) -> str:
    pickles = [name for name in files if name.endswith(PICKLES)]
    if pickles:
        return (
            f"{directory} holds its weights as pickle files ({', '.join(pickles)}), which can run any code when read. "
            "Kestrel reads safetensors only: convert them, or choose a repository that has safetensors"
        )
    return f"{directory} holds no *.safetensors file. Give a directory in Hub layout or a safetensors file"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}. Check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not JSON: {error}. Download it again") from error
    if not isinstance(found, dict):
        raise LoadError(f"{path} holds a JSON {type(found).__name__}; an object is needed. Download it again")
    return found
