"""Log lines of a command: warnings on stderr, everything with ``--debug``, JSON with ``KESTREL_JSON_LOGS=1``."""

from __future__ import annotations

import copy
import logging
import sys

from kestrel.config import Environment

__all__ = ["configure_logs"]


def configure_logs(*, debug: bool) -> None:
    """Send Kestrel's log records to stderr, in place of what an earlier call set up.

    The log line of a failed request stays away unless asked for: the command prints that error itself. So do
    tracebacks: a line names its error.
    """
    handler = logging.StreamHandler(sys.stderr)
    json_logs = Environment.read().json_logs
    if json_logs:
        from kestrel.engine.telemetry import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(_LevelFirst() if debug else _OneLine())
    kestrel = logging.getLogger("kestrel")
    kestrel.handlers[:] = [handler]
    kestrel.propagate = False
    verbose = debug or json_logs
    kestrel.setLevel(logging.DEBUG if debug else logging.INFO if json_logs else logging.WARNING)
    logging.getLogger("kestrel.request").setLevel(logging.NOTSET if verbose else logging.CRITICAL)


class _LevelFirst(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


class _OneLine(_LevelFirst):
    def format(self, record: logging.LogRecord) -> str:
        # a copy: what a formatter leaves in a record is seen by every handler behind it
        plain = copy.copy(record)
        plain.exc_info = plain.exc_text = None
        error = record.exc_info[1] if record.exc_info else None
        reason = "" if error is None else f" ({type(error).__name__}: {error}; --debug shows the traceback)"
        return " ".join(f"{super().format(plain)}{reason}".split())
