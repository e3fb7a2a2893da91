"""Lanes drive one model each: ``TokenLane`` everything autoregressive, ``StepLane`` the rest; ``DeviceThread`` ticks them."""

from kestrel.lanes.events import Event, Failed, Finished, TokensReady
from kestrel.lanes.work import StepWork, Work

__all__ = ["Event", "Failed", "Finished", "StepWork", "TokensReady", "Work"]
