"""Threads take short turns at the interpreter while an accelerator's device thread runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kestrel.engine import fleet, turns


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(turns.PYTHONS_S)
    yield
    sys.setswitchinterval(before)


def is_short() -> bool:
    return sys.getswitchinterval() == pytest.approx(turns.TURN_S)


async def test_turns_are_short_while_an_engine_runs_on_an_accelerator(
    toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "has_streams", lambda device: True)
    async with toys.engine():
        assert is_short()
    assert sys.getswitchinterval() == pytest.approx(turns.PYTHONS_S)


def test_turns_are_short_until_the_last_engine_stops() -> None:
    turns.shorten()
    turns.shorten()
    turns.lengthen()
    assert is_short()
    turns.lengthen()
    assert not is_short()


async def test_on_a_cpu_turns_are_as_they_were(toys) -> None:
    async with toys.engine():
        assert not is_short()


@pytest.mark.parametrize("chosen", [0.002, turns.TURN_S])
def test_an_interval_that_a_program_chose_stays(chosen: float) -> None:
    sys.setswitchinterval(chosen)
    turns.shorten()
    assert sys.getswitchinterval() == pytest.approx(chosen)
    turns.lengthen()
    assert sys.getswitchinterval() == pytest.approx(chosen)
