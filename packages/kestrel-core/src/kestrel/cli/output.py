"""What a command prints: answers on stdout, as text or strict JSON; notes, statistics and warnings on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from kestrel.errors import KestrelError
from kestrel.types import EngineResult, Metrics

__all__ = [
    "answer_lines",
    "as_json",
    "failure_json",
    "is_terminal",
    "note",
    "print_json",
    "print_text",
    "result_json",
    "stats_line",
    "warn",
    "write_chunk",
]

COORDINATE_DIGITS = 4
POINT = ("x", "y")
BOX = ("x_min", "y_min", "x_max", "y_max")


def is_terminal(stream: Any) -> bool:
    """Whether ``stream`` shows what it gets to a person."""
    return bool(stream.isatty())


def note(text: str) -> None:
    """Print a remark on stderr."""
    typer.secho(text, err=True, dim=True)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    typer.echo(f"{typer.style('warning:', fg='yellow')} {text}", err=True)


def as_json(value: Any) -> str:
    """``value`` as one line of strict JSON: no NaN, no infinity; escaped where stdout cannot hold every character."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return json.dumps(value, ensure_ascii=not is_unicode, allow_nan=False)


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(as_json(value) + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Print text on stdout; control characters that a model may have written do not reach a terminal."""
    typer.echo(_harmless(text) if is_terminal(sys.stdout) else text)


def write_chunk(text: str, *, dim: bool = False) -> None:
    """Show a piece of a stream on stdout at once."""
    typer.echo(typer.style(_harmless(text), dim=True) if dim else _harmless(text), nl=False)
    sys.stdout.flush()


def _harmless(text: str) -> str:
    return "".join(c if c in "\n\t" or (c.isprintable() or ord(c) > 0x9F) else "\ufffd" for c in text)


def result_json(name: str | None, result: EngineResult) -> dict[str, Any]:
    """A result as an object: the skill's own keys (``answer``, ``points``, …) beside what it cost."""
    shown: dict[str, Any] = {} if name is None else {"file": name}
    shown |= {"model": result.model_id, "finish_reason": result.finish_reason}
    shown |= result.output
    if len(result.outputs) > 1:
        shown["outputs"] = list(result.outputs)
    if result.logprobs is not None:
        shown["tokens"] = list(result.tokens)
        shown["logprobs"] = [dataclasses.asdict(item) for item in result.logprobs]
    shown |= {"seed": result.seed, "request_id": result.request_id}
    shown["metrics"] = dataclasses.asdict(result.metrics)
    if result.warnings:
        shown["warnings"] = list(result.warnings)
    return shown


def failure_json(name: str | None, error: BaseException) -> dict[str, Any]:
    """A failure as an object: its type and message; the raw text of an answer that could not be read."""
    from kestrel.cli.failures import message

    shown: dict[str, Any] = {} if name is None else {"file": name}
    shown["error"] = {"type": type(error).__name__, "message": message(error)}
    if isinstance(error, KestrelError):
        shown["error"]["retryable"] = error.retryable
    return shown


def answer_lines(output: Mapping[str, Any]) -> list[str]:
    """A skill's output as lines of text: an answer, or one line of numbers per point, box or outline."""
    for key in ("answer", "caption", "text"):
        if key in output:
            return [str(output[key])]
    for key, keys in (("points", POINT), ("objects", BOX)):
        if key in output:
            return [_labelled(_numbers(found, keys), found) for found in output[key]]
    if "segments" in output:
        return [
            _numbers(found["bbox"], BOX) + " " + _labelled(found["svg_path"], found)
            for found in output["segments"]
        ]
    return [as_json(output)]


def _numbers(found: Mapping[str, Any], keys: Sequence[str]) -> str:
    return " ".join(f"{found[key]:.{COORDINATE_DIGITS}f}" for key in keys)


def _labelled(text: str, found: Mapping[str, Any]) -> str:
    return f"{text} {found['label']}" if "label" in found else text


def stats_line(metrics: Metrics) -> str:
    """What a request cost, in one line."""
    gaps, decode_s = metrics.output_tokens - 1, metrics.decode_time_ms / 1000.0
    rate = f" ({gaps / decode_s:.0f} tokens/s)" if gaps > 0 and decode_s > 0 else ""
    return (
        f"{metrics.input_tokens} tokens in ({metrics.cached_tokens} cached), {metrics.output_tokens} out; "
        f"first token after {metrics.ttft_ms:.0f} ms (queue {metrics.queue_time_ms:.0f}, "
        f"prefill {metrics.prefill_time_ms:.0f}), decode {metrics.decode_time_ms:.0f} ms{rate}"
    )
