"""A process that decodes pictures for an engine, one after the other, until its input ends. ``processes`` starts it."""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

from kestrel.errors import InvalidMediaError
from kestrel.media.image import decode_image, load_decoders
from kestrel.media.limits import MediaLimits
from kestrel.media.wire import receive, receive_into, say_ready, send

__all__ = ["main", "serve"]


class _RefusedError(Exception):
    """The engine has no memory for the picture; it told its caller already."""


def main() -> None:
    """Serve on standard input and output, as a program."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a decoder prints is no answer
    load_decoders()
    try:
        say_ready(answers)
        serve(sys.stdin.buffer, answers)
    except (EOFError, OSError):
        return


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until they end, with EOFError then.

    A request: label, limits, and the encoded picture. An answer: how many bytes decoding takes, upon which the request
    says whether it may; then the picture, or why there is none.
    """
    while True:
        _answer(requests, answers)  # a picture's memory ends with the call


def _answer(requests: BinaryIO, answers: BinaryIO) -> None:
    header, size = receive(requests)
    raw = bytearray(size)
    receive_into(requests, memoryview(raw))
    limits = MediaLimits(max_image_pixels=header["max_image_pixels"])

    def reserve(nbytes: int) -> None:
        send(answers, {"reserve": nbytes})
        verdict, _ = receive(requests)
        if not verdict["go"]:
            raise _RefusedError

    try:
        image = decode_image(bytes(raw), header["label"], limits, reserve)
    except _RefusedError:
        return
    except InvalidMediaError as error:
        send(answers, {"error": str(error)})
        return
    about = {"shape": image.pixels.shape, "warnings": image.warnings, "original_size": image.original_size}
    send(answers, about, image.pixels.data.cast("B"))
