"""Lanes drive one model each: ``TokenLane`` all that is autoregressive, ``StepLane`` the rest.

``DeviceThread`` ticks the lanes of one device in turn.
"""

from kestrel.lanes.build import build_token_lane
from kestrel.lanes.device_thread import DeviceThread
from kestrel.lanes.events import Event, Failed, Finished, TokensReady
from kestrel.lanes.lane import Lane
from kestrel.lanes.limits import LaneConfig
from kestrel.lanes.step import StepLane
from kestrel.lanes.token import TokenLane
from kestrel.lanes.trial import launch_memory
from kestrel.lanes.work import StepWork, Work

__all__ = [
    "DeviceThread",
    "Event",
    "Failed",
    "Finished",
    "Lane",
    "LaneConfig",
    "StepLane",
    "StepWork",
    "TokenLane",
    "TokensReady",
    "Work",
    "build_token_lane",
    "launch_memory",
]
