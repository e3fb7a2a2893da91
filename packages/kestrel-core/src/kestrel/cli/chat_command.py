"""``kestrel chat``: declares the command; the conversation itself is in ``conversation``."""

from __future__ import annotations

from typing import Annotated

import typer

from kestrel.cli.media_commands import Reasoning
from kestrel.cli.options import ModelOptions, SettingOptions

__all__ = ["chat"]


def chat(
    *,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILES", help="Pictures that the first turn is about.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions before the first turn.")] = None,
    reasoning: Reasoning = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per turn on stdout.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Tokens and times of each turn, on stderr.")] = False,
    model: ModelOptions,
    settings: SettingOptions,
) -> None:
    """Talk with a model, about pictures or anything else.

    Each line of stdin is a turn. Ctrl-C stops an answer; Ctrl-D, or the end of a pipe, ends.
    """
    from kestrel.cli.conversation import Conversation
    from kestrel.cli.inputs import pictures, settings_given
    from kestrel.errors import InvalidRequestError

    if "-" in (files or ()):
        raise InvalidRequestError("chat reads its turns from stdin, so '-' cannot be a picture; name a file")
    images = pictures(files or [])
    for image in images:
        if image.error:
            raise image.error
    conversation = Conversation(
        images=[image.source for image in images],
        system=system,
        reasoning=reasoning,
        settings=settings_given(settings),
        as_json=json,
        stats=stats,
    )
    conversation.hold(model)
