"""The pool of encoder features: shared, placed side by side, evicted by last use."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kestrel.state import FeaturePool


def pool(rows: int = 10) -> FeaturePool:
    return FeaturePool(rows, 2, device=torch.device("cpu"), dtype=torch.float32)


def rows(count: int, value: float) -> torch.Tensor:
    return torch.full((count, 2), value)


def test_an_item_asked_twice_is_encoded_once():
    features = pool()
    assert features.find("cat") is None
    first = features.put("cat", rows(3, 7.0))
    again = features.find("cat")
    assert again is first
    assert features.tensor[first.start : first.start + 3].eq(7.0).all()
    features.check()


def test_unheld_features_stay_until_their_rows_are_needed():
    features = pool()
    features.release(features.put("cat", rows(4, 1.0)))
    features.release(features.put("dog", rows(4, 2.0)))
    features.release(features.find("cat"))
    assert features.put("cow", rows(5, 3.0)) is not None
    assert features.find("dog") is None, "used longest ago"
    features.check()


def test_held_features_are_never_overwritten():
    features = pool()
    cat = features.put("cat", rows(6, 1.0))
    assert features.allocate("dog", 5) is None
    assert features.tensor[cat.start : cat.start + 6].eq(1.0).all()
    features.release(cat)
    assert features.allocate("dog", 5) is not None


def test_features_that_were_never_written_are_forgotten():
    features = pool()
    features.release(features.allocate("cat", 4))
    assert features.find("cat") is None
    features.check()


def test_what_is_larger_than_the_pool_evicts_nothing():
    features = pool()
    features.release(features.put("cat", rows(4, 1.0)))
    assert features.allocate("film", 11) is None
    assert features.find("cat") is not None


def test_clearing_forgets_what_nobody_holds():
    features = pool()
    features.put("cat", rows(4, 1.0))
    features.release(features.put("dog", rows(4, 2.0)))
    features.clear()
    assert features.find("dog") is None
    assert features.find("cat") is not None
    features.check()


@given(st.lists(st.tuples(st.sampled_from(["show", "release", "clear"]), st.integers(0, 11)), max_size=60))
def test_random_use_keeps_every_held_item_intact(actions):
    features = pool(20)
    held = []
    for action, n in actions:
        if action == "show":
            entry = features.find(n) or features.put(n, rows(n % 7 + 1, float(n)))
            held += [entry] if entry else []
        elif action == "clear":
            features.clear()
        elif held:
            features.release(held.pop(n % len(held)))
        features.check()
        for entry in held:
            assert features.tensor[entry.start : entry.start + entry.rows].eq(float(entry.key)).all()
