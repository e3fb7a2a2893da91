"""The memory that decoded media hold is bounded and always given back."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kestrel.config import RuntimeConfig
from kestrel.errors import CapacityError, EngineBusyError
from kestrel.media import MediaBudget, MediaLimits


def test_limits_come_from_the_engine_settings():
    config = RuntimeConfig(max_image_pixels=5, max_media_bytes=6, allowed_media_domains=["a.test"])
    limits = MediaLimits.of(config)
    assert (limits.max_image_pixels, limits.max_media_bytes) == (5, 6)
    assert limits.allowed_domains == ("a.test",)


def test_full_budget_is_busy_and_free_again_after_release():
    budget = MediaBudget(100)
    budget.acquire(60)
    with pytest.raises(EngineBusyError, match="60 of 100 bytes and 41 more"):
        budget.acquire(41)
    budget.release(60)
    budget.acquire(100)
    assert budget.held_bytes == 100


def test_what_can_never_fit_is_not_busy_but_too_large():
    with pytest.raises(CapacityError, match="max_decoded_media_bytes is 100"):
        MediaBudget(100).acquire(101)


def test_hold_gives_everything_back_also_after_a_failure():
    budget = MediaBudget(100)

    def overfill() -> None:
        with budget.hold() as hold:
            hold.grow(30)
            hold.grow(40)
            assert budget.held_bytes == 70
            hold.grow(31)

    with pytest.raises(EngineBusyError):
        overfill()
    assert budget.held_bytes == 0


def test_threads_never_hold_more_than_the_budget():
    budget = MediaBudget(1000)

    def work(_: int) -> int:
        try:
            with budget.hold() as hold:
                hold.grow(300)
                return budget.held_bytes
        except EngineBusyError:
            return 0

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(500))) <= 1000
    assert budget.held_bytes == 0


def test_a_closed_hold_grows_no_more():
    budget = MediaBudget(10)
    with budget.hold() as hold:
        hold.grow(4)
        assert budget.held_bytes == 4
    hold.grow(4)
    assert (budget.held_bytes, hold.nbytes) == (0, 0)
    hold.close()
    assert budget.held_bytes == 0
