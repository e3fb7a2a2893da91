"""Commands about this machine: doctor (what is here and what serves a model's ops), bench (how fast a model is)."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from kestrel.cli.options import ModelOptions

__all__ = ["bench", "doctor"]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def doctor(
    model_name: Annotated[str | None, typer.Argument(metavar="MODEL", help="Also load this model.")] = None,
    *,
    json: Json = False,
    model: ModelOptions,
) -> Coroutine[Any, Any, None]:
    """Show what this machine offers: devices, kernel backends, plugins.

    With a model: also which provider serves each of its ops, and why the others do not.
    """
    from kestrel.cli.diagnosis import diagnose
    from kestrel.cli.inputs import with_name

    return diagnose(with_name(model, model_name), json=json)


def bench(
    model_name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Default: the embedded model.")
    ] = None,
    *,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Length of each prompt, about.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each request writes.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per batch size; the median counts.")] = 3,
    json: Json = False,
    model: ModelOptions,
) -> Coroutine[Any, Any, None]:
    """Measure a model's tokens per second on this machine.

    Prefill, and decode at batch 1 and 8; text only, greedy.
    """
    from kestrel.cli.inputs import with_name
    from kestrel.cli.speed import Plan, measure

    plan = Plan(prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds)
    return measure(with_name(model, model_name), plan, json=json)
