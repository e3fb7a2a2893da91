"""What must hold of a lane, whatever happened to it."""

from __future__ import annotations

from kestrel.lanes.token import TokenLane

__all__ = ["check_idle", "check_running"]


def check_running(lane: TokenLane) -> None:
    """AssertionError unless pools and features add up; at any moment between ticks."""
    lane.cache.check()
    if lane.features is not None:
        lane.features.check()


def check_idle(lane: TokenLane) -> None:
    """AssertionError unless ``lane`` holds nothing: no sequence, row, lease, feature or step in flight."""
    check_running(lane)
    assert lane.is_idle, "works are left"
    lane.check_empty()
    held = lane.cache.stats()
    assert held.leases == 0, f"{held.leases} leases are open"
    assert held.pages_live == 0, f"{held.pages_live} pages are held"
    if lane.features is not None:
        lane.features.clear()
        whole = lane.features.allocate("all of it", lane.features.rows)
        assert whole is not None, "features are held"
        lane.features.release(whole)
