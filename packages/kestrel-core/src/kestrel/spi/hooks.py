"""Markers of the pluggy project ``kestrel``; the hooks themselves are specified in ``kestrel.plugins.hookspecs``."""

from __future__ import annotations

import pluggy

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "kestrel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
