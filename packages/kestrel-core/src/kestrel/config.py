"""Settings of an engine (``RuntimeConfig``) and of one request (``Settings``), validated where they enter.

The only module that reads environment variables (``env``); order: argument > environment > config file > default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kestrel import checks
from kestrel.errors import InvalidRequestError, closest, shown

__all__ = ["MAX_TOP_LOGPROBS", "Environment", "RuntimeConfig", "Settings"]

MAX_TOP_LOGPROBS = 20
MAX_N = 64
MAX_MEDIA_PROCESSES = 256
MAX_STOP_STRINGS = 16
MAX_ID_DIGITS = 20
_LARGEST = 2**63 - 1

Check = Callable[..., Any]  # (name, value) to the value to keep; raises InvalidRequestError


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that Kestrel reads, read once."""

    plugins: tuple[str, ...] | None = None
    offline: bool = False
    json_logs: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """From ``environ`` (default: the process environment).

        ``KESTREL_PLUGINS=a,b`` (only these), ``KESTREL_OFFLINE``, ``KESTREL_JSON_LOGS``; ``HF_HUB_OFFLINE`` as the
        Hugging Face hub spells it. ``HF_HOME`` and ``HF_TOKEN`` are read by huggingface_hub itself.
        """
        source = os.environ if environ is None else environ
        names = source.get("KESTREL_PLUGINS")
        return cls(
            plugins=None if names is None else tuple(n.strip() for n in names.split(",") if n.strip()),
            offline=_truthy(source.get("HF_HUB_OFFLINE")) or _truthy(source.get("KESTREL_OFFLINE")),
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
        for name, value in _normalised({name: getattr(self, name) for name in _SETTINGS}).items():
            object.__setattr__(self, name, value)
        if not isinstance(self.extra, Mapping):
            raise InvalidRequestError(f"extra is a {type(self.extra).__name__}; give a mapping")
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
        if given is not None and not isinstance(given, Mapping):
            raise InvalidRequestError(f"settings is a {type(given).__name__}; give a mapping or Settings")
        values = {key: value for key, value in (given or {}).items() if value is not None}
        for key in ("response_format", "adapter"):
            if key in values:
                raise InvalidRequestError(f"{key} is not supported yet; leave it out")
        known = {f.name for f in fields(cls)} - {"extra"}
        takes = known if allowed is None else known & allowed
        for key in values:
            if key not in known:
                raise InvalidRequestError(f"unknown setting {shown(key)}. {closest(str(key), takes)}")
            if key not in takes:
                raise InvalidRequestError(
                    f"{skill or 'this skill'} takes no setting {key!r}. {closest(key, takes)}"
                )
        merged = {k: v for k, v in defaults.items() if k in known and v is not None} | values
        return cls(**merged)

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


# name -> lowest and highest value, both allowed
_WHOLE: Mapping[str, tuple[int, int]] = {
    "top_k": (0, _LARGEST), "max_tokens": (1, _LARGEST), "max_objects": (1, _LARGEST), "seed": (0, _LARGEST),
    "n": (1, MAX_N), "min_tokens": (0, _LARGEST), "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "max_reasoning_tokens": (0, _LARGEST), "priority": (-_LARGEST, _LARGEST), "min_pixels": (1, _LARGEST),
    "max_pixels": (1, _LARGEST), "max_frames": (1, _LARGEST),
}  # fmt: skip
_NUMBER: Mapping[str, tuple[float | None, float | None]] = {
    "temperature": (0.0, None), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
}  # fmt: skip
_ABOVE_ZERO: Mapping[str, float | None] = {
    "top_p": 1.0, "repetition_penalty": None, "timeout_s": None, "fps": None
}  # fmt: skip
_SETTINGS = tuple(f.name for f in fields(Settings) if f.name != "extra")
_DEFAULTS = {f.name: _default_of(f) for f in fields(Settings)}


def _normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as plain Python numbers, strings, tuples and mappings; InvalidRequestError for what is not allowed."""
    out = {name: _DEFAULTS[name] if value is None else value for name, value in values.items()}
    for name in [name for name, value in out.items() if value is not _DEFAULTS[name]]:
        out[name] = _checked(name, out[name])
    out["stop"] = _stop(out["stop"])
    ids = checks.items("stop_token_ids", out["stop_token_ids"])
    out["stop_token_ids"] = tuple(_stop_id(token_id) for token_id in ids)
    out["logit_bias"] = _logit_bias(out["logit_bias"])
    return out


def _checked(name: str, value: Any) -> Any:
    """A number or flag that differs from the default; the others have checks of their own."""
    if name in _WHOLE:
        return checks.whole(name, value, *_WHOLE[name])
    if name in _NUMBER:
        return checks.number(name, value, *_NUMBER[name])
    if name in _ABOVE_ZERO:
        return checks.number(name, value, 0.0, _ABOVE_ZERO[name], open_low=True)
    return checks.flag(name, value) if name in ("logprobs", "ignore_eos") else value


def _stop(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else checks.items("stop", value)
    if len(texts) > MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequestError(
            f"stop is {shown(value)}; give at most {MAX_STOP_STRINGS} non-empty strings"
        )
    return texts


def _stop_id(value: Any) -> int:
    if value is None:
        raise InvalidRequestError("stop_token_ids holds None; it must hold whole numbers")
    return int(checks.whole("stop_token_ids", value, 0, _LARGEST) or 0)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"logit_bias is a {type(value).__name__}; give a mapping of token id to bias"
        )
    return {_token_id(key): _bias(key, bias) for key, bias in value.items()}


def _token_id(key: Any) -> int:
    """JSON has only strings for keys."""
    if key is None:
        raise InvalidRequestError("logit_bias has the key None; its keys are token ids")
    is_number = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < MAX_ID_DIGITS
    return int(checks.whole("logit_bias key", int(key) if is_number else key, 0, _LARGEST) or 0)


def _bias(key: Any, bias: Any) -> float:
    if bias is None:
        raise InvalidRequestError(f"logit_bias[{shown(key)}] is None; it must be a finite number")
    return float(checks.number(f"logit_bias[{shown(key)}]", bias, -100.0, 100.0) or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How one model is loaded and run.

    ``model``: a registered name or hub id; None picks the first embedded model. ``model_path``: a safetensors file
    or a directory in Hub layout. ``device``: "auto" (CUDA, then MPS, then CPU), "cpu", "cuda[:n]", "mps".
    ``dtype`` "auto": float32 on CPU, float16 on MPS, the checkpoint's on CUDA. Sizes in positions, bytes or pixels;
    ``memory_utilization`` is a share of the device's memory in (0, 1]. ``steps_in_flight`` None: 2 on devices with
    streams, 1 on CPU. ``ops`` overrides the provider per op: {"paged_attention": "reference"}. ``chat_template``
    "checkpoint": prompts by the checkpoint's own template, where its family can run one, instead of the family's.
    ``deterministic``: launches of fixed shapes, pictures and prefills one at a time, so that an answer does not depend
    on who else is served; slower. Without ``enable_prefix_cache``, whose hits change how prompts are cut, that holds to
    the last bit. ``strict_ops``: an error where an accelerator would run a plain-torch reference. ``recurrent_dtype``
    "bfloat16" keeps the states of linear attention in half the memory, rounded at every step; answers differ then.
    ``fp8_weights``: "widen" makes the weights of block FP8 checkpoints ``dtype``; "keep" leaves them in 8 bits, which
    takes half the memory and has been slower; "auto" keeps them where a kernel backend multiplies by them.
    ``kv_cache_dtype`` "fp8_e4m3" keeps the keys and values of pages in 8 bits each, as they are
    (scale 1), so that the same memory holds more positions; "auto": the model's dtype. ``prefill_dtype`` "fp8_e4m3"
    multiplies in 8 bits in encoders and prefill, of models that offer it: faster, answers differ a little, and weights
    take half as much memory again. "auto": in ``dtype``.

    ``media_processes``: so many processes decode the engine's pictures (the largest number of its models; started as
    pictures come); 0, and where none can be started: the engine's threads do. On an accelerator that generates text
    while many pictures come, threads keep the interpreter from the thread that launches its work.

    ``decode_path``: "native" runs decode steps op by op; "generated" as programs captured at load for every batch size
    up to ``max_batch_size``, or it is an error that says what prevents it; "auto" captures where it can.
    ``enable_cuda_graphs`` off forbids capturing. ``adapters`` are parsed for what is to come, and refused.
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
    recurrent_dtype: Literal["float32", "bfloat16"] = "float32"
    fp8_weights: Literal["auto", "keep", "widen"] = "widen"
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    prefill_dtype: Literal["auto", "fp8_e4m3"] = "auto"
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
    media_processes: int = 0
    idle_unload_s: float | None = None
    chat_template: Literal["builtin", "checkpoint"] = "builtin"
    service_name: str = "kestrel"

    def __post_init__(self) -> None:
        for name, check in _CONFIG_CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        sizes = ("kv_cache_bytes", "kv_cache_pages", "memory_utilization")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequestError(f"{' and '.join(given)} contradict each other; give one of them")
        if self.decode_path == "generated" and not self.enable_cuda_graphs:
            raise InvalidRequestError(
                "decode_path 'generated' and enable_cuda_graphs off contradict each other; "
                "turn enable_cuda_graphs on, or use decode_path 'native'"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RuntimeConfig:
        """A config from a mapping; InvalidRequestError for an unknown key, naming the closest."""
        if not isinstance(values, Mapping):
            raise InvalidRequestError(f"the engine settings are a {type(values).__name__}; give a mapping")
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise InvalidRequestError(f"unknown engine setting {shown(key)}. {closest(str(key), known)}")
        return cls(**dict(values))

    @property
    def label(self) -> str:
        """How messages name this model."""
        return self.model or (str(self.model_path) if self.model_path else "the default model")


_DTYPES = ("auto", "float32", "float16", "bfloat16")


def _device(name: str, device: Any) -> str:
    kind, colon, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    is_numbered = kind == "cuda" and index.isascii() and index.isdecimal() and len(index) < MAX_ID_DIGITS
    if kind not in ("auto", "cpu", "cuda", "mps") or (colon and not is_numbered):
        raise InvalidRequestError(f"{name} is {shown(device)}. Choices: auto, cpu, cuda, cuda:N, mps")
    return str(device)


def _providers(name: str, ops: Any) -> dict[str, str]:
    if not isinstance(ops, Mapping) or not all(isinstance(x, str) for pair in ops.items() for x in pair):
        raise InvalidRequestError(f"{name} is {shown(ops)}; give a mapping of op name to provider name")
    return dict(ops)


def _required(check: Check, **bounds: Any) -> Check:
    def checked(name: str, value: Any) -> Any:
        if value is None:
            raise InvalidRequestError(f"{name} is None; leave it out for the default, or give a value")
        return check(name, value, **bounds)

    return checked


_SIZES = (
    "max_batch_size", "max_batched_tokens", "page_size", "max_queue", "max_image_pixels", "max_media_bytes",
    "max_decoded_media_bytes",
)  # fmt: skip
_CONFIG_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(_SIZES, _required(checks.whole, low=1, high=_LARGEST)),
    **dict.fromkeys(
        ("max_model_len", "kv_cache_bytes", "kv_cache_pages"), partial(checks.whole, low=1, high=_LARGEST)
    ),
    **dict.fromkeys(("model", "revision"), checks.text),
    **dict.fromkeys(("model_path", "tokenizer_path"), checks.path),
    **dict.fromkeys(
        ("enable_prefix_cache", "enable_cuda_graphs", "deterministic", "strict_ops", "offline"), checks.flag
    ),
    **dict.fromkeys(("adapters", "allowed_media_domains"), checks.texts),
    "media_processes": _required(checks.whole, low=0, high=MAX_MEDIA_PROCESSES),
    "steps_in_flight": partial(checks.whole, low=1, high=2),
    "memory_utilization": partial(checks.number, low=0.0, high=1.0, open_low=True),
    "idle_unload_s": partial(checks.number, low=0.0, open_low=True),
    "decode_path": partial(checks.choice, choices=("auto", "native", "generated")),
    "recurrent_dtype": partial(checks.choice, choices=("float32", "bfloat16")),
    "fp8_weights": partial(checks.choice, choices=("auto", "keep", "widen")),
    **dict.fromkeys(
        ("kv_cache_dtype", "prefill_dtype"), partial(checks.choice, choices=("auto", "fp8_e4m3"))
    ),
    "chat_template": partial(checks.choice, choices=("builtin", "checkpoint")),
    "dtype": partial(checks.choice, choices=_DTYPES),
    "device": _device,
    "ops": _providers,
    "service_name": _required(checks.text),
}
