"""The command line. Its front imports neither torch nor plugins; commands import what they need when they run."""

from kestrel.cli.app import main

__all__ = ["main"]
