"""Log lines of a command: warnings on stderr, everything with ``--debug``, JSON with ``KESTREL_JSON_LOGS=1``."""

from __future__ import annotations

import logging
import sys

from kestrel.config import Environment

__all__ = ["configure_logs"]


def configure_logs(*, debug: bool) -> None:
    """Send Kestrel's log records to stderr, in place of what an earlier call set up.

    The log line of a failed request stays away unless asked for: the command prints that error itself.
    """
    handler = logging.StreamHandler(sys.stderr)
    json_logs = Environment.read().json_logs
    if json_logs:
        from kestrel.engine.telemetry import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(_LevelFirst())
    kestrel = logging.getLogger("kestrel")
    kestrel.handlers[:] = [handler]
    kestrel.propagate = False
    verbose = debug or json_logs
    kestrel.setLevel(logging.DEBUG if debug else logging.INFO if json_logs else logging.WARNING)
    logging.getLogger("kestrel.request").setLevel(logging.NOTSET if verbose else logging.CRITICAL)


class _LevelFirst(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"
