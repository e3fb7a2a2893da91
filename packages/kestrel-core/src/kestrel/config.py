"""Settings of an engine (``RuntimeConfig``) and of one request (``Settings``), validated where they enter.

The only module that reads environment variables (``env``); order: argument > environment > config file > default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kestrel.errors import InvalidRequestError, closest

__all__ = ["MAX_TOP_LOGPROBS", "Environment", "RuntimeConfig", "Settings"]

MAX_TOP_LOGPROBS = 20
MAX_N = 64
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that Kestrel reads, read once."""

    plugins: tuple[str, ...] | None = None
    offline: bool = False
    cache_dir: Path | None = None
    json_logs: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """From ``environ`` (default: the process environment).

        ``KESTREL_PLUGINS=a,b`` (only these), ``KESTREL_CACHE_DIR``, ``KESTREL_JSON_LOGS``; ``HF_HUB_OFFLINE`` as the
        Hugging Face hub spells it. ``HF_HOME`` and ``HF_TOKEN`` are read by huggingface_hub itself.
        """
        source = os.environ if environ is None else environ
        names = source.get("KESTREL_PLUGINS")
        cache = source.get("KESTREL_CACHE_DIR")
        return cls(
            plugins=None if names is None else tuple(n.strip() for n in names.split(",") if n.strip()),
            offline=_truthy(source.get("HF_HUB_OFFLINE")) or _truthy(source.get("KESTREL_OFFLINE")),
            cache_dir=Path(cache).expanduser() if cache else None,
            json_logs=_truthy(source.get("KESTREL_JSON_LOGS")),
        )


def _truthy(value: str | None) -> bool:
    return value is not None and value.strip().lower() in {"1", "true", "yes", "on"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one request. ``None`` means: the family's default, else this class's documented one.

    ``extra`` holds a skill's own settings (transcription thresholds), validated by that skill.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_objects: int | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    max_reasoning_tokens: int | None = None
    timeout_s: float | None = None
    priority: int = 0
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _whole("top_k", self.top_k, low=0)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _whole("max_tokens", self.max_tokens, low=1)
        _whole("max_objects", self.max_objects, low=1)
        _whole("seed", self.seed, low=0, high=2**63 - 1)
        _whole("n", self.n, low=1, high=MAX_N)
        _whole("min_tokens", self.min_tokens, low=0)
        _whole("top_logprobs", self.top_logprobs, low=0, high=MAX_TOP_LOGPROBS)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _whole("max_reasoning_tokens", self.max_reasoning_tokens, low=0)
        _number("timeout_s", self.timeout_s, low=0.0, open_low=True)
        _whole("priority", self.priority)
        _whole("min_pixels", self.min_pixels, low=1)
        _whole("max_pixels", self.max_pixels, low=1)
        _number("fps", self.fps, low=0.0, open_low=True)
        _whole("max_frames", self.max_frames, low=1)
        for flag in ("logprobs", "ignore_eos"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidRequestError(f"{flag} is {getattr(self, flag)!r}; it must be true or false")
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidRequestError(
                f"stop is {self.stop!r}; give at most {MAX_STOP_STRINGS} non-empty strings"
            )
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, low=0)
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, low=0)
            _number(f"logit_bias[{token_id}]", bias, low=-100.0, high=100.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true")

    @classmethod
    def from_mapping(
        cls,
        given: Mapping[str, Any] | Settings | None,
        *,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        allowed: frozenset[str] | None = None,
        skill: str = "",
    ) -> Settings:
        """Settings from what the caller gave, over ``defaults``; None values count as not given.

        Raises InvalidRequestError for unknown keys (naming the closest), keys that ``skill`` does not take, and
        ``response_format`` and ``adapter``, which are not supported yet.
        """
        if isinstance(given, Settings):
            given = given.given()
        values = {key: value for key, value in (given or {}).items() if value is not None}
        for key in ("response_format", "adapter"):
            if key in values:
                raise InvalidRequestError(f"{key} is not supported yet; leave it out")
        known = {f.name for f in fields(cls)} - {"extra"}
        takes = known if allowed is None else known & allowed
        for key in values:
            if key not in known:
                raise InvalidRequestError(f"unknown setting {key!r}. {closest(key, takes)}")
            if key not in takes:
                raise InvalidRequestError(
                    f"{skill or 'this skill'} takes no setting {key!r}. {closest(key, takes)}"
                )
        merged = {k: v for k, v in defaults.items() if k in known and v is not None} | values
        return cls(**_normalised(merged))

    def given(self) -> dict[str, Any]:
        """The settings that differ from the class's defaults, as a mapping."""
        empty = {f.name: f for f in fields(self)}
        return {
            name: value
            for name, f in empty.items()
            if (value := getattr(self, name)) != _default_of(f) and name != "extra"
        }

    def with_(self, **changes: Any) -> Settings:
        """A copy with ``changes``."""
        return replace(self, **changes)


def _default_of(f: Any) -> Any:
    return f.default_factory() if callable(f.default_factory) else f.default


def _normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    stop = out.get("stop")
    if isinstance(stop, str):
        out["stop"] = (stop,)
    elif stop is not None:
        out["stop"] = _tuple("stop", stop)
    if "stop_token_ids" in out:
        out["stop_token_ids"] = _tuple("stop_token_ids", out["stop_token_ids"])
    if "logit_bias" in out:
        bias = out["logit_bias"]
        if not isinstance(bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias is a {type(bias).__name__}; give a mapping of token id to bias"
            )
        out["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    return out


def _token_id(key: Any) -> int:
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    _whole("logit_bias key", key, low=0)
    return int(key)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}; give a list")
    return tuple(value)


def _number(
    name: str, value: Any, *, low: float | None = None, high: float | None = None, open_low: bool = False
) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} is {value!r}; it must be a finite number")
    _within(name, value, low, high, open_low)


def _whole(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}; it must be a whole number")
    _within(name, value, low, high, False)


def _within(name: str, value: float, low: float | None, high: float | None, open_low: bool) -> None:
    too_low = low is not None and (value <= low if open_low else value < low)
    too_high = high is not None and value > high
    if too_low or too_high:
        bounds = [] if low is None else [f"{'above' if open_low else 'at least'} {low:g}"]
        bounds += [] if high is None else [f"at most {high:g}"]
        raise InvalidRequestError(f"{name} is {value!r}; it must be {' and '.join(bounds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How one model is loaded and run.

    ``model``: a registered name or hub id; None picks the first embedded model. ``model_path``: a safetensors file
    or a directory in Hub layout. ``device``: "auto" (CUDA, then MPS, then CPU), "cpu", "cuda[:n]", "mps".
    ``dtype`` "auto": float32 on CPU, float16 on MPS, the checkpoint's on CUDA. Sizes in positions, bytes or pixels;
    ``memory_utilization`` is a share of the device's memory in (0, 1]. ``steps_in_flight`` None: 2 on devices with
    streams, 1 on CPU. ``ops`` overrides the provider per op: {"paged_attention": "reference"}. ``chat_template``
    "checkpoint": prompts by the checkpoint's own template, where its family can run one, instead of the family's.
    """

    model: str | None = None
    model_path: str | Path | None = None
    tokenizer_path: str | Path | None = None
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_batch_size: int = 64
    max_model_len: int | None = None
    max_batched_tokens: int = 2048
    page_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_pages: int | None = None
    memory_utilization: float | None = None
    enable_prefix_cache: bool = True
    decode_path: Literal["auto", "native", "generated"] = "auto"
    enable_cuda_graphs: bool = True
    steps_in_flight: int | None = None
    deterministic: bool = False
    strict_ops: bool = False
    ops: Mapping[str, str] = field(default_factory=dict)
    adapters: Sequence[str] = ()
    offline: bool = False
    max_queue: int = 4096
    max_image_pixels: int = 100_000_000
    max_media_bytes: int = 100 * 2**20
    max_decoded_media_bytes: int = 4 * 2**30
    allowed_media_domains: Sequence[str] = ()
    idle_unload_s: float | None = None
    chat_template: Literal["builtin", "checkpoint"] = "builtin"
    service_name: str = "kestrel"

    def __post_init__(self) -> None:
        for name in (
            "max_batch_size", "max_batched_tokens", "page_size", "max_queue", "max_image_pixels",
            "max_media_bytes", "max_decoded_media_bytes", "max_model_len", "kv_cache_bytes", "kv_cache_pages",
        ):  # fmt: skip
            _whole(name, getattr(self, name), low=1)
        _whole("steps_in_flight", self.steps_in_flight, low=1, high=2)
        _number("memory_utilization", self.memory_utilization, low=0.0, high=1.0, open_low=True)
        _number("idle_unload_s", self.idle_unload_s, low=0.0, open_low=True)
        if self.decode_path not in ("auto", "native", "generated"):
            raise InvalidRequestError(
                f"decode_path is {self.decode_path!r}. {closest(self.decode_path, ['auto', 'native', 'generated'])}"
            )
        if self.chat_template not in ("builtin", "checkpoint"):
            raise InvalidRequestError(
                f"chat_template is {self.chat_template!r}. {closest(self.chat_template, ['builtin', 'checkpoint'])}"
            )
        given = [
            n
            for n in ("kv_cache_bytes", "kv_cache_pages", "memory_utilization")
            if getattr(self, n) is not None
        ]
        if len(given) > 1:
            raise InvalidRequestError(f"{' and '.join(given)} contradict each other; give one of them")
        _check_device(self.device)
        if self.dtype not in _DTYPES:
            raise InvalidRequestError(f"dtype is {self.dtype!r}. {closest(self.dtype, _DTYPES)}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RuntimeConfig:
        """A config from a mapping; InvalidRequestError for an unknown key, naming the closest."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise InvalidRequestError(f"unknown engine setting {key!r}. {closest(key, known)}")
        return cls(**dict(values))

    @property
    def label(self) -> str:
        """How messages name this model."""
        return self.model or (str(self.model_path) if self.model_path else "the default model")


_DTYPES = ("auto", "float32", "float16", "bfloat16")


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdecimal())):
        raise InvalidRequestError(f"device is {device!r}. Choices: auto, cpu, cuda, cuda:N, mps")
