"""A lane that recovers on its device thread, and one that cannot."""

import time

import pytest

from kestrel.errors import KestrelError
from kestrel.lanes.device_thread import DeviceThread
from kestrel.lanes.lane import Lane


class Broken(Lane):
    """Its ticks raise; ``recovers`` says whether that can be helped."""

    def __init__(self, recovers: bool) -> None:
        self.recovers, self.recovered, self.ticks = recovers, 0, 0
        self.fails = True

    def tick(self) -> bool:
        self.ticks += 1
        if self.fails:
            raise RuntimeError("a bug")
        return False

    def recover(self, error: BaseException) -> None:
        self.recovered += 1
        self.fails = False
        if not self.recovers:
            raise RuntimeError("a second bug")

    def abort(self, error: KestrelError) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    next_deadline = None


@pytest.mark.parametrize("recovers", [True, False])
def test_a_lane_that_cannot_recover_is_told_of_and_ticked_no_more(recovers: bool):
    lost = []
    thread = DeviceThread("test")
    thread.on_lost = lambda lane, error: lost.append((lane, str(error)))
    lane, other = Broken(recovers), Broken(True)
    thread.start()
    thread.add(lane)
    thread.add(other)
    end = time.monotonic() + 5
    while not other.recovered or not lane.recovered:
        assert time.monotonic() < end
        time.sleep(0.001)
    before = lane.ticks
    thread.stir()
    thread.call(lambda: None).result(timeout=5)
    thread.call(lambda: None).result(timeout=5)
    assert lost == ([] if recovers else [(lane, "a bug")])
    assert (lane.ticks > before) == recovers
    assert thread.is_alive
    thread.stop()
