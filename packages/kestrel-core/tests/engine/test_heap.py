"""What lives when a model is ready is left out of collections, and let go of with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kestrel.engine import fleet, heap


class Circle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    heap.thaw()
    gc.unfreeze()


def test_what_lives_is_left_out_until_it_is_thawed() -> None:
    circle = Circle()
    gone = weakref.ref(circle)
    heap.freeze()
    assert gc.get_freeze_count()
    del circle
    gc.collect()
    assert gone() is not None
    heap.thaw()
    gc.collect()
    assert gone() is None
    assert not gc.get_freeze_count()


def test_what_comes_later_is_collected() -> None:
    heap.freeze()
    circle = Circle()
    gone = weakref.ref(circle)
    del circle
    gc.collect()
    assert gone() is None


def test_a_program_that_freezes_by_itself_is_left_alone() -> None:
    gc.freeze()
    circle = Circle()
    gone = weakref.ref(circle)
    heap.freeze()
    del circle
    gc.collect()
    assert gone() is None
    heap.thaw()
    assert gc.get_freeze_count()


async def test_an_engine_freezes_with_its_models_and_thaws_with_them(
    toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "has_streams", lambda device: True)
    async with toys.engine():
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


async def test_a_model_that_is_unloaded_leaves_nothing(toys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "has_streams", lambda device: True)
    async with toys.engine(toys.config("one"), toys.config("two")) as engine:
        slot = engine.fleet.slot("two")
        assert slot.model is not None
        lane = weakref.ref(slot.model.lane)
        async with engine.fleet._change:
            await engine.fleet._unload(slot, "for a test")
        assert lane() is None
        assert gc.get_freeze_count()  # the other one runs


async def test_on_a_cpu_nothing_is_frozen(toys) -> None:
    async with toys.engine():
        assert not gc.get_freeze_count()
