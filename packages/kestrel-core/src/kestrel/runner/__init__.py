"""Stages what a plan decided into device buffers and runs it: F and S, encoders, probes. Schedules nothing."""

from kestrel.runner.decode import DecodeRow, DecodeStage
from kestrel.runner.prefill import ChunkRun
from kestrel.runner.results import Pending, Results
from kestrel.runner.runner import PrefillResult, Runner

__all__ = ["ChunkRun", "DecodeRow", "DecodeStage", "Pending", "PrefillResult", "Results", "Runner"]
