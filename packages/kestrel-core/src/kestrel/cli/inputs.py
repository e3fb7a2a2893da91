"""What users name on the command line: files, ``-`` for stdin, KEY=VALUE pairs, points and boxes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kestrel.cli.options import ModelOptions, SettingOptions
from kestrel.config import RuntimeConfig, Settings
from kestrel.errors import InvalidMediaError, InvalidRequestError

__all__ = [
    "Picture",
    "key_values",
    "pictures",
    "runtime_config",
    "settings_given",
    "spatial_refs",
    "with_name",
]

_REMOTE = ("data:", "http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture or recording to ask about, under the name that the user gave; or why it cannot be read."""

    name: str
    source: Path | str | bytes | None = None
    error: InvalidMediaError | None = None

    @property
    def stem(self) -> str:
        """A short name for files written about it."""
        return (
            Path(self.name).stem
            if isinstance(self.source, Path)
            else "stdin"
            if self.name == "-"
            else "image"
        )


def pictures(names: Sequence[str], what: str = "picture") -> list[Picture]:
    """The named files, in order; what is missing carries its error. ``-`` is read from stdin, once."""
    if names.count("-") > 1:
        raise InvalidRequestError("'-' (stdin) is named twice; it can be read once")
    return [_picture(name, what) for name in names]


def _picture(name: str, what: str) -> Picture:
    if name == "-":
        if sys.stdin.isatty():
            raise InvalidRequestError(
                f"'-' reads a {what} from stdin, which is the terminal; pipe a file into it"
            )
        return Picture(name=name, source=sys.stdin.buffer.read())
    if name.startswith(_REMOTE):
        return Picture(name=name if len(name) <= 80 else f"{name[:77]}...", source=name)
    path = Path(name)
    if path.is_file():
        return Picture(name=name, source=path)
    what = "there is no such file"
    if path.exists():
        what = "it is no file; pipe it into '-'"
    if path.is_dir():
        what = "it is a directory; name the files in it"
    return Picture(name=name, error=InvalidMediaError(f"cannot read {name!r}: {what}"))


def key_values(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE`` pairs as a mapping; values are JSON where they parse as JSON, else text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise InvalidRequestError(f"{option} {pair!r} is no KEY=VALUE")
        if key in values:
            raise InvalidRequestError(f"{option} gives {key!r} twice; give it once")
        values[key.replace("-", "_")] = _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def settings_given(options: SettingOptions, **more: Any) -> dict[str, Any]:
    """The settings that the user gave, checked as far as they can be before a model is loaded."""
    named = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "stop": options.stop or None,
        "timeout_s": options.timeout,
        **more,
    }
    given = {key: value for key, value in named.items() if value is not None}
    others = key_values(options.set_ or (), "--set")
    if twice := sorted(given.keys() & others.keys()):
        raise InvalidRequestError(f"--set gives {twice[0]!r}, which its own option gives too; give it once")
    known = {key: value for key, value in (given | others).items() if key in Settings.__slots__}
    Settings.from_mapping(known)
    return given | others


def with_name(options: ModelOptions, name: str | None) -> ModelOptions:
    """The options with the model that the command's argument names, as ``--model`` would."""
    if name is None:
        return options
    if options.model or options.model_path:
        raise InvalidRequestError(f"the model is named twice, {name!r} and by an option; name it once")
    return replace(options, model=name)


def runtime_config(options: ModelOptions, *, offline: bool = False) -> RuntimeConfig:
    """The engine's config for the model options. ``--engine`` may name any field that has no option of its own."""
    named: Mapping[str, Any] = {
        "model": options.model,
        "model_path": options.model_path,
        "revision": options.revision,
        "device": options.device,
        "dtype": options.dtype,
        "offline": options.offline or offline,
    }
    others = key_values(options.engine or (), "--engine")
    if own := sorted(named.keys() & others.keys()):
        raise InvalidRequestError(f"--engine gives {own[0]!r}; use --{own[0].replace('_', '-')} instead")
    return RuntimeConfig.from_mapping({**named, **others})


def spatial_refs(given: Sequence[str] | None) -> list[list[float]] | None:
    """Points ``X,Y`` and boxes ``X_MIN,Y_MIN,X_MAX,Y_MAX`` as numbers; None when none is given."""
    if not given:
        return None
    refs = []
    for text in given:
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 4):
            raise InvalidRequestError(
                f"--ref {text!r} is neither a point X,Y nor a box X_MIN,Y_MIN,X_MAX,Y_MAX (numbers in 0 to 1)"
            )
        refs.append(numbers)
    return refs
