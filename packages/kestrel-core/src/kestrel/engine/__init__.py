"""The public engine: models, device threads, calls, streams. Everything below is reached through it."""

from kestrel.engine.core import InferenceEngine, ModelHandle
from kestrel.engine.fleet import ProgressReport
from kestrel.engine.media import PreparedMedia
from kestrel.engine.streams import EngineStream
from kestrel.engine.sync import SyncEngine, SyncModel, SyncStream
from kestrel.engine.telemetry import JsonFormatter
from kestrel.types import EngineResult

__all__ = [
    "EngineResult",
    "EngineStream",
    "InferenceEngine",
    "JsonFormatter",
    "ModelHandle",
    "PreparedMedia",
    "ProgressReport",
    "SyncEngine",
    "SyncModel",
    "SyncStream",
]
