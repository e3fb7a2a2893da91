"""The test kit: conformance checks and fakes for whoever writes a family, a kernel backend or a host of engines."""

from kestrel.testing.backends import BackendReport, check_backend
from kestrel.testing.capture import CaptureGuard
from kestrel.testing.controlled import ToyControls
from kestrel.testing.engines import ToyFamily, toy_host, write_toy
from kestrel.testing.fakes import ByteTokenizer, EchoPromptFormat, MarkedParser
from kestrel.testing.families import FamilyReport, build_tiny, check_family
from kestrel.testing.graphs import ReplayGraphs
from kestrel.testing.invariants import check_idle, check_running
from kestrel.testing.toys import FakeTokenDriver, ToyHybrid, ToyStep, toy_media

__all__ = [
    "BackendReport",
    "ByteTokenizer",
    "CaptureGuard",
    "EchoPromptFormat",
    "FakeTokenDriver",
    "FamilyReport",
    "MarkedParser",
    "ReplayGraphs",
    "ToyControls",
    "ToyFamily",
    "ToyHybrid",
    "ToyStep",
    "build_tiny",
    "check_backend",
    "check_family",
    "check_idle",
    "check_running",
    "toy_host",
    "toy_media",
    "write_toy",
]
