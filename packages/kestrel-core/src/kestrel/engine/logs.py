"""Log records as strict JSON, for hosts that want them so."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

__all__ = ["JsonFormatter"]


class JsonFormatter(logging.Formatter):
    """One JSON object per log record, with the record's ``kestrel`` fields at top level. Times are ISO 8601 in UTC.

    Strict JSON: numbers that are not finite become null, and what JSON has no form for becomes its ``str``.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = dict(record.__dict__.get("kestrel", {})) | fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(_strict(line), default=str, allow_nan=False)


def _strict(value: Any) -> Any:
    """``value`` without numbers that JSON cannot hold and with strings as keys."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
