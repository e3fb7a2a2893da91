"""Stages what a plan decided into device buffers and runs it: F and S, encoders, probes. Schedules nothing."""

from kestrel.runner.buckets import launch_sizes, row_buckets
from kestrel.runner.chunks import ChunkRun
from kestrel.runner.decode import DecodeRow, DecodeStage
from kestrel.runner.prefill import PrefillResult
from kestrel.runner.results import Pending, Results
from kestrel.runner.runner import Runner

__all__ = [
    "ChunkRun",
    "DecodeRow",
    "DecodeStage",
    "Pending",
    "PrefillResult",
    "Results",
    "Runner",
    "launch_sizes",
    "row_buckets",
]
